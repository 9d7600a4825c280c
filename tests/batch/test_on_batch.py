"""The flows through Metaflow's real client on AWS Batch's interface, each container's command executed.

What a container has is the code package alone: its Python cannot import this project.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from estimator.plan import Plan
from tests.batch.lab import QUEUE, Client, Lab, check_training_job
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


@dataclass(frozen=True, kw_only=True)
class Finetuned:
    """DeepSpeed's LoRA run over two nodes, the second of which was lost once while it trained."""

    run: Client
    committed: int  # the step of the last whole checkpoint by then
    ended_s: float  # how long the other node's container lived after it
    artifacts: dict[str, Any]


@pytest.fixture(scope="module")
def finetuned(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Finetuned:
    home = tmp_path_factory.mktemp("finetune")
    data = write_sums(home / "sums.jsonl")
    where = ["--with", "batch", "--device=cpu", "--nodes=2", "--engine=deepspeed", "--method=lora"]
    run = lab.start(home, "run", *where, f"--dataset={data}", *SHORT)
    run.wait_for(lambda: run.committed(), LIMIT_S)
    (job,) = run.jobs("train_nodes")
    before, lost = run.committed(), time.monotonic()
    job.pods[1].kill()
    run.wait_for(lambda: job.stopped is not None, 300)
    ended = time.monotonic() - lost
    assert run.end(LIMIT_S) == 0, run.log + run.pods_log()
    return Finetuned(run=run, committed=before, ended_s=ended, artifacts=run.artifacts())


def test_tiny_llama_trains_over_two_containers(finetuned: Finetuned) -> None:
    plan: Plan = finetuned.artifacts["plan"]
    assert (plan.target, plan.request.nodes, plan.layout.device) == ("batch", 2, "cpu")
    assert (plan.engine, plan.method) == ("deepspeed", "lora")
    metrics = finetuned.artifacts["metrics"]
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.05
    evaluation = finetuned.artifacts["evaluation"]  # of the exported model, by transformers
    assert evaluation.finetuned.loss < evaluation.base.loss
    assert "world 2, scheduler batch" in finetuned.run.log
    assert len({pod.ip for pod in finetuned.run.jobs("train_nodes")[-1].pods}) == 2


def test_a_lost_node_ends_the_others_soon_and_the_next_attempt_goes_on_from_the_checkpoint(
    finetuned: Finetuned,
) -> None:
    first, second = finetuned.run.jobs("train_nodes")
    assert (first.status, second.status) == ("FAILED", "SUCCEEDED")
    assert first.stop is None, "the main node's task has ended by itself"
    assert finetuned.ended_s < 240, "of which its task needs seconds on a machine that does nothing else"
    (gone_on,) = re.findall(r"from the checkpoint of step (\d+)", finetuned.run.log)
    assert int(gone_on) >= finetuned.committed >= EVERY
    assert "Traceback" not in finetuned.run.log


def test_the_cards_of_both_nodes_and_of_the_evaluation_arrive(finetuned: Finetuned) -> None:
    cards = json.loads(finetuned.run.ask(READ_CARDS, f"FinetuneFlow/{finetuned.run.run_id}"))
    steps = sorted(name.partition("/")[0] for name in cards)
    assert steps == ["evaluate", "train_nodes", "train_nodes"]
    assert all("Card render failed" not in page and len(page) > 100_000 for page in cards.values())


def test_the_jobs_request_what_was_planned(finetuned: Finetuned) -> None:
    check_training_job(finetuned.run.jobs("train_nodes")[0], finetuned.artifacts["plan"])
    assert [len(job.nodes) for job in finetuned.run.jobs("evaluate")] == [1]


def test_the_checklist_measures_two_containers_and_judges_them(lab: Lab, tmp_path: Path) -> None:
    options = ["--with", "batch", "--nodes=2", "--device=cpu", "--profile=quick"]
    run = lab.start(tmp_path, "run", *options, flow=FLOW.with_name("checklist_flow.py"))
    code = run.end(LIMIT_S)
    found = run.artifacts("ChecklistFlow")
    assert found["cluster"] == f"batch:us-east-1/{QUEUE}"
    assert len(found["result"]["nodes"]) == 2, run.log + run.pods_log()
    assert found["result"]["verdict"] in ("PASS", "WARN"), run.log
    assert code == 0, run.log
    assert (len(found["healthy_nodes"]), found["bad_nodes"]) == (2, [])
    cards = json.loads(run.ask(READ_CARDS, f"ChecklistFlow/{run.run_id}"))
    assert [name.partition("/")[0] for name in cards] == ["verdict"]
