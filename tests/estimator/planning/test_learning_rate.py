"""Hints on learning rates: two rules from one published run, and none where there is no such run."""

from __future__ import annotations

from typing import Any

import pytest

from estimator import Job
from estimator.models import find
from estimator.planning import learning_rate


def job_of(batch: int, **changes: Any) -> Job:
    return Job(model=find("llama-8b"), global_batch_size=batch, **changes)


@pytest.mark.parametrize("method", ["full", "lora", "qlora", "dora"])
def test_at_the_published_batch_both_rules_give_the_published_rate(method: Any) -> None:
    run = learning_rate.references()[method]
    hints = learning_rate.hints(job_of(run.batch, method=method))
    assert [hint.rule for hint in hints] == ["sqrt", "linear"]
    assert {hint.value for hint in hints} == {run.learning_rate}
    assert all("arXiv" in hint.source and f"batch {run.batch}" in hint.run for hint in hints)
    assert run.source


def test_a_fourfold_batch_doubles_the_sqrt_rate_and_quadruples_the_linear_rate() -> None:
    run = learning_rate.references()["lora"]
    root, linear = learning_rate.hints(job_of(4 * run.batch, method="lora"))
    assert root.value == pytest.approx(2 * run.learning_rate)
    assert linear.value == pytest.approx(4 * run.learning_rate)


def test_a_method_without_a_published_run_gets_no_learning_rate_hint() -> None:
    assert learning_rate.hints(job_of(8, optimizer="sgd")) == ()
    assert learning_rate.hints(job_of(8, task="dpo")) == ()
