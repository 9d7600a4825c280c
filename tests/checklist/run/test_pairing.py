"""Measurement of node pairs from the times reported by both nodes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import pytest

from checklist.round_robin import schedule
from checklist.run.pairing import pairs
from tests.checklist.run.sessions import ScriptedSession
from tests.checklist.runs import facts

NIGHT = 20_000


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 0.0])
def test_an_impossible_duration_of_a_sender_is_recorded_and_makes_no_pair(seconds: float) -> None:
    def answer(request_name: str, rank: int, reported: Mapping[str, Any]) -> Any:
        if request_name == "listen":
            return 4000
        odd = (rank, reported["address"]) == (2, "10.0.0.1")
        return {"seconds": [0.1, seconds] if odd else [0.1] * 5, "bytes": 10**9, "error": None}

    run = ScriptedSession(4, answer)
    assert pairs(run) is None
    assert {(one.check, one.rank, one.node, one.dst) for one in run.results.unsound} == {("pairs", 2, 2, 0)}
    measured = {(pair.src, pair.dst) for pair in run.results.pairs}
    assert len(measured) == 11
    assert (2, 0) not in measured
    assert not any(pair.alone for pair in run.results.pairs), "nobody is suspected by it"


def test_above_32_nodes_a_link_slow_in_screening_is_measured_even_if_no_round_contains_it() -> None:
    nodes, met = 64, {pair for one in schedule(64, night=NIGHT) for pair in one}
    order = sorted(range(nodes), key=lambda rank: f"host-{rank}")  # the same every night
    places = next((a, b) for a in range(nodes) for b in range(a + 1, nodes) if (a, b) not in met)
    slow = order[places[0]], order[places[1]]

    def answer(request_name: str, rank: int, reported: Mapping[str, Any]) -> Any:
        if request_name == "listen":
            return 4000
        if request_name == "store":
            return 29_000
        if request_name == "screen":
            position = reported["position"]
            assert (reported["count"], order[position]) == (nodes, rank)
            meets_slow_link = [{position, (position + d) % nodes} == set(places) for d in range(1, nodes)]
            back = [{position, (position - d) % nodes} == set(places) for d in range(1, nodes)]
            return [0.02 if a or b else 0.01 for a, b in zip(meets_slow_link, back, strict=True)]
        other = int(reported["address"].split(".")[-1]) - 1
        return {"seconds": [0.2 if {rank, other} == set(slow) else 0.1] * 5, "bytes": 10**9, "error": None}

    run = ScriptedSession(nodes, answer)
    run.began_unix = NIGHT * 86_400.0
    assert pairs(run) is None
    alone = {(pair.src, pair.dst) for pair in run.results.pairs if pair.alone}
    assert {slow, slow[::-1]} <= alone
    assert any("4,032 ordered pairs were timed at once" in note for note in run.notes)
    unseen = {(pair.src, pair.dst) for pair in run.results.pairs if not pair.alone}
    assert {slow, slow[::-1]} <= unseen


def test_over_nccl_the_bandwidth_of_gpus_and_nodes_is_stored() -> None:
    def answer(request_name: str, rank: int, reported: Mapping[str, Any]) -> Any:
        if request_name in ("listen", "store"):
            return 4000
        slow = 2.0 if rank == 6 else 1.0
        return {"sent": [0.1 * slow, 0.2], "received": [0.1, 0.2], "bytes": 10**9}

    run = ScriptedSession(8, answer)
    run.device, run.backend = "cuda", "nccl"
    run.nodes = {rank: rank // 4 for rank in range(8)}
    run.results.facts = {rank: facts(rank, 4) for rank in range(8)}
    run.results.facts = {
        rank: dataclasses.replace(fact, gpu_processes=0) for rank, fact in run.results.facts.items()
    }
    assert pairs(run) is None
    reported = {(pair.src, pair.dst): pair for pair in run.results.pairs if not pair.alone}
    assert reported[0, 1].rails == (10.0, 10.0, 10.0, 10.0)
    assert reported[1, 0].rails == (10.0, 10.0, 5.0, 10.0)
    assert reported[1, 0].gbytes_per_s == pytest.approx(20.0)
