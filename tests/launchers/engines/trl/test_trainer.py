"""GRPO through TRL: the reward rises, and every process reports.

That a run goes on from its checkpoint and what it leaves loads: tests/launchers/engines/methods.py.
"""

from __future__ import annotations

import dataclasses
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from launchers.gang.job import TrainJob
from launchers.report.telemetry import Step
from tests.launchers.engines import ranks
from tests.launchers.engines.loop import runs
from tests.launchers.engines.trl import toy

pytestmark = pytest.mark.slow
STEPS = 30


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grpo")
    toy.make(folder)
    return folder


def rewards(steps: list[Step]) -> list[float]:
    return [step.metrics["reward"] for step in steps if step.metrics is not None]


@pytest.mark.nightly
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_reward_rises_over_thirty_steps(model_folder: Path, nodes: int) -> None:
    # Each of two nodes has two prompts, too: with one, some seeds learn too little in so few steps
    answers = toy.ANSWERS * nodes
    job = toy.job(model_folder, f"full-{nodes}", "full", world=nodes, steps=STEPS, answers=answers)
    layout = dataclasses.replace(job.plan.layout, nodes=nodes, processes_per_node=1)
    job = dataclasses.replace(job, plan=dataclasses.replace(job.plan, layout=layout))
    runs.run_nodes([dataclasses.replace(job, work_dir=job.work_dir / str(node)) for node in range(nodes)])
    steps = runs.steps(dataclasses.replace(job, work_dir=job.work_dir / "0"))
    rewards_seen = rewards(steps)
    assert len(rewards_seen) == STEPS
    assert sum(rewards_seen[-5:]) / 5 > sum(rewards_seen[:5]) / 5 + toy.LEARNT, rewards_seen
    assert all(step.all_tokens for step in steps)


def test_both_processes_of_a_node_report_their_steps(model_folder: Path) -> None:
    job = toy.job(model_folder, "adapted", "lora", world=2, steps=2)
    first, second = runs.run(job), runs.steps(job, rank=1)
    assert [step.step for step in first] == [step.step for step in second] == [1, 2]
    assert {"kl", "reward_std", "answer_tokens"} <= set(first[-1].metrics or {})
    assert {step.loss for step in second} == {None}
    assert all(step.samples == toy.ANSWERS // 2 for step in [*first, *second])


def train_counted(job: TrainJob) -> None:
    """Train and write figures.

    How often DDP reduced a bucket of gradients, the optimizer's ``fused``, and how many DDP objects exist
    when the process group is destroyed.
    """
    from launchers.engines.trl import trainer

    reduced: list[int] = []

    def reduce(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        reduced.append(bucket.index())
        return allreduce_hook(dist.group.WORLD, bucket)

    wrappers: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
    left: list[int] = []
    destroy = dist.destroy_process_group

    def destroy_counted() -> None:
        left.append(len(wrappers))
        destroy()

    dist.destroy_process_group = destroy_counted  # type: ignore[assignment]

    class Counted(DistributedDataParallel):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            wrappers.add(self)
            self.register_comm_hook(None, lambda _, bucket: reduce(bucket))  # torch reads annotations

    torch.nn.parallel.DistributedDataParallel = Counted  # type: ignore[misc]
    built = trainer.optimizer.build
    fused: list[bool] = []

    def build(*arguments: Any) -> list[torch.optim.Optimizer]:
        optimizers = built(*arguments)
        fused.extend(optimizer.defaults["fused"] for optimizer in optimizers)
        return optimizers

    trainer.optimizer.build = build
    trainer.train(job)
    counted = {"reduced": len(reduced), "fused": fused, "left": left}
    (job.work_dir / "counted.json").write_text(json.dumps(counted))


def test_one_process_has_no_wrapper_and_two_reduce_gradients_in_the_last_pass_and_free_ddp_before_the_group(
    model_folder: Path,
) -> None:
    def reduced(world: int, accumulation: int) -> int:
        job = toy.job(model_folder, f"counted-{world}-{accumulation}", "full", world=world, steps=2)
        layout = dataclasses.replace(
            job.plan.layout,
            accumulation=accumulation,
            micro_batch_size=toy.ANSWERS // world // accumulation,
        )
        job = dataclasses.replace(job, plan=dataclasses.replace(job.plan, layout=layout))
        done = ranks.train([job], entry=f"{__name__}:{train_counted.__name__}")
        assert done.returncode == 0, done.stderr[-6000:]
        counted = runs.read_json(job.work_dir / "counted.json")
        assert counted["fused"] == [True]
        assert counted["left"] == [0]
        return int(counted["reduced"])

    assert reduced(1, 2) == 0
    in_one_pass = reduced(2, 1)
    assert in_one_pass >= 2
    assert reduced(2, 4) == in_one_pass


def test_a_reward_that_is_not_a_number_ends_the_run_with_the_line_of_the_users_code(
    model_folder: Path,
) -> None:
    (model_folder / "late.py").write_text("def late(prompt, answer):\n    return float('nan')\n")
    job = toy.job(
        model_folder,
        "late",
        "full",
        world=1,
        steps=1,
        of=STEPS,
        rl={"reward": f"{model_folder}/late.py:late"},
    )
    done = ranks.train([job])
    assert done.returncode != 0
    assert "late.py:late returned nan, for the answer" in done.stderr.strip().splitlines()[-2]
