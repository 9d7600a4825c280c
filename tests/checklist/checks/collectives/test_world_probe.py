"""Timing of operations between processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from checklist.checks.collectives import world_probe


def test_an_operation_takes_its_own_seconds_and_not_those_of_the_wait_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]

    def spend(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(world_probe, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    cpu = cast("Any", SimpleNamespace(type="cpu"))
    assert world_probe.seconds_of_each(lambda: spend(2), 3, lambda: spend(5), cpu) == [2, 2, 2]
