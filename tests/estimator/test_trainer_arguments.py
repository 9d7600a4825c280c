"""Plans as arguments of other trainers, each tried by a short training with that trainer."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from estimator.errors import UserError
from estimator.plan import Layout, Plan
from launchers.cluster.endpoint import unused_port
from tests.decorators.flows.plans import make_plan

SCRIPT = Path(__file__).parent / "trainers" / "train.py"


def planned(**layout: Any) -> Plan:
    values = {
        "device": "cpu",
        "nodes": 1,
        "processes_per_node": 1,
        "sharding": "none",
        "micro_batch_size": 2,
        "accumulation": 2,
        "seq_len": 16,
        "activation_checkpointing": True,
        "precision": "fp32",
        "optimizer": "adamw",
    }
    return dataclasses.replace(make_plan({}, "local"), layout=Layout(**(values | layout)))


def test_the_batch_and_the_precision_of_a_plan_reach_every_trainer() -> None:
    plan = planned(precision="bf16-mixed", micro_batch_size=4, accumulation=8)
    transformers, accelerate, lightning = plan.to_transformers(), plan.to_accelerate(), plan.to_lightning()
    assert transformers["per_device_train_batch_size"] == 4
    for name, values in (
        ("gradient_accumulation_steps", transformers),
        ("gradient_accumulation_steps", accelerate),
        ("gradient_accumulation_steps", plan.to_deepspeed()),
        ("accumulate_grad_batches", lightning),
    ):
        assert values[name] == 8
    assert transformers["bf16"]
    assert (accelerate["mixed_precision"], lightning["precision"]) == ("bf16", "bf16-mixed")
    assert plan.to_deepspeed()["bf16"]["enabled"]
    assert plan.to_transformers(sft=True)["max_length"] == 16


def test_each_sharding_maps_to_that_of_the_trainer() -> None:
    zero = planned(processes_per_node=2, sharding="zero3", offload="cpu", device="cuda")
    assert zero.to_transformers()["deepspeed"] == zero.to_deepspeed()
    assert zero.to_deepspeed()["zero_optimization"]["stage"] == 3
    assert zero.to_deepspeed()["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert zero.to_lightning()["strategy"] == "deepspeed_stage_3_offload"
    fsdp = planned(processes_per_node=2, sharding="shard_grad_op")
    assert fsdp.to_transformers()["fsdp_config"]["reshard_after_forward"] is False
    assert fsdp.to_accelerate()["fsdp_plugin"]["fsdp_version"] == 2
    assert planned(processes_per_node=2, sharding="ddp").to_lightning()["strategy"] == "ddp"


@pytest.mark.parametrize(
    ("method", "layout", "named"),
    [
        ("to_transformers", {"optimizer": "muon"}, "muon"),
        ("to_transformers", {"processes_per_node": 2, "tensor_parallel": 2}, "splits the model"),
        ("to_deepspeed", {"processes_per_node": 2, "sharding": "fsdp"}, "fsdp"),
        ("to_lightning", {"processes_per_node": 2, "sharding": "fsdp"}, "FSDP2"),
    ],
)
def test_an_unsupported_plan_is_an_error_for_the_trainer(
    method: str, layout: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError, match=named):
        getattr(planned(**layout), method)()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "layout"),
    [
        # tests/decorators/test_callbacks.py trains with these arguments
        pytest.param("transformers", {}, marks=pytest.mark.nightly),
        ("transformers", {"processes_per_node": 2, "sharding": "fsdp"}),
        pytest.param("transformers", {"processes_per_node": 2, "sharding": "ddp"}, marks=pytest.mark.nightly),
        pytest.param("trl", {}, marks=pytest.mark.nightly),
        pytest.param("trl", {"processes_per_node": 2, "sharding": "ddp"}, marks=pytest.mark.nightly),
        pytest.param("accelerate", {}, marks=pytest.mark.nightly),
        ("accelerate", {"processes_per_node": 2, "sharding": "fsdp"}),
        pytest.param("deepspeed", {"sharding": "zero0"}, marks=pytest.mark.nightly),
        ("deepspeed", {"processes_per_node": 2, "sharding": "zero2"}),
    ],
    ids=lambda value: value if isinstance(value, str) else value.get("sharding", "one"),
)
def test_a_trainer_trains_as_planned(tmp_path: Path, trainer: str, layout: dict[str, Any]) -> None:
    plan, out = planned(**layout), tmp_path / "losses.json"
    (tmp_path / "plan.json").write_text(plan.to_json())
    words = [str(SCRIPT), trainer, str(tmp_path / "plan.json"), str(out)]
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={plan.layout.processes_per_node}"]
    port = f"--master-port={unused_port()}"
    done = subprocess.run(
        [sys.executable, *launcher, port, *words], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    losses = json.loads(out.read_text())
    assert len(losses) >= 3
    assert all(3.0 < loss < 5.0 for loss in losses)  # ln(64) = 4.16: an untrained model of 64 tokens
