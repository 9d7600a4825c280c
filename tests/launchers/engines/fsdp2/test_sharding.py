"""FSDP2 in groups of processes on CPUs, compared across layouts.

Methods and exports, and the same losses as DeepSpeed: test_engines_by_method.py and loop/test_families.py.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from launchers import engines
from launchers.gang.job import TrainJob
from launchers.models import causal
from tests.launchers.engines.loop import families, runs

pytestmark = pytest.mark.slow
NIGHTLY = pytest.mark.nightly
METHODS = ("full", "lora")
STEPS = 6
CLOSE = 2e-6  # relative; the order of a sum of fp32 differs between layouts


@pytest.fixture(scope="module", params=METHODS)
def reference_run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path, data: Path
) -> TrainJob:
    """A finished run on two processes for comparison, with a checkpoint after half its steps."""
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


@pytest.mark.parametrize(
    "options",
    [
        {"sharding": "shard_grad_op", "micro": 1, "accumulation": 2},
        pytest.param({"replicate": 2}, marks=NIGHTLY),
        pytest.param({"world": 4, "micro": 1, "replicate": 2}, marks=NIGHTLY),
        {"world": 4, "micro": 1, "replicate": 2, "sharding": "shard_grad_op"},
        pytest.param({"offload": "cpu"}, marks=NIGHTLY),
        pytest.param({"activation_checkpointing": True}, marks=NIGHTLY),
        {"activation_checkpointing": True, "settings": {"recompute": {"what": "selective"}}},
    ],
    ids=["grad-op", "undivided", "hybrid", "hybrid-grad-op", "offload", "checkpointing", "selective"],
)
def test_no_layout_changes_the_losses(
    tmp_path: Path, reference_run: TrainJob, options: dict[str, Any]
) -> None:
    settings = {"method": reference_run.plan.method} | options.get("settings", {})
    job = fsdp(tmp_path, reference_run.model_dir, reference_run.data_dir, **options | {"settings": settings})
    runs.run(job)
    assert losses(job) == pytest.approx(losses(reference_run), rel=CLOSE)


@pytest.mark.parametrize(
    ("reference_run", "options", "settings", "close"),
    [
        pytest.param(method, *case, marks=[] if method == each_change else NIGHTLY, id=f"{method}-{name}")
        for method in METHODS
        for name, each_change, case in (
            ("bf16-mixed", "full", ({"precision": "bf16-mixed"}, {}, 1e-3)),
            ("fp16-mixed", "lora", ({"precision": "fp16-mixed"}, {}, 1e-3)),
            ("tensorwise", "full", ({}, {"fp8": "tensorwise"}, 1e-2)),
            ("rowwise", "lora", ({"world": 1, "micro": 4, "sharding": "none"}, {"fp8": "rowwise"}, 1e-2)),
        )
    ],
    indirect=["reference_run"],
)
def test_lower_precision_has_the_losses_of_fp32_within_its_tolerance(
    tmp_path: Path, reference_run: TrainJob, options: dict[str, Any], settings: dict[str, Any], close: float
) -> None:
    job = fsdp(
        tmp_path,
        reference_run.model_dir,
        reference_run.data_dir,
        settings={"method": reference_run.plan.method} | settings,
        **options,
    )
    runs.run(job)
    assert losses(job) == pytest.approx(losses(reference_run), rel=close)
    assert losses(job) != losses(reference_run)


@pytest.mark.parametrize(("method", "precision"), [("full", "bf16-mixed"), ("lora", "fp16-mixed")])
def test_one_process_in_mixed_precision_resumes_bit_by_bit_and_on_two(
    tmp_path: Path, model: Path, data: Path, method: str, precision: str
) -> None:
    alone = fsdp(
        tmp_path / "alone",
        model,
        data,
        world=1,
        micro=4,
        sharding="none",
        precision=precision,
        checkpoint_every=3,
        settings={"method": method},
    )
    runs.run(alone)
    assert runs.losses(runs.run(runs.resumed(alone, tmp_path / "again", 3))) == losses(alone)[3:]
    two = {"processes_per_node": 2, "micro_batch_size": 2, "sharding": "fsdp"}
    assert runs.losses(runs.run(runs.resumed(alone, tmp_path / "two", 3, **two))) == pytest.approx(
        losses(alone)[3:], rel=1e-3
    )


@pytest.mark.parametrize("world", [1, pytest.param(4, marks=NIGHTLY)])
def test_a_run_resumes_on_another_number_of_processes(
    tmp_path: Path, reference_run: TrainJob, world: int
) -> None:
    layout: dict[str, Any] = {"processes_per_node": world, "micro_batch_size": 4 // world}
    if world == 1:
        layout["sharding"] = "none"
    resumed = runs.resumed(reference_run, tmp_path / "again", 3, **layout)
    assert runs.losses(runs.run(resumed)) == pytest.approx(losses(reference_run)[3:], rel=CLOSE)


@NIGHTLY
def test_expert_adapters_train_equally_resume_bit_by_bit_and_are_exported_without_the_base(
    tmp_path: Path, data: Path
) -> None:
    from peft import PeftModel

    families.network("mixtral").save_pretrained(tmp_path / "model")
    lora = {"rank": 4, "targets": "all-linear", "experts": True}
    options: dict[str, Any] = {"settings": {"method": "lora", "lora": lora, "optimizer": {"lr": 2e-2}}}
    two = fsdp(tmp_path / "two", tmp_path / "model", data, checkpoint_every=3, **options)
    runs.run(two)
    alone = {"world": 1, "micro": 4, "sharding": "none", "activation_checkpointing": True} | options
    losses_of_one = runs.losses(runs.run(fsdp(tmp_path / "one", tmp_path / "model", data, **alone)))
    assert losses_of_one == pytest.approx(losses(two), rel=CLOSE)
    assert losses(two)[-1] < losses(two)[0] - 0.3
    resumed_steps = runs.run(runs.resumed(two, tmp_path / "resumed", 3))
    assert runs.losses(resumed_steps) == losses(two)[3:]

    engines.get("fsdp2").collect(two, tmp_path / "out")
    assert engines.result_of(tmp_path / "out") == tmp_path / "out" / "adapter"
    base = causal.load(tmp_path / "model", dtype=torch.float32)
    start = families.loss(base.eval())
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "out" / "adapter")).eval()
    assert families.loss(adapted) < start - 0.3


def test_weights_that_transformers_keeps_in_fp32_train_equally_on_one_process_and_on_two(
    tmp_path: Path, data: Path
) -> None:
    families.network("deepseek_v4").save_pretrained(tmp_path / "model")
    options: dict[str, Any] = {"precision": "bf16-mixed", "settings": {"method": "lora"}}
    two = runs.run(fsdp(tmp_path / "two", tmp_path / "model", data, **options))
    alone = {"world": 1, "micro": 4, "sharding": "none"} | options
    one = runs.run(fsdp(tmp_path / "one", tmp_path / "model", data, **alone))
    assert runs.losses(two) == pytest.approx(runs.losses(one), rel=1e-2)
