"""``--trial``: the best plans run a few steps on the machines of the run; the fastest is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from estimator.calibration import VARIABLE, Store
from tests.conftest import write_sums
from tests.flows.conftest import QUICK, FlowRun
from tests.flows.test_finetune_flow_out_of_memory import HUNGRY

pytestmark = pytest.mark.slow

SHORT = ("--max-steps=6", "--checkpoint-every=3", "--trial=2")


@pytest.mark.nightly
def test_a_plan_that_runs_out_of_memory_in_its_trial_is_reported_and_dropped(
    flow: Callable[..., FlowRun], tmp_path: Path
) -> None:
    (tmp_path / "hungry").mkdir()
    (tmp_path / "hungry" / "sitecustomize.py").write_text(
        HUNGRY.replace("micro_batch_size > 1", "micro_batch_size > 2")
    )
    runs = tmp_path / "runs.jsonl"
    data = write_sums(tmp_path / "sums.jsonl")
    run = flow(
        "run",
        *QUICK,
        *SHORT,
        f"--dataset={data}",
        PYTHONPATH=str(tmp_path / "hungry"),
        **{VARIABLE: str(runs)},
    )
    assert run.returncode == 0, run.output
    assert "trial 1 of 3: micro batch 4 x 1, no checkpointing, 4 steps" in run.output
    assert run.output.count("ran out of memory") == 2
    assert "kept: micro batch 2 x 2, no checkpointing" in run.output
    artifacts = run.artifacts()
    assert artifacts["plan"].layout.micro_batch_size == 2
    assert [trial.out_of_memory for trial in artifacts["outcome"].tried] == [True, True, False]
    tried_plan = artifacts["outcome"].tried[2]
    assert tried_plan.steps == 2
    assert tried_plan.tokens_per_second > 0
    assert [row["step"] for row in artifacts["metrics"]] == list(range(1, 7))
    names = [record.run for record in Store(runs).read().finished]
    assert sum("trial-3" in name for name in names) == 1
    assert len(names) == 2  # that trial, and the run
