"""The smallest limit: found within the resolution, and in as few runs as halving takes."""

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
    asked: list[int] = []

    def trial(limit: int) -> bool:
        asked.append(limit)
        return limit >= needs

    first, last = needs - below, needs + above
    found = smallest_limit(trial, fails_bytes=first, runs_bytes=last, resolution_bytes=step)
    assert found.finished
    assert found.fails_bytes < needs <= found.runs_bytes
    assert found.runs_bytes - found.fails_bytes <= step
    assert found.trials == len(asked) <= math.ceil(math.log2(max((last - first) / step, 1))) + 1


def test_the_interval_found_before_the_time_limit_is_kept() -> None:
    answers = iter([True, False, None])
    found = smallest_limit(lambda _: next(answers), fails_bytes=0, runs_bytes=800, resolution_bytes=10)
    assert (found.fails_bytes, found.runs_bytes, found.trials, found.finished) == (200, 400, 2, False)


def test_nothing_runs_if_the_interval_is_already_narrow() -> None:
    found = smallest_limit(lambda _: 1 / 0 > 0, fails_bytes=95, runs_bytes=100, resolution_bytes=10)
    assert (found.runs_bytes, found.trials, found.finished) == (100, 0, True)
