"""Evaluation of the times that ranks report for one collective."""

from __future__ import annotations

import math

import pytest

from checklist.run.sweep import sweep
from tests.checklist.run.sessions import ScriptedSession


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 0.0])
def test_an_impossible_duration_of_a_rank_is_recorded_and_not_used(seconds: float) -> None:
    def answer(request_name: str, rank: int, _: object) -> object:
        assert request_name == "time"
        return {"seconds": [0.1, seconds if rank == 1 else 0.1], "wrong": 0, "chosen": None}

    run = ScriptedSession(2, answer)
    run.phase_ends = math.inf
    assert sweep(run, (0, 1)) is None
    assert {(one.rank, one.node) for one in run.results.unsound} == {(1, 1)}
    assert {one.check for one in run.results.unsound} == {"latency", "bandwidth"}
    assert {item.seconds_median for item in run.results.collectives} == {None}
    assert {item.correct for item in run.results.collectives} == {True}
