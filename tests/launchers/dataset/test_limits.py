"""Batches, orders and lines of progress at their limits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from launchers.dataset.measured import batches_by_length
from launchers.dataset.order import GROUPED_BATCHES, grouped_by_length
from launchers.dataset.progress import EVERY_S, Progress


class Rows:
    """Rows of those lengths; a pair has two."""

    def __init__(self, *lengths: tuple[int, ...]) -> None:
        self._lengths = lengths

    def row(self, index: int) -> Any:
        return SimpleNamespace(lengths=np.array(self._lengths[index]))


@pytest.mark.parametrize(
    ("max_tokens", "max_rows", "expected"),
    [
        (30, None, [[1, 2, 0]]),
        (29, None, [[1, 2], [0]]),
        (30, 2, [[1, 2], [0]]),
        (30, 3, [[1, 2, 0]]),
        (9, None, [[1], [2], [0]]),
    ],
)
def test_a_batch_fills_its_tokens_and_rows_exactly(
    max_tokens: int, max_rows: int | None, expected: list[list[int]]
) -> None:
    rows = Rows((8,), (10,), (5, 4))  # a pair is two sequences as wide as its longer one
    assert list(batches_by_length(rows, range(3), max_tokens, max_rows)) == expected
    assert list(batches_by_length(rows, [], max_tokens, max_rows)) == []


@pytest.mark.parametrize(("seconds", "printed"), [(EVERY_S, True), (EVERY_S - 0.01, False)])
def test_progress_is_said_every_five_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seconds: float, printed: bool
) -> None:
    now = [0.0]
    monkeypatch.setattr("launchers.dataset.progress.time.monotonic", lambda: now[0])
    line = Progress("reading", 100)
    now[0] = seconds
    line.at(50)
    assert bool(capsys.readouterr().err) == printed
    now[0] = 2 * EVERY_S - 0.02
    line.at(60)
    assert bool(capsys.readouterr().err) != printed


@pytest.mark.parametrize(
    ("seconds", "share", "left"),
    [(119.4, 0.5, "119 s"), (182.0, 0.5, "3 min"), (60.0, 1.5, "0.0 s")],
)
def test_the_time_that_is_left_is_in_minutes_from_two_on(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seconds: float,
    share: float,
    left: str,
) -> None:
    now = [0.0]
    monkeypatch.setattr("launchers.dataset.progress.time.monotonic", lambda: now[0])
    line = Progress("reading")
    now[0] = seconds
    line.at(1, lambda: share)
    assert capsys.readouterr().err.strip().endswith(f", {left} left")


def test_rows_are_sorted_within_a_quarter_of_an_epoch_and_at_most_fifty_batches() -> None:
    for rows, stretch in ((64, 16), (4 * (GROUPED_BATCHES + 10), GROUPED_BATCHES)):
        lengths = np.arange(rows)
        order = grouped_by_length(np.arange(rows, dtype=np.int32), lengths, 1, seed=0)
        places = np.arange(rows) // stretch
        assert (order // stretch == places).all()
        assert (order != np.arange(rows)).any()
