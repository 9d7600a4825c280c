"""LLaMA-Adapters in layouts that test_engines_by_method.py does not cover."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from launchers.gang.job import TrainJob
from tests.launchers.engines.loop import runs

pytestmark = pytest.mark.slow
STEPS = 6
CLOSE = 2e-6  # relative; the order of a sum of fp32 differs between layouts
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"engine": "fsdp2", "sharding": "fsdp"},
    "grad-op": {"engine": "fsdp2", "sharding": "shard_grad_op", "micro": 1, "accumulation": 2},
    "checkpointing": {"engine": "fsdp2", "sharding": "fsdp", "activation_checkpointing": True},
    "offload": {"engine": "fsdp2", "sharding": "fsdp", "offload": "cpu"},
    "zero1": {"sharding": "zero1"},
    "zero2": {"sharding": "zero2"},
    "zero3-checkpointing": {"sharding": "zero3", "activation_checkpointing": True},
    "fsdp in bf16-mixed": {"engine": "fsdp2", "sharding": "fsdp", "precision": "bf16-mixed"},
    "zero3 in bf16": {"sharding": "zero3", "precision": "bf16"},
}


@pytest.fixture(scope="module", params=["adapter-v1", "adapter-v2"])
def reference_run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path, data: Path
) -> TrainJob:
    """A finished run of FSDP2 on two processes for comparison."""
    network = runs.load(model)  # attention that matters, because prompts work through it alone
    with torch.no_grad():
        for block in network.model.layers:
            block.self_attn.v_proj.weight.mul_(20)
            block.self_attn.o_proj.weight.mul_(20)
    folder = tmp_path_factory.mktemp("whole")
    network.save_pretrained(folder / "model")
    job = job_of(folder / "work", folder / "model", data, request.param, "fsdp")
    runs.run(job)
    return job


def job_of(work: Path, model: Path, data: Path, method: str, layout: str) -> TrainJob:
    """Return a job with prompts in the second of two blocks, whose gates open within six steps."""
    settings = {"method": method, "adapter": {"start_layer": 1}, "optimizer": {"lr": 0.5}}
    return runs.make_job(work, model, data, steps=STEPS, settings=settings, **LAYOUTS[layout])


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=[] if layout == "zero3-checkpointing" else pytest.mark.nightly)
        for layout in LAYOUTS
        if layout != "fsdp"
    ],
)
def test_no_engine_layout_or_precision_changes_the_losses(
    tmp_path: Path, reference_run: TrainJob, layout: str
) -> None:
    job = job_of(tmp_path, reference_run.model_dir, reference_run.data_dir, reference_run.plan.method, layout)
    losses, expected = runs.losses(runs.run(job)), runs.losses(runs.steps(reference_run))
    lower_precision = "bf16" in layout
    assert losses == pytest.approx(expected, rel=1e-2 if lower_precision else CLOSE)
    assert (losses != expected) or not lower_precision
    # The fifth step has the rows of the first
    assert losses[4] < losses[0] - (0.5 if reference_run.plan.method == "adapter-v2" else 0.005)
