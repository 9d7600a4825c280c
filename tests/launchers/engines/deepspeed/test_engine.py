"""The DeepSpeed engine without DeepSpeed: refusals, configuration, share of the data, loss, resuming."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from estimator.errors import UserError
from launchers import engines
from launchers.dataset import batches as deepspeed_batches
from launchers.dataset.prepared import IGNORE, Prepared
from launchers.engines.deepspeed import checkpoint as deepspeed_checkpoint
from launchers.engines.deepspeed import config as deepspeed_config
from launchers.engines.deepspeed import model as deepspeed_model
from launchers.settings import Settings
from tests.launchers.engines.deepspeed import runs

NO_FOLDER = Path("unused")


def refusal(**settings: Any) -> str | None:
    spec: Any = SimpleNamespace(name="llama", family="llama", experts=0, max_seq_len=2048)
    return engines.get("deepspeed").unsupported(
        Settings.model_validate({"engine": "deepspeed"} | settings), spec
    )


def job(**options: Any) -> Any:
    return runs.make_job(NO_FOLDER, NO_FOLDER, NO_FOLDER, steps=10, **options)


def test_qlora_is_refused_with_the_reason() -> None:
    clause = refusal(method="qlora")
    assert clause is not None
    assert "bitsandbytes" in clause


@pytest.mark.parametrize(
    "settings", [{"compile": True}, {"zero": {"stage": 0, "offload": "cpu"}}], ids=["compile", "offload"]
)
def test_what_zero_cannot_do_is_refused(settings: dict[str, Any]) -> None:
    assert refusal(**settings) is not None


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("stage", ["auto", 0, 1, 2, 3])
def test_full_and_lora_are_taken_with_every_stage(method: str, stage: Any) -> None:
    assert refusal(method=method, zero={"stage": stage}) is None


@pytest.mark.parametrize(
    ("sharding", "stage"), [("none", 0), ("ddp", 0), ("zero0", 0), ("zero1", 1), ("zero2", 2), ("zero3", 3)]
)
def test_the_plans_sharding_is_the_stage(sharding: str, stage: int) -> None:
    assert deepspeed_config.configuration(job(sharding=sharding))["zero_optimization"]["stage"] == stage


def test_another_engines_sharding_is_an_error() -> None:
    with pytest.raises(ValueError, match="fsdp"):
        deepspeed_config.configuration(job(sharding="fsdp"))


def test_the_users_engine_values_are_laid_over_the_rest_last() -> None:
    values = deepspeed_config.configuration(
        job(
            settings={
                "engine_options": {"zero_optimization": {"overlap_comm": True}, "gradient_clipping": 3.0}
            }
        )
    )
    assert values["zero_optimization"]["overlap_comm"] is True
    assert values["zero_optimization"]["stage"] == 2
    assert values["gradient_clipping"] == 3.0


def test_the_configuration_follows_the_layout() -> None:
    values = deepspeed_config.configuration(
        job(micro=3, accumulation=5, precision="bf16", offload="cpu", settings={"clip_grad_norm": None})
    )
    assert values["train_micro_batch_size_per_gpu"] == 3
    assert values["gradient_accumulation_steps"] == 5
    assert values["bf16"] == {"enabled": True}
    assert values["gradient_clipping"] == 0.0
    assert values["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert json.loads(json.dumps(values)) == values


def test_the_cosine_schedule_is_transformers_and_torchtunes() -> None:
    from transformers import get_cosine_schedule_with_warmup

    settings = Settings.model_validate({"schedule": {"warmup_steps": 4}})
    factor = deepspeed_model.lr_factor(settings, 20)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    wanted = get_cosine_schedule_with_warmup(optimizer, 4, 20)
    for step in range(21):
        assert factor(step) == pytest.approx(wanted.get_last_lr()[0])
        optimizer.step()
        wanted.step()


@pytest.mark.parametrize(("name", "middle", "end"), [("linear", 0.5, 0.0), ("constant", 1.0, 1.0)])
def test_the_other_schedules(name: str, middle: float, end: float) -> None:
    factor = deepspeed_model.lr_factor(
        Settings.model_validate({"schedule": {"name": name, "warmup_steps": 2}}), 10
    )
    assert [factor(0), factor(1), factor(2), factor(6), factor(10)] == [0.0, 0.5, 1.0, middle, end]


@pytest.mark.parametrize(("world", "micro", "accumulation"), [(1, 4, 3), (2, 3, 2), (3, 1, 4), (4, 3, 1)])
def test_every_row_of_a_step_is_seen_once_whatever_the_layout(
    tmp_path: Path, world: int, micro: int, accumulation: int
) -> None:
    rows = runs.documents(24)
    data = Prepared(runs.make_data(tmp_path, rows, batch=12, steps=2))
    layout = job(world=world, micro=micro, accumulation=accumulation).plan.layout
    seen, tokens = [], 0
    for rank in range(world):
        batches = list(deepspeed_batches.micro_batches(data, layout, 1, rank))
        assert [len(batch.input_ids) for batch in batches] == [micro] * accumulation
        for number, batch in enumerate(batches):
            for place, row in enumerate(batch.input_ids):
                index = 12 + (number * micro + place) * world + rank
                assert np.array_equal(row[: len(rows[index].tokens)].numpy(), rows[index].tokens)
                seen.append(index)
            tokens += batch.tokens
    assert sorted(seen) == list(range(12, 24))
    assert tokens == sum(len(row.tokens) for row in rows[12:])


def test_labels_are_what_comes_next_and_padding_never_counts() -> None:
    rows = runs.documents(3)
    batch = deepspeed_batches.collate(rows, pad_id=7)
    for index, row in enumerate(rows):
        length = len(row.tokens)
        assert batch.labels[index, : length - 1].tolist() == row.labels[1:].tolist()
        assert set(batch.labels[index, length - 1 :].tolist()) <= {IGNORE}
        assert set(batch.input_ids[index, length:].tolist()) <= {7}
    assert int((batch.labels != IGNORE).sum()) == sum(int((row.labels != IGNORE).sum()) for row in rows)


def test_the_chunked_loss_is_the_loss_with_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_batches, "LOSS_CHUNK", 4)
    logits = torch.randn(3, 5, 11, requires_grad=True)
    labels = torch.randint(0, 11, (3, 5))
    labels[0, :3] = IGNORE
    whole = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    (wanted,) = torch.autograd.grad(whole, logits)
    chunked = deepspeed_batches.summed_cross_entropy(logits, labels)
    (gradient,) = torch.autograd.grad(chunked, logits)
    assert chunked.item() == pytest.approx(whole.item(), rel=1e-6)
    assert torch.allclose(gradient, wanted, atol=1e-6)


def test_labels_that_count_are_those_of_all_ranks(tmp_path: Path) -> None:
    rows = runs.documents(8)
    data = Prepared(runs.make_data(tmp_path, rows, batch=4, steps=2))
    wanted = sum(int((row.labels != IGNORE).sum()) for row in rows[4:])
    assert deepspeed_batches.counted_labels(data, 1, 4) == wanted


def test_only_one_of_two_copies_of_the_weights_is_merged(tmp_path: Path) -> None:
    """Mistral's repositories hold consolidated.safetensors beside transformers' own files."""
    from launchers.engines.deepspeed import export as deepspeed_export

    for name in ("model-00001-of-00001.safetensors", "consolidated.safetensors"):
        (tmp_path / name).touch()
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = deepspeed_export._weight_files(tmp_path)
    assert [path.name for path in found] == ["model-00001-of-00001.safetensors"]


@pytest.mark.parametrize(("rank", "device"), [(0, "cpu"), (1, "meta")])
def test_with_zero3_only_the_first_rank_reads_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, device: str
) -> None:
    from safetensors.torch import save_file
    from transformers import modeling_utils

    path = tmp_path / "model.safetensors"
    save_file({"lm_head.weight": torch.ones(2, 3)}, path, {"format": "pt"})
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    read = modeling_utils.load_state_dict
    with deepspeed_model._weights_read_by_first_rank():
        (weight,) = modeling_utils.load_state_dict(str(path), map_location="cpu", weights_only=True).values()
    assert weight.device.type == device
    assert weight.shape == (2, 3)
    assert modeling_utils.load_state_dict is read


def write_checkpoint(folder: Path, **values: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    written = {"stage": 2, "world_size": 2, "method": "full", "precision": "fp32", "optimizer": "adamw"}
    (folder / "engine.json").write_text(json.dumps(written | values))
    return folder


def test_a_checkpoint_of_the_same_run_needs_no_conversion(tmp_path: Path) -> None:
    assert not deepspeed_checkpoint.needs_conversion(job(resume_dir=write_checkpoint(tmp_path)))


def test_another_number_of_processes_needs_conversion_only_where_states_are_sharded(tmp_path: Path) -> None:
    assert deepspeed_checkpoint.needs_conversion(job(resume_dir=write_checkpoint(tmp_path, world_size=4)))
    unsharded = write_checkpoint(tmp_path, world_size=4, stage=0)
    assert not deepspeed_checkpoint.needs_conversion(job(sharding="ddp", resume_dir=unsharded))


@pytest.mark.parametrize(
    "values", [{"stage": 3}, {"method": "lora"}, {"precision": "bf16"}, {"optimizer": "sgd"}]
)
def test_a_checkpoint_of_another_kind_is_refused(tmp_path: Path, values: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=str(next(iter(values.values())))):
        deepspeed_checkpoint.needs_conversion(job(resume_dir=write_checkpoint(tmp_path, **values)))


def test_sgd_cannot_go_on_with_another_number_of_processes(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, optimizer="sgd", world_size=4)
    with pytest.raises(UserError, match="4 processes"):
        deepspeed_checkpoint.needs_conversion(
            job(resume_dir=folder, settings={"optimizer": {"name": "sgd", "lr": 0.1}})
        )


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a whole checkpoint"):
        deepspeed_checkpoint.needs_conversion(job(resume_dir=tmp_path))


def test_a_learning_rate_that_was_not_resolved_is_a_programming_error() -> None:
    unresolved = dataclasses.replace(job(), settings=Settings())
    with pytest.raises(ValueError, match="auto"):
        deepspeed_model.peak_lr(unresolved.settings)
    assert math.isclose(deepspeed_model.peak_lr(job().settings), 1e-2)


def test_no_bucket_is_larger_than_what_is_trained() -> None:
    def bucket(**options: Any) -> int:
        values = deepspeed_config.configuration(job(), **options)["zero_optimization"]
        assert values["reduce_bucket_size"] == values["allgather_bucket_size"]
        return int(values["reduce_bucket_size"])

    assert bucket() == 50_000  # the plan's number of parameters
    assert bucket(trained=1_000) == 1_000
    assert bucket(trained=10**12) == deepspeed_config.LARGEST_BUCKET


def test_bucket_and_loss_chunk_are_what_the_estimator_counts_with() -> None:
    from estimator import memory

    assert deepspeed_config.LARGEST_BUCKET == memory.DEEPSPEED_BUCKET
    assert deepspeed_batches.LOSS_CHUNK == memory.DEEPSPEED_LOSS_POSITIONS


@pytest.mark.parametrize("restored", [3, 3.0, torch.tensor(3.0, dtype=torch.float64)])
def test_a_fused_optimizer_goes_on_from_whatever_step_count_was_restored(restored: Any) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
    parameter.grad = torch.ones(2)
    optimizer.step()
    optimizer.state[parameter]["step"] = restored
    deepspeed_checkpoint._steps_beside_parameters(optimizer)
    optimizer.step()
    assert float(optimizer.state[parameter]["step"]) == 4.0
