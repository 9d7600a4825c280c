"""Search for the smallest memory limit: within the resolution and in as few runs as bisection needs."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.on_gpu.search import smallest_limit


@given(
    needs=st.integers(1, 10_000),
    below=st.integers(1, 5000),
    above=st.integers(0, 5000),
    step=st.integers(1, 500),
)
def test_the_interval_contains_the_needed_memory_and_has_the_requested_width(
    needs: int, below: int, above: int, step: int
) -> None:
    trials: list[int] = []

    def trial(limit: int) -> bool:
        trials.append(limit)
        return limit >= needs

    first, last = needs - below, needs + above
    interval = smallest_limit(trial, fails_bytes=first, runs_bytes=last, resolution_bytes=step)
    assert interval.finished
    assert interval.fails_bytes < needs <= interval.runs_bytes
    assert interval.runs_bytes - interval.fails_bytes <= step
    assert interval.trials == len(trials) <= math.ceil(math.log2(max((last - first) / step, 1))) + 1


def test_the_interval_found_before_the_time_limit_is_kept() -> None:
    answers = iter([True, False, None])
    interval = smallest_limit(lambda _: next(answers), fails_bytes=0, runs_bytes=800, resolution_bytes=10)
    assert (interval.fails_bytes, interval.runs_bytes, interval.trials, interval.finished) == (
        200,
        400,
        2,
        False,
    )


def test_nothing_runs_if_the_interval_is_already_narrow() -> None:
    interval = smallest_limit(lambda _: 1 / 0 > 0, fails_bytes=95, runs_bytes=100, resolution_bytes=10)
    assert (interval.runs_bytes, interval.trials, interval.finished) == (100, 0, True)
