"""Settings that have no effect are refused with the setting that rules them out."""

from __future__ import annotations

from typing import Any

import pytest

from estimator.errors import UserError
from launchers import settings


def refused(values: dict[str, Any], *overrides: str) -> str:
    """Return the message of the first setting without effect; "" if all are used."""
    try:
        settings.check_used(settings.build(values, overrides), overrides)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"task": "dpo", "train_on_prompt": True}, "--train-on-prompt does not apply to task dpo"),
        ({"preference": {"beta": 0.2}}, "--preference-beta does not apply to task sft"),
        ({"task": "kto", "neftune_alpha": 5}, "--neftune-alpha does not apply to task kto"),
        ({"task": "dpo", "preference": {"beta": 0.2, "margin": 2.0}}, "--preference-margin does not apply"),
        ({"task": "dpo", "rl": {"beta": 0.2}}, "--rl-beta does not apply to task dpo"),
        ({"images": {"resolution": 512}}, "--resolution does not apply to task sft"),
        ({"task": "reward", "evaluation": {"generations": 5}}, "--evaluation-generations does not apply"),
        ({"method": "full", "lora": {"rank": 16}}, "--lora-rank does not apply to --method full"),
        ({"method": "full", "lora": {"dropout": 0.1}}, "--lora-dropout does not apply to --method full"),
        ({"method": "lora", "lora": {"quantization": "int8"}}, "--quantization does not apply to --method"),
        ({"method": "dora", "adapter": {"prompt_length": 4}}, "--adapter-prompt-length does not apply"),
        ({"method": "adapter-v1", "lora": {"alpha": 8}}, "--lora-alpha does not apply to --method adapter"),
        ({"engine": "fsdp2", "zero": {"stage": 2}}, "--zero-stage does not apply to --engine fsdp2"),
        ({"engine": "fsdp2", "zero": {"offload": "cpu"}}, "use --engine deepspeed"),
        ({"engine": "deepspeed", "fsdp": {"offload": "cpu"}}, "use --engine fsdp2"),
        ({"zero": {"offload": "cpu"}, "fsdp": {"replicas": 2}}, "does not apply to --zero-offload cpu"),
        (
            {"activation_checkpointing": False, "recompute": {"every": 2}},
            "--recompute-every does not apply to --no-activation-checkpointing",
        ),
        ({"optimizer": {"name": "sgd", "betas": [0.8, 0.9]}}, "does not apply to --optimizer sgd"),
        ({"schedule": {"decay_ratio": 0.3}}, "--schedule-decay-ratio does not apply to --schedule-name cos"),
        ({"schedule": {"name": "constant", "min_lr_ratio": 0.1}}, "does not apply to --schedule-name const"),
        ({"evaluation": {"dataset": "a.jsonl", "fraction": 0.2}}, "does not apply to --evaluation-dataset"),
        ({"harness": {"limit": 10}}, "--harness-limit has no effect without --eval-harness"),
        ({"export": {"visibility": "public"}}, "Add --push USER/MODEL, or remove it"),
        ({"profile": {"ranks": [0, 1]}}, "Add --profile-steps FIRST:LAST"),
        ({"resources": {"interruption_rate": 0.1}}, "Add --spot, or remove it"),
    ],
)
def test_a_setting_without_effect_is_refused_with_the_setting_that_rules_it_out(
    values: dict[str, Any], expected: str
) -> None:
    message = refused(values)
    assert expected in message
    assert len(message.splitlines()) == 2


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"task": "pretrain", "neftune_alpha": 5},
        {"task": "simpo", "preference": {"beta": 2.5, "margin": 1.4, "label_smoothing": 0.1}},
        {"method": "qlora", "lora": {"quantization": "int8"}},
        {"task": "reward", "evaluation": {"generations": 0}},
        {"evaluation": {"generations": 0, "max_new_tokens": 9}},
        {"method": "auto", "lora": {"rank": 16, "quantization": "int8"}},
        {"engine": "fsdp2", "fsdp": {"sharding": "full", "replicas": 2, "offload": "cpu"}},
        {"optimizer": {"name": "muon", "betas": [0.8, 0.9]}},
        {"schedule": {"name": "wsd", "decay_ratio": 0.3, "min_lr_ratio": 0.1}},
        {"activation_checkpointing": True, "recompute": {"every": 2}},
        {"export": {"push": "me/model", "visibility": "public"}},
    ],
)
def test_a_setting_with_an_effect_is_accepted(values: dict[str, Any]) -> None:
    assert refused(values) == ""


def test_a_default_value_is_refused_on_the_command_line_but_not_in_a_settings_file() -> None:
    """The settings file of a finished run has all values."""
    whole_file = settings.build({"method": "full"}).model_dump(mode="json")
    assert refused(whole_file) == ""
    assert "--lora-rank does not apply" in refused({"method": "full"}, "lora.rank=8")


def test_a_command_line_value_that_requests_nothing_is_accepted() -> None:
    assert refused({"engine": "fsdp2"}, "zero.offload=none", "zero.stage=auto") == ""


def test_settings_of_images_are_refused_once_the_model_has_decided_the_task() -> None:
    images = settings.build({"images": {"ema_decay": 0.9}})
    settings.check_used(images, model_resolved=False)
    with_task = settings.build({"task": "dpo", "images": {"ema_decay": 0.9}})
    for chosen, model_resolved in ((images, True), (with_task, False)):
        with pytest.raises(UserError, match="does not apply to task"):
            settings.check_used(chosen, model_resolved=model_resolved)
