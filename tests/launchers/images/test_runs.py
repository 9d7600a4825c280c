"""Runs of image models: automatic settings, and refusals before planning."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")

from decorators.backends.overrides import request_for
from estimator import Target, render
from estimator.errors import UserError
from estimator.models import find
from estimator.models.diffusion import TINY
from launchers import settings
from launchers.dataset import sources
from launchers.images import runs
from launchers.run import preparation
from tests.lab.configs import config
from tests.launchers.images.encoded import encoded
from tests.launchers.run.test_preparation import HERE

TINY_RUN: dict[str, Any] = {"model": TINY}


def refusal(values: dict[str, Any]) -> str:
    with pytest.raises(UserError) as refused:
        preparation.plan_run(settings.build(TINY_RUN | values), HERE)
    return f"{refused.value.problem} {refused.value.advice}"


def test_task_dataset_engine_and_length_follow_from_the_model() -> None:
    run = preparation.plan_run(settings.build(TINY_RUN), HERE)
    chosen = run.settings
    assert (chosen.task, chosen.dataset, chosen.engine) == ("text-to-image", "drawn-shapes", "fsdp2")
    assert chosen.seq_len == find(TINY).max_seq_len == run.plan.layout.seq_len
    assert (chosen.images.side, run.plan.length) == (64, "64 x 64 pixels")
    assert runs.min_side(chosen) == 32, "an image is enlarged to twice its size at most"
    assert (run.plan.task, run.plan.parameters) == ("text-to-image", find(TINY).parameters)


def test_a_configured_resolution_and_the_default_learning_rate_of_lora_are_used() -> None:
    values = {"model": "stable-diffusion-xl", "method": "lora", "images": {"resolution": 512}}
    chosen = config(values, "sdxl")
    assert (chosen.images.side, chosen.optimizer.lr) == (512, 1e-4)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"seq_len": 512}, "which have no tokens"),
        ({"method": "qlora"}, "full or lora"),
        ({"method": "lora", "lora": {"targets": ["q_proj"]}}, "lora.targets"),
        ({"engine": "deepspeed"}, "fsdp2"),
        ({"images": {"text_encoders": True}, "method": "full"}, "UNet"),
        ({"images": {"clip_model": str(Path(__file__).parent)}}, "CLIP model"),
        ({"harness": {"tasks": ["hellaswag"]}}, "language models"),
        ({"model": "tiny-llama", "task": "text-to-image"}, "not tiny-llama"),
        ({"model": "tiny-llama", "images": {"resolution": 512}}, "resolution does not apply to task sft"),
    ],
)
def test_options_of_another_kind_of_model_are_refused(values: dict[str, Any], expected: str) -> None:
    assert expected in refusal(values)


def test_latents_are_planned_as_a_step_on_one_node_of_the_run() -> None:
    chosen = settings.build({"model": "stable-diffusion-xl", "method": "lora", "resources": {"gpu": "L4"}})
    plan = preparation.plan_run(chosen, Target(kind="kubernetes")).plan
    assert request_for(plan, "encode") == dataclasses.replace(plan.request, nodes=1)
    assert "encode (1x L4, " in render(plan)
    (line,) = (line for line in plan.why if line.startswith("latents and texts"))
    assert "on one of its nodes, 6 images at once: 16.9 GiB" in line


def test_trained_text_encoders_are_part_of_the_plan() -> None:
    plans = [
        preparation.plan_run(
            settings.build(TINY_RUN | {"method": method, "images": {"text_encoders": texts}}), HERE
        )
        for method, texts in (("lora", False), ("auto", True))
    ]
    assert plans[1].settings.method == "lora"
    alone, beside = (run.plan.prediction.memory for run in plans)
    texts = sum(count for name, count in find(TINY).frozen if name.startswith("text"))  # type: ignore[attr-defined]
    assert dict(beside.categories)["text encoders"] == 4 * texts
    assert dict(beside.categories)["adapters"] > dict(alone.categories)["adapters"]


def test_a_folder_of_images_is_a_dataset_with_or_without_captions(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded())
    (tmp_path / "a.txt").write_text("a grey square")
    assert sources.local_path(str(tmp_path)) == tmp_path
