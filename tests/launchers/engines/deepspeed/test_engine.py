"""The DeepSpeed engine without DeepSpeed: refusals, configuration, loading, resuming."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from estimator import models
from estimator.errors import UserError
from launchers.dataset import batches as deepspeed_batches
from launchers.engines.deepspeed import checkpoint as deepspeed_checkpoint
from launchers.engines.deepspeed import config as deepspeed_config
from launchers.engines.deepspeed import sharding
from launchers.engines.loop.written_by import WrittenBy
from launchers.run.job import unsupported
from launchers.settings import Settings
from tests.launchers.engines.loop import runs

NO_FOLDER = Path("unused")


def refusal(**settings: Any) -> str | None:
    chosen = Settings.model_validate({"engine": "deepspeed"} | settings)
    return unsupported("deepspeed", chosen, models.find(chosen.model))


def job(**options: Any) -> Any:
    return runs.make_job(NO_FOLDER, NO_FOLDER, NO_FOLDER, steps=10, **options)


def test_qlora_of_experts_is_refused_only_for_a_family_with_its_own_code_of_them() -> None:
    assert refusal(method="qlora", model="mixtral-8x7b") is None
    clause = refusal(method="qlora", model="llama-4-scout")
    assert clause is not None
    assert "experts of llama4_text models stay in 16 bits" in clause


def test_offload_without_zero_and_compiled_zero3_are_refused_and_every_stage_is_supported() -> None:
    assert refusal(compile=True) is None
    assert refusal(compile=True, zero={"stage": 3}) is not None
    assert refusal(zero={"stage": 0, "offload": "cpu"}) is not None
    for stage, method in itertools.product(("auto", 0, 1, 2, 3), ("full", "lora", "qlora")):
        assert refusal(method=method, zero={"stage": stage}) is None


def test_the_sharding_of_the_plan_sets_the_zero_stage_and_fsdp_is_refused() -> None:
    stages = {"none": 0, "ddp": 0, "zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3}
    for name, stage in stages.items():
        assert deepspeed_config.configuration(job(sharding=name))["zero_optimization"]["stage"] == stage
    with pytest.raises(UserError, match="fsdp"):
        deepspeed_config.configuration(job(sharding="fsdp"))


def test_engine_values_of_the_user_override_all_others() -> None:
    values = deepspeed_config.configuration(
        job(
            settings={
                "engine_options": {"zero_optimization": {"overlap_comm": True}, "gradient_clipping": 3.0}
            }
        )
    )
    assert values["zero_optimization"]["overlap_comm"] is True
    assert (values["zero_optimization"]["stage"], values["gradient_clipping"]) == (2, 3.0)


def test_the_configuration_follows_the_layout() -> None:
    values = deepspeed_config.configuration(
        job(micro=3, accumulation=5, precision="bf16", offload="cpu", settings={"clip_grad_norm": None})
    )
    assert (values["train_micro_batch_size_per_gpu"], values["gradient_accumulation_steps"]) == (3, 5)
    assert (values["bf16"], values["gradient_clipping"]) == ({"enabled": True}, 0.0)
    assert values["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert json.loads(json.dumps(values)) == values


@pytest.mark.parametrize(("rank", "device"), [(0, "cpu"), (1, "meta")])
def test_only_rank_0_reads_weights_under_zero3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, device: str
) -> None:
    from safetensors.torch import save_file
    from transformers import modeling_utils

    path = tmp_path / "model.safetensors"
    save_file({"lm_head.weight": torch.ones(2, 3)}, path, {"format": "pt"})
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    read = modeling_utils.load_state_dict
    with sharding._weights_read_by_first_rank():
        (weight,) = modeling_utils.load_state_dict(str(path), map_location="cpu", weights_only=True).values()
    assert weight.device.type == device
    assert weight.shape == (2, 3)
    assert modeling_utils.load_state_dict is read


def write_checkpoint(folder: Path, **values: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    dataclasses.replace(WrittenBy.of(job()), **values).write(folder)
    return folder


def test_only_sharded_states_of_another_number_of_processes_need_conversion(tmp_path: Path) -> None:
    assert not deepspeed_checkpoint.needs_conversion(job(resume_dir=write_checkpoint(tmp_path)))
    assert deepspeed_checkpoint.needs_conversion(job(resume_dir=write_checkpoint(tmp_path, world_size=4)))
    unsharded = write_checkpoint(tmp_path, world_size=4, stage=0)
    assert not deepspeed_checkpoint.needs_conversion(job(sharding="ddp", resume_dir=unsharded))


def test_sgd_cannot_resume_with_another_number_of_processes(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, optimizer="sgd", world_size=4)
    with pytest.raises(UserError, match="4 processes"):
        deepspeed_checkpoint.needs_conversion(
            job(resume_dir=folder, settings={"optimizer": {"name": "sgd", "lr": 0.1}})
        )


def test_no_bucket_is_larger_than_the_number_of_trained_parameters() -> None:
    def bucket(**options: Any) -> int:
        values = deepspeed_config.configuration(job(), **options)["zero_optimization"]
        assert values["reduce_bucket_size"] == values["allgather_bucket_size"]
        return int(values["reduce_bucket_size"])

    assert bucket() == 50_000  # the plan's number of parameters
    assert bucket(trained=1_000) == 1_000
    assert bucket(trained=1_001) == 1_002, "DeepSpeed refuses odd ones"
    assert bucket(trained=10**12) == deepspeed_config.LARGEST_BUCKET


def test_bucket_and_loss_chunk_sizes_equal_those_of_the_estimator() -> None:
    from estimator.memory import buffers, logits

    assert deepspeed_config.LARGEST_BUCKET == buffers.DEEPSPEED_BUCKET
    assert deepspeed_batches.LOSS_CHUNK == logits.DEEPSPEED_LOSS_POSITIONS


@pytest.mark.parametrize("restored", [3, 3.0, torch.tensor(3.0, dtype=torch.float64)])
def test_a_fused_optimizer_continues_from_any_restored_step_count(restored: Any) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
    parameter.grad = torch.ones(2)
    optimizer.step()
    optimizer.state[parameter]["step"] = restored
    deepspeed_checkpoint._move_step_counts(optimizer)
    optimizer.step()
    assert float(optimizer.state[parameter]["step"]) == 4.0
