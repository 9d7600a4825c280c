"""Disruptions have their own budget and waits, and are counted separately from attempts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from decorators import _metaflow
from decorators._metaflow import WaitedJob
from decorators.backends import disruptions, resubmitting
from decorators.backends.disruptions import Disruptions
from decorators.backends.interface import Loss
from decorators.backends.resubmitting import Resubmitting
from launchers.store.bundles import LocalStorage

JOB = WaitedJob(backend="kubernetes", kind="jobset", name="js-1", namespace="n")


class _Bed:
    """A step of run 7 that loses pods, with a simulated clock."""

    def __init__(self, max_disruptions: int, lost: Callable[[], Loss | None]) -> None:
        self.now, self.said, self.waits = 1000.0, list[str](), list[float]()
        self.decide = Resubmitting(
            max_disruptions=max_disruptions,
            lost=lambda _job, _words: lost(),
            report=self.said.append,
            sleep=self.waits.append,
            clock=lambda: self.now,
            _began=self.now,
        )


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disruptions:
    """Records of run 7; this process waits for its step train in attempt 1."""
    storage = LocalStorage(tmp_path)
    monkeypatch.setattr(disruptions, "datastore", lambda: storage)
    monkeypatch.setattr(_metaflow, "waited_attempt", lambda: ("7", "train", 1))
    return Disruptions(storage=storage, run="7")


def test_a_disrupted_job_is_resubmitted_until_the_budget_of_the_run_is_spent(noted: Disruptions) -> None:
    noted.note("prepare", disruptions.Disruption(at=1.0, lost=("pod p on n: deleted",)))
    bed = _Bed(3, lambda: Loss(lines=("pod w-0 on node-a: deleted",)))
    assert [bed.decide(JOB) for _ in range(3)] == [True, True, False]
    assert "Disruption 2 of at most 3" in bed.said[0]
    assert "pod w-0 on node-a: deleted" in bed.said[0]
    assert "--max-disruptions 3" in bed.said[-1]
    assert [each.lost for each in noted.of_step("train")] == [("pod w-0 on node-a: deleted",)] * 3
    assert noted.launch("train", attempt=1) == 4  # what is stored under one number is never written twice


def test_waits_double_up_to_a_minute_while_launches_are_short(noted: Disruptions) -> None:
    bed = _Bed(20, lambda: Loss(lines=("pod w-0 on node-a: deleted",)))
    for _ in range(6):
        bed.decide(JOB)
    bed.now += resubmitting.SHORT_S
    bed.decide(JOB)
    assert bed.waits == [5, 10, 20, 40, 60, 60, 5]


def test_a_failure_counts_as_an_attempt_and_not_as_a_disruption(noted: Disruptions) -> None:
    bed = _Bed(20, lambda: None)
    assert not bed.decide(JOB)
    assert noted.count() == 0
    assert not bed.said
    assert not bed.waits


@pytest.mark.parametrize(("count", "end"), [(4, " a; b; c; d"), (5, " a; b; c; d, and 1 more")])
def test_a_disruption_lists_four_losses_and_counts_all_others(count: int, end: str) -> None:
    assert disruptions.Disruption(at=0.0, lost=tuple("abcde"[:count])).text.endswith(end)
