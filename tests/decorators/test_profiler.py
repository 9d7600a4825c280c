"""Measurements of a step's profiler."""

from __future__ import annotations

import time

import pytest

from decorators.profiler import Profile


def test_a_clock_that_is_set_back_does_not_change_durations(monkeypatch: pytest.MonkeyPatch) -> None:
    profiler = Profile(plan=None, step="train")
    profiler.start()
    profiler.report(step=1, loss=1.0)
    before = time.time()
    monkeypatch.setattr(time, "time", lambda: before - 3600)
    profiler.report(step=2, loss=1.0)
    profiler.stop()
    assert 0 < profiler.measured().duration_seconds < 3600
    first, second = profiler.state().run.steps
    assert first.dt > 0
    assert second.dt > 0
