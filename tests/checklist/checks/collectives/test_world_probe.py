"""Timing of operations between processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from checklist.checks.collectives import world_probe


def test_the_time_of_an_operation_excludes_the_wait_for_other_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]

    def advance_clock(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(world_probe, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    cpu = cast("Any", SimpleNamespace(type="cpu"))
    assert world_probe.seconds_of_each(lambda: advance_clock(2), 3, lambda: advance_clock(5), cpu) == [
        2,
        2,
        2,
    ]
