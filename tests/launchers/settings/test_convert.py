"""Configurations of other tools: all keys are accounted for, and values are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from estimator.errors import UserError
from flows.commands import convert as finetune_convert
from launchers import settings
from launchers.settings import convert
from launchers.settings.conversion_rules import RULES

# Excerpts of published examples: REPOSITORY@COMMIT:PATH, and its keys but for long lists
PUBLISHED = [
    json.loads(line) for line in (Path(__file__).parent / "configs_elsewhere.jsonl").read_text().splitlines()
]


def ids() -> list[str]:
    return [row["source"] for row in PUBLISHED]


@pytest.mark.parametrize("row", PUBLISHED, ids=ids())
def test_every_key_of_a_published_example_is_converted_or_reported(row: dict[str, Any]) -> None:
    config = row["config"]
    converted = convert.convert(config)
    reported = {each.key for each in converted.translated}
    reported = {key.strip() for each in reported for key in each.split(",")}
    reported |= {key for key, _ in converted.unneeded} | {
        text.partition(":")[0] for text, _ in converted.missing
    }
    rules = RULES[converted.tool]
    for key, value in convert._flattened(config, rules):
        silent = convert._is_off(value)
        assert silent or key in reported, key
    assert settings.build(converted.nested())  # a run takes them
    assert converted.values["method"] in ("full", "lora", "qlora", "dora")
    assert all(reason for _, reason in converted.missing + converted.unneeded)


def test_the_published_examples_cover_all_four_tools() -> None:
    tools = [convert.recognize(row["config"]) for row in PUBLISHED]
    assert len(tools) >= 40
    assert {tool: tools.count(tool) >= 10 for tool in RULES} == dict.fromkeys(RULES, True)


AXOLOTL = {
    "base_model": "NousResearch/Meta-Llama-3-8B",
    "load_in_4bit": True,
    "datasets": [{"path": "aaditya/alpaca_subset_1", "type": "alpaca"}],
    "adapter": "qlora",
    "sequence_len": 4096,
    "sample_packing": True,
    "lora_r": 32,
    "lora_target_linear": True,
    "gradient_accumulation_steps": 4,
    "micro_batch_size": 2,
    "num_epochs": 4,
    "optimizer": "paged_adamw_32bit",
    "learning_rate": "2e-4",
    "bf16": "auto",
    "special_tokens": {"pad_token": "<|end_of_text|>"},
}


def test_an_axolotl_qlora_file_becomes_qlora_with_the_same_batch() -> None:
    converted = convert.convert(AXOLOTL, gpus=2)
    assert converted.values == {
        "model": "NousResearch/Meta-Llama-3-8B",
        "dataset": "aaditya/alpaca_subset_1",
        "method": "qlora",
        "seq_len": 4096,
        "packing": True,
        "lora.rank": 32,
        "lora.targets": "all-linear",
        "micro_batch_size": 2,
        "epochs": 4,
        "optimizer.name": "paged-adamw",
        "optimizer.lr": 2e-4,
        "precision": "auto",
        "global_batch_size": 16,
    }
    assert [text for text, _ in converted.missing] == ["special_tokens: {'pad_token': '<|end_of_text|>'}"]


def test_method_task_and_targets_follow_from_torchtune_components() -> None:
    converted = convert.convert(
        {
            "tokenizer": {"max_seq_len": 1024},
            "checkpointer": {"checkpoint_dir": "/models/llama"},
            "optimizer": {"_component_": "torch.optim.AdamW", "lr": "3e-4"},
            "model": {
                "_component_": "torchtune.models.llama3_1.lora_llama3_1_8b",
                "lora_attn_modules": ["q_proj", "output_proj"],
                "apply_lora_to_mlp": True,
                "lora_rank": 64,
            },
            "loss": {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.2},
            "dataset": {"_component_": "torchtune.datasets.stack_exchange_paired_dataset"},
            "batch_size": 4,
            "gradient_accumulation_steps": 8,
        }
    )
    values = converted.values
    assert (values["method"], values["task"], values["preference.beta"]) == ("lora", "dpo", 0.2)
    assert values["lora.targets"] == ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert (values["global_batch_size"], values["optimizer.lr"], values["seq_len"]) == (32, 3e-4, 1024)
    assert [reason for _, reason in converted.missing] == ["name the dataset in dataset"]


def test_the_task_follows_from_the_llama_factory_loss_and_unknown_values_are_named() -> None:
    converted = convert.convert(
        {
            "model_name_or_path": "org/model",
            "stage": "dpo",
            "pref_loss": "simpo",
            "finetuning_type": "lora",
            "quantization_bit": 4,
            "dataset": "a,b",
            "learning_rate": 5e-6,
            "lr_scheduler_type": "polynomial",
            "cutoff_len": 2048,
        }
    )
    assert (converted.values["task"], converted.values["method"]) == ("simpo", "qlora")
    missing = dict(converted.missing)
    assert "mixture" in missing["dataset: a,b"]
    assert missing["lr_scheduler_type: polynomial"] == "this package has no such choice"


def test_the_command_writes_the_converted_settings_and_prints_the_keys_that_it_omitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, ours = tmp_path / "axolotl.yml", tmp_path / "my settings.yaml"
    theirs.write_text(yaml.safe_dump(AXOLOTL))
    finetune_convert.convert(theirs, output=ours, gpus=2)
    built = settings.build(settings.parse_yaml(ours.read_text()))
    assert (built.global_batch_size, built.lora.rank, built.method) == (16, 32, "qlora")
    shown = capsys.readouterr().err
    assert "NOT translated:\n  special_tokens" in shown
    assert f"next: finetune run '{ours}'\n" in shown
    assert "learning_rate -> optimizer.lr = 0.0002" in shown
    for text, expected in (
        ("- 1", "has no keys"),
        ("a: [", "cannot be read"),
        ("a: 1", "not a training config"),
    ):
        theirs.write_text(text)
        with pytest.raises(UserError, match=expected):
            finetune_convert.convert(theirs)
    theirs.write_text(yaml.safe_dump(AXOLOTL))
    with pytest.raises(UserError, match="Cannot write"):
        finetune_convert.convert(theirs, output=tmp_path)
    with pytest.raises(UserError, match=r"missing\.yml cannot be read"):
        finetune_convert.convert(tmp_path / "missing.yml")
    with pytest.raises(UserError, match="--plan needs"):
        finetune_convert.convert(theirs, plan=True)


def test_every_conversion_rule_names_an_existing_setting() -> None:
    names = set(settings.dotted_names())
    assert {rule.setting for rules in RULES.values() for rule in rules.values()} - {""} <= names
