"""fp16 with loss scaling: losses of fp32, overflows that skip a step, and a scale kept by checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from estimator.engines import fp16
from launchers.dataset.batches import collate, summed_cross_entropy
from launchers.engines.fsdp2 import checkpoint, sharding
from launchers.gang.job import TrainJob
from launchers.gang.rank import RankEnv
from tests.launchers.engines.loop import families, runs

pytestmark = pytest.mark.usefixtures("alone")
CPU = torch.device("cpu")
LABELS = 40


@pytest.fixture
def alone() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def job_of(folder: Path, precision: str, **options: Any) -> TrainJob:
    settings = {"method": "lora", "optimizer": {"lr": 1e-2}}
    options = {"world": 1, "sharding": "none", "settings": settings, "precision": precision} | options
    return runs.make_job(folder, folder / "model", folder, steps=4, engine="fsdp2", **options)


def load(job: TrainJob) -> sharding.FsdpModel:
    return sharding.FullyShard().load(job, RankEnv.read(), CPU)


def train(model: sharding.FsdpModel, steps: list[int]) -> list[float]:
    losses = []
    for step in steps:
        batch = collate(runs.documents(2, seed=step), 0)
        loss = summed_cross_entropy(model.logits(**batch.inputs), batch.labels)
        model.backward(loss, LABELS, last=True)
        model.update()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("family", fp16.FAMILIES)
def test_losses_are_those_of_fp32_within_the_digits_of_fp16(tmp_path: Path, family: str) -> None:
    families.network(family).save_pretrained(tmp_path / "model")
    in_fp32 = train(load(job_of(tmp_path, "fp32")), [0, 1, 0])
    assert in_fp32[2] < in_fp32[0] - 0.01
    assert train(load(job_of(tmp_path, "fp16-mixed")), [0, 1, 0]) == pytest.approx(in_fp32, rel=1e-3)


def test_a_step_whose_gradients_overflow_changes_the_scale_alone_and_a_checkpoint_keeps_it(
    tmp_path: Path,
) -> None:
    runs.make_model(tmp_path / "model")
    model = load(job_of(tmp_path, "fp16-mixed", settings={"method": "full"}))
    train(model, [0])
    model._scaler.load_state_dict(model._scaler.state_dict() | {"scale": 2.0**40})
    weights = [parameter.detach().clone() for parameter in model.module.parameters()]
    train(model, [1])
    assert all(map(torch.equal, weights, model.module.parameters()))
    assert model._scaler.get_scale() == 2.0**39

    model._scaler.load_state_dict(model._scaler.state_dict() | {"scale": 2.0**10})
    env = RankEnv.read()
    job = job_of(tmp_path, "fp16-mixed", settings={"method": "full"})
    model.save_checkpoint(job, env, 2)
    resumed_job = job_of(
        tmp_path, "fp16-mixed", settings={"method": "full"}, resume_dir=job.checkpoint_dir(2), start_step=2
    )
    resumed = load(resumed_job)
    assert resumed._scaler.state_dict() == model._scaler.state_dict()
    assert train(resumed, [2, 3]) == train(model, [2, 3])


def test_only_fp16_scales_the_loss(tmp_path: Path) -> None:
    runs.make_model(tmp_path / "model")
    model = load(job_of(tmp_path, "bf16-mixed"))
    assert "scaler" not in checkpoint._state(model.module, model._steps, None, model._scaler)
