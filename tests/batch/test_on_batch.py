"""The flows through the real Metaflow client on the interface of AWS Batch; container commands are executed.

What a container has is the code package alone: its Python cannot import this project.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from estimator.plan import Plan
from tests.batch.lab import QUEUE, Lab, check_training_job
from tests.conftest import write_sums
from tests.flows.conftest import FLOW
from tests.kubernetes.test_on_a_control_plane import READ_CARDS

# test_faults.py runs the flow on two nodes, with ranks that don't train; tests/kubernetes trains on two pods.
pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(3600)]

STEPS, EVERY = 24, 3
LIMIT_S = 1500  # two minutes on a machine that does nothing else
SHORT = [
    f"--max-steps={STEPS}",
    f"--checkpoint-every={EVERY}",
    "--epochs=2",
    "--global-batch-size=4",
    "--seq-len=128",
    "--set=evaluation.generations=0",
    "--set=evaluation.fraction=0.1",
]


def test_a_run_on_two_containers_resumes_after_one_is_lost_and_is_evaluated(lab: Lab, tmp_path: Path) -> None:
    """DeepSpeed's LoRA; the second container is lost once while it trains."""
    data = write_sums(tmp_path / "sums.jsonl")
    launch_arguments = ["--with", "batch", "--device=cpu", "--nodes=2", "--engine=deepspeed", "--method=lora"]
    run = lab.start(tmp_path, "run", *launch_arguments, f"--dataset={data}", *SHORT)
    run.wait_for(lambda: run.committed(), LIMIT_S)
    (job,) = run.jobs("train_nodes")
    committed, lost = run.committed(), time.monotonic()
    job.pods[1].kill()
    run.wait_for(lambda: job.stopped is not None, 300)
    assert time.monotonic() - lost < 240, "its task needs seconds on a machine that does nothing else"
    assert run.end(LIMIT_S) == 0, run.log + run.pods_log()
    artifacts = run.artifacts()
    plan: Plan = artifacts["plan"]
    assert (plan.target, plan.request.nodes, plan.engine, plan.method) == ("batch", 2, "deepspeed", "lora")
    assert [row["step"] for row in artifacts["metrics"]] == list(range(1, STEPS + 1))
    assert artifacts["metrics"][-1]["loss"] < artifacts["metrics"][0]["loss"] - 0.05
    evaluation = artifacts["evaluation"]  # of the exported model, by transformers
    assert evaluation.finetuned.loss < evaluation.base.loss
    assert "world size 2, scheduler batch" in run.log
    first, second = run.jobs("train_nodes")
    assert (first.status, second.status) == ("FAILED", "SUCCEEDED")
    assert first.stop is None, "the main node's task has ended by itself"
    assert len({pod.ip for pod in second.pods}) == 2
    (resumed,) = re.findall(r"from the checkpoint of step (\d+)", run.log)
    assert int(resumed) >= committed >= EVERY
    assert "Traceback" not in run.log
    check_training_job(first, plan)
    assert [len(each.nodes) for each in run.jobs("evaluate")] == [1]
    cards = json.loads(run.run_client(READ_CARDS, f"FinetuneFlow/{run.run_id}"))
    steps = sorted(f"{step} {card}" for step, _, card in (name.split("/") for name in cards))
    latest, earlier = ["train_nodes finetune"] * 2, ["train_nodes finetune_attempt_0"] * 2
    assert steps == ["evaluate finetune", *latest, *earlier]
    assert all("Card render failed" not in page and len(page) > 100_000 for page in cards.values())


def test_the_checklist_measures_two_containers_and_judges_them(lab: Lab, tmp_path: Path) -> None:
    options = ["--with", "batch", "--nodes=2", "--device=cpu", "--profile=quick"]
    run = lab.start(tmp_path, "run", *options, flow=FLOW.with_name("checklist_flow.py"))
    code = run.end(LIMIT_S)
    artifacts = run.artifacts("ChecklistFlow")
    assert artifacts["cluster"] == f"batch:us-east-1/{QUEUE}"
    assert len(artifacts["result"]["nodes"]) == 2, run.log + run.pods_log()
    assert artifacts["result"]["verdict"] in ("PASS", "WARN"), run.log
    assert code == 0, run.log
    assert (len(artifacts["healthy_nodes"]), artifacts["bad_nodes"]) == (2, [])
    cards = json.loads(run.run_client(READ_CARDS, f"ChecklistFlow/{run.run_id}"))
    assert [name.partition("/")[0] for name in cards] == ["verdict"]
