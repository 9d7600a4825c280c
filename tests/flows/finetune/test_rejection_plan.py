"""Refusals before a rejection sampling run, and its size and price."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from estimator.errors import UserError
from estimator.hardware import local_machine
from estimator.job import Machine
from estimator.plan import GIB
from flows.finetune import planning, rejection_plan
from launchers import settings
from launchers.models import tiny_llama

ON_H100: dict[str, Any] = {"model": "llama-8b", "method": "full", "gpu": "H100 SXM", "gpus": 8}
ON_H100 |= {"from_catalogue": True}


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    path = tmp_path / "functions.py"
    path.write_text("def length(prompt, answer):\n    return len(answer)\n")
    return path


def test_a_run_without_a_scorer_is_refused() -> None:
    with pytest.raises(UserError, match="No scorer of the answers is set"):
        rejection_plan.check(settings.build({}))


def test_a_task_on_pairs_is_refused(functions: Path) -> None:
    with pytest.raises(UserError, match="task sft"):
        rejection_plan.check(settings.build({"task": "dpo", "rejection": {"score": f"{functions}:length"}}))


def test_too_few_prompts_for_a_batch_are_refused(functions: Path, dataset: Path) -> None:
    values = {"dataset": str(dataset), "rejection": {"score": f"{functions}:length", "prompts": 10}}
    assert rejection_plan.check(settings.build(values)).trained.batch_size == 9, "a default gives way"
    with pytest.raises(
        UserError, match="more than the 9 answers that can be kept to train on, of 10 prompts"
    ):
        rejection_plan.check(settings.build({**values, "global_batch_size": 16}))


def test_the_number_of_steps_follows_from_the_maximum_number_of_kept_answers(
    functions: Path, dataset: Path
) -> None:
    values = {"dataset": str(dataset), "epochs": 2, "global_batch_size": 4}
    values["rejection"] = {"score": f"{functions}:length", "prompts": 40, "top_share": 0.5}
    plan_check = rejection_plan.check(settings.build(values))
    assert (plan_check.prompts, plan_check.trained.max_steps) == (40, (20 - 1) * 2 // 4)


def printed(params: dict[str, Any], backend: Any, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the output of --plan-only as one line."""
    with pytest.raises(SystemExit):
        planning.plan_from_parameters({"settings": {}, "plan_only": True, **params}, backend)
    return " ".join(capsys.readouterr().out.split())


def test_the_plan_shows_its_size_and_marks_unknown_values(
    functions: Path, dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    params = {
        "score": f"{functions}:length",
        "answers": 4,
        "dataset": str(dataset),
        "overrides": ("rejection.max_new_tokens=10",),
    }
    text = printed(params, "local", capsys)
    assert "60 prompts x 4 answers of at most 10 tokens: at most 2,400 tokens are generated" in text
    assert "time unknown: no published speed of generation for this device" in text
    assert "total time unknown" in text


def test_each_stage_and_the_total_have_hours_and_a_price(
    functions: Path, dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    params = ON_H100 | {"score": f"{functions}:length", "answers": 4, "dataset": str(dataset)}
    text = printed(params, "kubernetes", capsys)
    assert re.search(r"generate 1 node with 1x H100 SXM of \S+: \d+ min to \d+ min, \$[\d.]+ to \$", text)
    assert "score 1 node with no GPU: time unknown, price unknown: the function's own time" in text
    assert re.search(r"train as above: \d+ min, \$[\d.]+", text)
    assert re.search(r"total \d+ min to \d+ min, \$[\d.]+ to \$[\d.]+; not included: score", text)
    several_nodes = printed(params | {"overrides": ("rejection.nodes=2",)}, "batch", capsys)
    assert "generate 2 nodes, each 1x H100 SXM" in several_nodes


def test_a_local_reward_model_is_included_in_sizes_and_price(
    tmp_path: Path, dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((tiny_llama.make(tmp_path / "model") / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    (tmp_path / "reward").mkdir()
    (tmp_path / "reward" / "config.json").write_text(json.dumps(config))
    params = ON_H100 | {"score": str(tmp_path / "reward"), "dataset": str(dataset)}
    text = printed(params, "kubernetes", capsys)
    assert re.search(r"score 1 node with 1x H100 SXM of \S+: \d+ min, \$[\d.]+", text)
    assert "not included" not in text.partition("Rejection sampling:")[2]


def test_several_nodes_on_a_machine_with_gpus_are_refused(
    functions: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(
        gpus=(("NVIDIA A100-SXM4-80GB", 80 * GIB),) * 2,
        cpu_cores=16,
        ram_bytes=200 * GIB,
        disk_free_bytes=500 * GIB,
    )
    monkeypatch.setattr(local_machine, "detect", lambda: machine)
    params = {
        "settings": {},
        "model": "llama-3.2-1b",
        "method": "lora",
        "plan_only": True,
        "score": f"{functions}:length",
        "dataset": str(dataset),
        "overrides": ("rejection.nodes=2",),
    }
    with pytest.raises(UserError, match="one process uses all GPUs"):
        planning.plan_from_parameters(params, "local")


def test_the_size_of_a_remote_dataset_is_unknown(functions: Path) -> None:
    values = {"dataset": "org/name", "rejection": {"score": f"{functions}:length"}}
    plan_check = rejection_plan.check(settings.build(values))
    assert (plan_check.prompts, plan_check.held_out, plan_check.longest) == (None, None, None)
    assert plan_check.trained.max_steps is None


@pytest.mark.parametrize(
    ("method", "arguments"),
    [("lora", "there is no vLLM in /bin/sh"), ("adapter-v1", "samples from whole models")],
)
def test_vllm_is_refused_if_missing_and_for_unmergeable_adapters(
    functions: Path, dataset: Path, method: str, arguments: str
) -> None:
    overrides = ("rejection.generator=vllm", "rejection.generator_python=/bin/sh")
    params = {"settings": {}, "method": method, "dataset": str(dataset), "overrides": overrides}
    with pytest.raises(UserError) as caught:
        planning.plan_from_parameters(params | {"score": f"{functions}:length", "answers": 4}, "local")
    assert arguments in caught.value.problem
    assert "\n" not in caught.value.problem
