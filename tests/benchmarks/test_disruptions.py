"""The table of what disruptions cost, and how rows that are measured anew take the place of earlier ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import disruptions
from benchmarks.disruptions import Late, Row

DELETED = Row(
    what="worker deleted",
    times=3,
    ended=True,
    lost_seconds=(25.0, 31.0, 44.0),
    waited_seconds=(5.0, 10.0, 20.0),
    steps_twice=0,
    losses_equal=True,
)
LATE = Late(
    late_seconds=600.0,
    said=11,
    reason="waits for 10 min (1 of 2 nodes run): 0/1 nodes are available",
    trained_after_seconds=21.4,
    ended=True,
    losses_equal=False,
)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(disruptions, "RESULTS", tmp_path)
    return tmp_path / "disruptions.md"


def test_the_seconds_lost_have_a_median_with_and_without_the_wait(results: Path) -> None:
    disruptions.keep("rows", DELETED)
    disruptions.keep("late", LATE)
    lines = results.read_text().splitlines()
    assert "| worker deleted | 3 | 3 | yes | 31 | 44 | 21 | 0 | yes |" in lines
    assert f"| 600 | 11 | {LATE.reason} | 21 | yes | no |" in lines


def test_a_row_that_is_measured_anew_replaces_its_own_alone(results: Path) -> None:
    disruptions.keep("rows", DELETED)
    disruptions.keep("rows", Row(**{**vars(DELETED), "times": 10}))
    disruptions.keep("rows", Row(**{**vars(DELETED), "steps_twice": 7}))
    rows = [line for line in results.read_text().splitlines() if line.startswith("| worker")]
    assert rows == [
        "| worker deleted | 10 | 3 | yes | 31 | 44 | 21 | 0 | yes |",
        "| worker deleted | 3 | 3 | yes | 31 | 44 | 21 | 7 | yes |",
    ]
