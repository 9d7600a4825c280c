"""Jobs that the TRL engine supports or refuses."""

from __future__ import annotations

from typing import Any

import pytest

from estimator import models
from estimator.errors import UserError
from launchers.run import checks
from launchers.run.job import first_supported_engine, unsupported
from launchers.settings import build

GRPO = {"task": "grpo", "rl": {"reward": "a.py:f"}}
TINY = models.find("tiny-llama")


@pytest.mark.parametrize("method", ["full", "lora", "dora"])
def test_only_trl_supports_grpo(method: str) -> None:
    settings = build({**GRPO, "method": method})
    assert first_supported_engine(settings, TINY) == "trl"
    for engine in ("torchtune", "deepspeed", "fsdp2"):
        assert "which engine trl supports" in (unsupported(engine, settings, TINY) or "")


@pytest.mark.parametrize("task", ["sft", "pretrain", "dpo", "kto", "reward"])
def test_trl_supports_only_grpo(task: str) -> None:
    reason = unsupported("trl", build({"task": task, "method": "lora"}), TINY)
    assert reason == f"task {task}: engine trl supports only grpo here"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"packing": True}, "packing"),
        ({"method": "qlora"}, "qlora"),
        ({"zero": {"stage": 3}}, "belong to DeepSpeed"),
        ({"compile": True}, "compile"),
        ({"fp8": "tensorwise"}, "fp8"),
        ({"optimizer": {"name": "muon"}}, "optimizer muon"),
        ({"method": "lora", "new_tokens": ["<x>"]}, "new_tokens"),
        ({"method": "lora", "lora": {"modules_to_save": ["lm_head"]}}, "modules_to_save"),
        ({"recompute": {"what": "selective"}}, "complete blocks"),
        ({"engine_options": {"use_vllm": True}}, "no vLLM server"),
        ({"engine_options": {"num_generations": 4}}, "follows from other settings"),
    ],
)
def test_unsupported_jobs_are_explained_in_a_clause(options: dict[str, Any], named: str) -> None:
    settings = build({**GRPO, **options})
    reason = unsupported("trl", settings, TINY)
    assert named in (reason or "")
    assert "\n" not in (reason or "")
    with pytest.raises(UserError, match="--engine trl"):
        checks.check_supported(settings.model_copy(update={"engine": "trl"}), TINY)
