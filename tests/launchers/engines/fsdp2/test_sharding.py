"""FSDP2 in gangs of processes on CPUs, beside DeepSpeed and beside itself in other layouts."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from launchers import engines
from launchers.gang.job import TrainJob
from launchers.models import causal
from tests.launchers.engines.loop import families, runs

pytestmark = pytest.mark.slow
STEPS = 6
CLOSE = 2e-6  # relative; the order of a sum of fp32 differs between layouts


@pytest.fixture(scope="module", params=["full", "lora"])
def whole(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path, data: Path
) -> TrainJob:
    """A run on two processes that others are compared with, done; with a checkpoint after half its steps."""
    settings = {"method": request.param}
    job = fsdp(tmp_path_factory.mktemp("whole"), model, data, settings=settings, checkpoint_every=3)
    runs.run(job)
    return job


def fsdp(work: Path, model: Path, data: Path, *, replicate: int = 1, **options: Any) -> TrainJob:
    values = {"steps": STEPS, "engine": "fsdp2", "sharding": "fsdp"} | options
    job = runs.make_job(work, model, data, **values)
    layout = dataclasses.replace(job.plan.layout, replicate=replicate)
    return dataclasses.replace(job, plan=dataclasses.replace(job.plan, layout=layout))


def losses(job: TrainJob) -> list[float]:
    return runs.losses(runs.steps(job))


def test_it_trains_as_deepspeed_does(tmp_path: Path, whole: TrainJob) -> None:
    settings = {"method": whole.plan.method}
    zero = runs.make_job(tmp_path, whole.model_dir, whole.data_dir, steps=STEPS, settings=settings)
    runs.run(zero)
    assert losses(whole) == pytest.approx(losses(zero), rel=CLOSE)
    norms = [[step.grad_norm for step in runs.steps(job)] for job in (whole, zero)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    rates = [[step.lr for step in runs.steps(job)] for job in (whole, zero)]
    assert rates[0] == pytest.approx(rates[1])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"world": 1, "micro": 4, "sharding": "none"}, marks=pytest.mark.nightly),
        {"sharding": "shard_grad_op", "micro": 1, "accumulation": 2},
        pytest.param({"replicate": 2}, marks=pytest.mark.nightly),
        pytest.param({"world": 4, "micro": 1, "replicate": 2}, marks=pytest.mark.nightly),
        {"world": 4, "micro": 1, "replicate": 2, "sharding": "shard_grad_op"},
        pytest.param({"offload": "cpu"}, marks=pytest.mark.nightly),
        pytest.param({"activation_checkpointing": True}, marks=pytest.mark.nightly),
        {"activation_checkpointing": True, "settings": {"recompute": {"what": "selective"}}},
    ],
    ids=[
        *("one", "grad-op", "undivided", "hybrid", "hybrid-grad-op", "offload"),
        *("checkpointing", "selective"),
    ],
)
def test_no_layout_changes_the_losses(tmp_path: Path, whole: TrainJob, options: dict[str, Any]) -> None:
    settings = {"method": whole.plan.method} | options.get("settings", {})
    job = fsdp(tmp_path, whole.model_dir, whole.data_dir, **options | {"settings": settings})
    runs.run(job)
    assert losses(job) == pytest.approx(losses(whole), rel=CLOSE)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on CPUs")
@pytest.mark.nightly
def test_compiled_blocks_train_as_others_do(tmp_path: Path, model: Path, data: Path) -> None:
    settings = {"compile": True, "recompute": {"what": "selective"}}
    found = [
        runs.losses(
            runs.run(fsdp(tmp_path / name, model, data, activation_checkpointing=True, settings=values))
        )
        for name, values in (("plain", {}), ("compiled", settings))
    ]
    assert found[1] == pytest.approx(found[0], rel=CLOSE)


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_mixed_precision_trains_as_fp32_but_for_bf16s_digits(
    tmp_path: Path, whole: TrainJob, world: int
) -> None:
    options = {"world": world, "micro": 4 // world, "sharding": "none" if world == 1 else "fsdp"}
    settings = {"method": whole.plan.method}
    job = fsdp(
        tmp_path, whole.model_dir, whole.data_dir, settings=settings, precision="bf16-mixed", **options
    )
    runs.run(job)
    assert losses(job) == pytest.approx(losses(whole), rel=1e-3)
    assert losses(job) != losses(whole)


@pytest.mark.parametrize("method", ["full", pytest.param("lora", marks=pytest.mark.nightly)])
def test_one_process_in_mixed_precision_goes_on_bit_by_bit_and_on_two(
    tmp_path: Path, model: Path, data: Path, method: str
) -> None:
    alone = fsdp(
        tmp_path / "alone",
        model,
        data,
        world=1,
        micro=4,
        sharding="none",
        precision="bf16-mixed",
        checkpoint_every=3,
        settings={"method": method},
    )
    runs.run(alone)
    assert runs.losses(runs.run(runs.resumed(alone, tmp_path / "again", 3))) == losses(alone)[3:]
    two = {"processes_per_node": 2, "micro_batch_size": 2, "sharding": "fsdp"}
    assert runs.losses(runs.run(runs.resumed(alone, tmp_path / "two", 3, **two))) == pytest.approx(
        losses(alone)[3:], rel=1e-3
    )


@pytest.mark.parametrize(
    ("recipe", "world"),
    [
        pytest.param("tensorwise", 1, marks=pytest.mark.nightly),
        ("tensorwise", 2),
        ("rowwise", 1),
        pytest.param("rowwise", 2, marks=pytest.mark.nightly),
    ],
)
def test_float8_trains_as_fp32_but_for_its_digits(
    tmp_path: Path, whole: TrainJob, recipe: str, world: int
) -> None:
    options = {"world": world, "micro": 4 // world, "sharding": "none" if world == 1 else "fsdp"}
    settings = {"method": whole.plan.method, "fp8": recipe}
    job = fsdp(tmp_path, whole.model_dir, whole.data_dir, settings=settings, **options)
    runs.run(job)
    assert losses(job) == pytest.approx(losses(whole), rel=1e-2)
    assert losses(job) != losses(whole)


@pytest.mark.parametrize("world", [1, pytest.param(4, marks=pytest.mark.nightly)])
def test_a_run_goes_on_from_its_checkpoint_on_another_number_of_processes(
    tmp_path: Path, whole: TrainJob, world: int
) -> None:
    layout = {"processes_per_node": world, "micro_batch_size": 4 // world}
    if world == 1:
        layout["sharding"] = "none"  # type: ignore[assignment]
    again = runs.resumed(whole, tmp_path / "again", 3, **layout)
    assert runs.losses(runs.run(again)) == pytest.approx(losses(whole)[3:], rel=CLOSE)


@pytest.mark.parametrize("kind", ["mixtral", "tied"])
def test_experts_and_tied_embeddings_train_as_with_deepspeed(tmp_path: Path, data: Path, kind: str) -> None:
    model = runs.make_model(tmp_path / "model", kind)
    job = fsdp(tmp_path / "fsdp2", model, data)
    runs.run(job)
    zero = runs.make_job(tmp_path / "zero", model, data, steps=STEPS, sharding="zero3")
    runs.run(zero)
    assert losses(job) == pytest.approx(losses(zero), rel=CLOSE)
    engines.get("fsdp2").collect(job, tmp_path / "out")
    from safetensors.torch import load_file

    names = load_file(tmp_path / "out" / "model" / "model.safetensors").keys()
    assert ("lm_head.weight" in names) == (kind != "tied")


@pytest.mark.nightly
def test_adapters_on_experts_are_trained_alike_go_on_bit_by_bit_and_are_handed_over_alone(
    tmp_path: Path, data: Path
) -> None:
    from peft import PeftModel

    families.network("mixtral").save_pretrained(tmp_path / "model")
    lora = {"rank": 4, "targets": "all-linear", "experts": True}
    options: dict[str, Any] = {"settings": {"method": "lora", "lora": lora, "optimizer": {"lr": 2e-2}}}
    two = fsdp(tmp_path / "two", tmp_path / "model", data, checkpoint_every=3, **options)
    others = {
        "recomputed": fsdp(
            tmp_path / "again", tmp_path / "model", data, activation_checkpointing=True, **options
        ),
        "one": fsdp(tmp_path / "one", tmp_path / "model", data, world=1, micro=4, sharding="none", **options),
        "zero2": runs.make_job(
            tmp_path / "zero", tmp_path / "model", data, steps=STEPS, sharding="zero2", **options
        ),
    }
    runs.run(two)
    for name, job in others.items():
        runs.run(job)
        assert losses(job) == pytest.approx(losses(two), rel=CLOSE), name
    assert losses(two)[-1] < losses(two)[0] - 0.3
    rest = runs.run(runs.resumed(two, tmp_path / "resumed", 3))
    assert runs.losses(rest) == losses(two)[3:]

    engines.get("fsdp2").collect(two, tmp_path / "out")
    assert engines.result_of(tmp_path / "out") == tmp_path / "out" / "adapter"
    base = causal.load(tmp_path / "model", dtype=torch.float32)
    start = families.loss(base.eval())
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "out" / "adapter")).eval()
    assert families.loss(adapted) < start - 0.3
