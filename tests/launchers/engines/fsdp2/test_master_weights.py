"""Mixed precision in one process equals fully_shard; fp16 scales the loss."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from estimator.engines import fp16
from estimator.engines.setups import setup_of
from estimator.job import Job
from estimator.memory.states import states as states_of
from estimator.models import resolve
from estimator.plan import Layout
from launchers.dataset.batches import collate, summed_cross_entropy
from launchers.engines.fsdp2 import checkpoint, sharding
from launchers.gang.job import TrainJob
from launchers.gang.rank import RankEnv
from tests.launchers.engines.loop import families, runs

CPU = torch.device("cpu")
STEPS = 2
LABELS = 40  # counted in a step


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def loaded(folder: Path, method: str, **options: Any) -> sharding.FsdpModel:
    job = runs.make_job(
        folder,
        folder / "model",
        folder,
        steps=STEPS,
        world=1,
        engine="fsdp2",
        sharding="none",
        precision="bf16-mixed",
        settings={"method": method},
        **options,
    )
    return sharding.FullyShard().load(job, RankEnv.read(), CPU)


def trained(model: sharding.FsdpModel) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and gradient norms of steps with two micro batches, and the weights after them."""
    figures = []
    for step in range(STEPS):
        for micro in (0, 1):
            batch = collate(runs.documents(2, seed=2 * step + micro), 0)
            loss = summed_cross_entropy(model.logits(**batch.inputs), batch.labels)
            model.backward(loss, 40, last=micro == 1)
            figures.append(loss.item())
        norm = model.update()
        assert norm is not None
        figures.append(norm.item())
    weights = {name: each for name, each in model.module.named_parameters() if each.requires_grad}
    return figures, {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
        for name, each in weights.items()
    }


@pytest.mark.parametrize(("method", "activation_checkpointing"), [("full", True), ("lora", False)])
def test_losses_norms_and_weights_equal_those_under_fully_shard_bit_by_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, *, activation_checkpointing: bool
) -> None:
    runs.make_model(tmp_path / "model")
    alone = loaded(tmp_path, method, activation_checkpointing=activation_checkpointing)
    assert not any(isinstance(each, FSDPModule) for each in alone.module.modules())
    figures, weights = trained(alone)
    assert {each.dtype for each in weights.values()} == {torch.float32}
    monkeypatch.setattr(sharding, "_uses_fully_shard", lambda _: True)
    wrapped = loaded(tmp_path, method, activation_checkpointing=activation_checkpointing)
    assert any(isinstance(each, FSDPModule) for each in wrapped.module.modules())
    expected, expected_weights = trained(wrapped)
    assert figures == expected
    assert weights.keys() == expected_weights.keys()
    assert all(torch.equal(weights[name], expected_weights[name]) for name in weights)


def test_matrix_products_run_in_bf16_and_the_optimizer_keeps_fp32_weights(tmp_path: Path) -> None:
    runs.make_model(tmp_path / "model")
    model = loaded(tmp_path, "full")
    batch = collate(runs.documents(2), 0)
    logits = model.logits(**batch.inputs)
    assert logits.dtype == torch.bfloat16
    assert {each.dtype for each in model.module.parameters()} == {torch.bfloat16}
    model.backward(summed_cross_entropy(logits, batch.labels), 40, last=True)
    model.update()
    assert {each.dtype for each in model.module.parameters()} == {torch.float32}
    [torch_optimizer] = model._optimizers
    assert {state["exp_avg"].dtype for state in torch_optimizer.state.values()} == {torch.float32}


@pytest.mark.parametrize("method", ["full", "lora"])
def test_training_states_have_the_estimated_bytes(tmp_path: Path, method: str) -> None:
    runs.make_model(tmp_path / "model")
    model = loaded(tmp_path, method)
    batch = collate(runs.documents(2), 0)
    for _ in range(2):  # after a step the optimizer has its states
        model.backward(summed_cross_entropy(model.logits(**batch.inputs), batch.labels), 40, last=True)
        held = model._masters
        assert held is not None
        tensors = [*model.module.parameters(), *held._masters, *held._sums.values()]
        states = [state for torch_optimizer in model._optimizers for state in torch_optimizer.state.values()]
        tensors += [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
        counted = sum(each.nbytes for each in tensors)
        model.update()
    layout = Layout(
        device="cpu",
        nodes=1,
        processes_per_node=1,
        sharding="none",
        micro_batch_size=2,
        accumulation=1,
        seq_len=128,
        activation_checkpointing=False,
        precision="bf16-mixed",
        optimizer="adamw",
    )
    job = Job(model=resolve(str(tmp_path / "model")).spec, engine="fsdp2", method=method, seq_len=128)  # type: ignore[arg-type]
    assert counted == pytest.approx(sum(states_of(setup_of(job, layout)).values()), rel=0.01)


# fp16 with loss scaling


def job_of(folder: Path, precision: str, **options: Any) -> TrainJob:
    settings = {"method": "lora", "optimizer": {"lr": 1e-2}}
    options = {"world": 1, "sharding": "none", "settings": settings, "precision": precision} | options
    return runs.make_job(folder, folder / "model", folder, steps=4, engine="fsdp2", **options)


def load(job: TrainJob) -> sharding.FsdpModel:
    return sharding.FullyShard().load(job, RankEnv.read(), CPU)


def losses_of(model: sharding.FsdpModel, steps: list[int]) -> list[float]:
    losses = []
    for step in steps:
        batch = collate(runs.documents(2, seed=step), 0)
        loss = summed_cross_entropy(model.logits(**batch.inputs), batch.labels)
        model.backward(loss, LABELS, last=True)
        model.update()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("family", fp16.FAMILIES)
def test_fp16_losses_equal_fp32_losses_within_fp16_precision(tmp_path: Path, family: str) -> None:
    families.network(family).save_pretrained(tmp_path / "model")
    in_fp32 = losses_of(load(job_of(tmp_path, "fp32")), [0, 1, 0])
    assert in_fp32[2] < in_fp32[0] - 0.01
    assert losses_of(load(job_of(tmp_path, "fp16-mixed")), [0, 1, 0]) == pytest.approx(in_fp32, rel=1e-3)


def test_a_gradient_overflow_only_lowers_the_loss_scale_and_a_checkpoint_stores_the_scale(
    tmp_path: Path,
) -> None:
    runs.make_model(tmp_path / "model")
    model = load(job_of(tmp_path, "fp16-mixed", settings={"method": "full"}))
    losses_of(model, [0])
    model._scaler.load_state_dict(model._scaler.state_dict() | {"scale": 2.0**40})
    weights = [parameter.detach().clone() for parameter in model.module.parameters()]
    losses_of(model, [1])
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
    assert losses_of(resumed, [2, 3]) == losses_of(model, [2, 3])


def test_only_fp16_scales_the_loss(tmp_path: Path) -> None:
    runs.make_model(tmp_path / "model")
    model = load(job_of(tmp_path, "bf16-mixed"))
    assert "scaler" not in checkpoint._state(model.module, model._optimizers, None, model._scaler)
