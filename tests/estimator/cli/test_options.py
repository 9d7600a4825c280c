"""Options of a step: one for each field of a Setup; numbers as people write them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from estimator import models
from estimator.cli.options import PlaceOptions, SetupOptions
from estimator.setup import Setup
from tests.estimator.cli.estimates import answer, run
from tests.estimator.models.hf_configs import config_of
from tests.estimator.models.test_vision import GEMMA3

TOWER = GEMMA3 | {"text_config": config_of(models.find("gemma-3-4b"))}  # of a model called TOWER below

# An option and a value of it that changes that field; processes_per_node is --gpus
CHANGES: dict[str, list[str]] = {
    "model": ["--model", "llama-3.2-1b"],
    "engine": ["--engine", "litgpt"],
    "engine_version": ["--engine", "torchtitan", "--engine-version", "2024-05"],
    "method": ["--method", "lora"],
    "vision": ["--model", "TOWER", "--vision", "frozen"],
    "images_per_row": ["--model", "TOWER", "--vision", "frozen", "--images-per-row", "2"],
    "image_size": ["--model", "TOWER", "--vision", "frozen", "--image-size", "512"],
    "task": ["--task", "dpo"],
    "reference_copy": ["--task", "dpo", "--engine", "deepspeed", "--reference-copy"],
    "flash_version": ["--flash-version", "3"],
    "answers": ["--task", "grpo", "--reward-parameters", "1000000"],
    "lora_rank": ["--lora-rank", "64"],
    "lora_targets": ["--lora-targets", "q_proj,v_proj"],
    "llama_adapter": ["--method", "adapter-v2", "--adapter-start-layer", "0"],
    "trained_modules": ["--method", "lora", "--modules-to-save", "lm_head"],
    "lora_experts": ["--method", "lora", "--lora-experts"],
    "adapter_only": ["--method", "lora", "--adapter-only"],
    "quantization": ["--method", "lora", "--quantization", "int8"],
    "upcast_frozen": ["--method", "qlora", "--upcast-frozen"],
    "undivided_base": ["--method", "qlora", "--undivided-base"],
    "looped_experts": ["--model", "mixtral-8x7b", "--looped-experts"],
    "precision": ["--precision", "bf16-autocast"],
    "fp8": ["--fp8", "tensorwise"],
    "optimizer": ["--optimizer", "adamw8bit"],
    "fused_optimizer": ["--foreach-optimizer"],
    "optimizer_in_backward": ["--optimizer-in-backward"],
    "sharding": ["--gpus", "2", "--sharding", "zero2"],
    "flat_parameters": ["--gpus", "2", "--flat-parameters"],
    "shard": ["--gpus", "4", "--shard", "2"],
    "replicate": ["--gpus", "4", "--dp-replicate", "2"],
    "tensor": ["--gpus", "2", "--tp", "2"],
    "sequence_parallel": ["--gpus", "2", "--tp", "2", "--no-sequence-parallel"],
    "context": ["--gpus", "2", "--cp", "2"],
    "pipeline": ["--gpus", "2", "--pp", "2"],
    "virtual_stages": ["--gpus", "2", "--pp", "2", "--virtual-stages", "2"],
    "schedule": ["--gpus", "2", "--pp", "2", "--schedule", "afab"],
    "expert": ["--model", "mixtral-8x7b", "--gpus", "2", "--ep", "2"],
    "dispatch_by_expert": ["--model", "mixtral-8x7b", "--gpus", "2", "--ep", "2", "--dispatch-by-expert"],
    "micro_batch_size": ["--micro-batch-size", "3"],
    "accumulation": ["--accumulation", "3"],
    "seq_len": ["--seq-len", "512"],
    "fixed_length": ["--no-packing"],
    "longest_first": ["--longest-first"],
    "expandable_segments": ["--fixed-segments"],
    "longest_once": ["--longest-once"],
    "document_mask": ["--document-mask"],
    "variable_length": ["--engine", "fsdp2"],
    "document_tokens": ["--document-tokens", "700"],
    "checkpointing": ["--no-activation-checkpointing"],
    "recompute_every": ["--recompute-every", "2"],
    "activation_offload": ["--activation-offload"],
    "compile": ["--no-compile"],
    "loss": ["--loss", "plain"],
    "loss_chunks": ["--loss-chunks", "4"],
    "attention": ["--attention", "math"],
    "offload": ["--offload", "optimizer"],
    "offload_to": ["--offload", "optimizer", "--offload-to", "nvme"],
    "device": ["--device", "cpu"],
    "processes_per_node": ["--gpus", "4"],
    "keep_checkpoints": ["--keep-checkpoints", "5"],
}


def test_every_field_of_setup_has_an_option() -> None:
    assert set(CHANGES) == {field.name for field in dataclasses.fields(Setup)}


@pytest.mark.parametrize("field", CHANGES)
def test_each_option_sets_its_field(field: str, tmp_path: Path) -> None:
    words = CHANGES[field] if "--model" in CHANGES[field] else ["--model", "llama-8b", *CHANGES[field]]
    if "TOWER" in words:
        (tmp_path / "config.json").write_text(json.dumps(TOWER))
        words = [str(tmp_path) if word == "TOWER" else word for word in words]
    plain = answer("--model", "llama-8b")["setup"]
    assert answer(*words)["setup"][field] != plain[field]


@pytest.mark.parametrize(
    ("model", "problem"),
    [("llama-8b", "llama-8b sees no images"), ("gemma-3-4b", "gemma-3-4b's vision tower is unknown")],
)
def test_vision_is_refused_for_a_model_without_a_known_tower(model: str, problem: str) -> None:
    done = run("--model", model, "--vision", "frozen")
    assert done.exit_code != 0
    assert problem in done.output


def test_place_options_and_setup_options_share_no_field() -> None:
    place = {field.name for field in dataclasses.fields(PlaceOptions)}
    assert place & {field.name for field in dataclasses.fields(SetupOptions)} == set()
