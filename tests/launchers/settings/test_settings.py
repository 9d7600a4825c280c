"""Settings: validation of user input, and the shipped schema."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from estimator.errors import UserError
from estimator.option_names import ALIASES
from launchers import settings


def test_the_shipped_schema_matches_the_settings() -> None:
    assert json.loads(settings.SCHEMA_FILE.read_text()) == settings.json_schema()


def test_the_defaults_satisfy_the_shipped_schema() -> None:
    defaults = settings.build({}).model_dump(mode="json")
    jsonschema.validate(defaults, json.loads(settings.SCHEMA_FILE.read_text()))


def test_every_setting_has_help() -> None:
    for name in settings.dotted_names():
        assert len(settings.help_of(name)) > 10, name


def test_choices_of_a_setting_are_available_by_its_name() -> None:
    assert settings.choices_of("task")[0] == "sft"
    assert settings.choices_of("resources.device") == ("auto", "cuda", "cpu")
    assert settings.choices_of("seed") == settings.choices_of("dataset") == ()


def test_an_override_reaches_a_nested_setting_and_takes_precedence_over_flags_and_file() -> None:
    built = settings.build(
        {"optimizer": {"lr": 1.0}}, ["optimizer.lr=2e-5", "zero.stage=3"], {"optimizer.lr": 0.5}
    )
    assert (built.optimizer.lr, built.zero.stage) == (2e-5, 3)


def test_an_optimizer_in_the_backward_pass_disables_gradient_clipping() -> None:
    inside = settings.build({}, ["optimizer.in_backward=true"])
    assert inside.clip_grad_norm is None
    assert settings.build(inside.model_dump(mode="json")) == inside
    with pytest.raises(UserError, match="remove one of them"):
        settings.build({}, ["optimizer.in_backward=true", "clip_grad_norm=0.5"])


@pytest.mark.parametrize("written", ["2.5k", "2500", 2500, 2500.0, "2,500"])
def test_a_token_budget_is_accepted_in_every_notation(written: object) -> None:
    built = settings.build({"tokens": written})
    assert built.tokens == 2500
    assert settings.build(built.model_dump(mode="json")) == built
    assert settings.build({}, ["tokens=1B"]).tokens == 10**9
    assert settings.build({}, ["tokens=1e9"]).tokens == 10**9


def test_a_token_budget_in_any_notation_satisfies_the_shipped_schema() -> None:
    for values in ({"tokens": "1B"}, {"tokens": 1000}, {"mixture": {"b.jsonl": 0.5}}):
        jsonschema.validate(values, json.loads(settings.SCHEMA_FILE.read_text()))


def test_a_flag_takes_precedence_over_the_file() -> None:
    assert settings.build({"seed": 1}, [], {"seed": 2}).seed == 2


def test_raw_engine_values_pass_through() -> None:
    built = settings.build({}, ["engine_options.optimizer.fused=true"])
    assert built.engine_options == {"optimizer": {"fused": True}}


def test_dumped_settings_build_the_same_settings_again() -> None:
    used = settings.build({"lora": {"rank": 4}}, ["tracker=[wandb]"])
    assert settings.build(used.model_dump(mode="json")) == used


@pytest.mark.parametrize(
    ("values", "overrides", "problem", "advice"),
    [
        ({"method": "qlra"}, [], "method = 'qlra'", "Did you mean qlora"),
        ({}, ["schedule.name=cosin"], "schedule.name = 'cosin'", "Did you mean cosine?"),
        ({"methd": "lora"}, [], "unknown setting `methd`", "method"),
        ({"method": "loar"}, [], "method = 'loar'", ""),
        ({}, ["optimizer.lr"], "`=` is missing", "--set optimizer.lr=2e-5"),
        ({}, ["seed.x=1"], "seed", ""),
        ({}, ["lora.targets=[q_proj"], "--set lora.targets=[q_proj: the value is not valid YAML", "quotes"),
        ({}, ["tokens=5x"], "tokens = '5x': should be a number of tokens, such as 20000, 300M or 1B", ""),
        ({"tokens": "1M", "max_steps": 3}, [], "tokens and max_steps both limit", ""),
        (
            {"task": "grpo", "rl": {"group_size": 1}},
            [],
            "rl.group_size = 1: should be greater than or equal to 2",
            "",
        ),
        ({"task": "grpo", "global_batch_size": 12}, [], "multiple of rl.group_size 8", ""),
        ({"task": "grpo", "tokens": "1M"}, [], "unknown in advance", ""),
        ({"mixture": {"b.jsonl": 0}}, [], "mixture = 0: should be greater than 0", ""),
        ({"dataset": "a.jsonl", "mixture": {"a.jsonl": 1}}, [], "mixture contains a.jsonl", ""),
        ({"dataset": ""}, [], "dataset = '': should be text that is not empty", ""),
        ({"model": ""}, [], "model = ''", ""),
        ({}, ["output_dir="], "output_dir = None", ""),
        ({"optimizer": {"lr": float("inf")}}, [], "optimizer.lr = inf: should be a finite number", ""),
        ({"optimizer": {"lr": "fast"}}, [], "optimizer.lr = 'fast': should be a valid number or 'auto'", ""),
        ({"optimizer": {"lr": True}}, [], "optimizer: lr = True: ", ""),
        ({"optimizer": {"betas": [0.9]}}, [], "optimizer.betas = [0.9] has too few values", ""),
        ({"optimizer": {"betas": [0.9, 1.5]}}, [], "optimizer.betas.1 = 1.5: should be less than 1", ""),
        ({"fsdp": "full_shard"}, [], "fsdp = 'full_shard': should be a section, with fsdp.sharding", ""),
        ({"lora": None}, [], "lora = None: should be a section", ""),
        ({"lora": {"targets": "foo"}}, [], "lora.targets.0 = 'foo': should be 'q_proj'", ""),
        (
            {"schedule": {"warmup_ratio": 0.1, "warmup_steps": 5}},
            [],
            "schedule: warmup_steps and warmup_ratio exclude each other",
            "",
        ),
        ({"group_by_length": True, "packing": True}, [], "remove one of them", ""),
        ({"tracker": "excel"}, [], "tracker.0 = 'excel': should be 'tensorboard', 'wandb' or 'mlflow'", ""),
        ({"zero": {"config": "nope.json"}}, [], "nope.json", ""),
        ({}, ["=5"], "--set =5: the name before `=` is missing", "--set optimizer.lr=2e-5"),
        ({}, ["optimizer/lr=1"], "unknown setting `optimizer/lr`", "optimizer.lr"),
        ({}, ["engine_options={a"], "the value is not valid YAML", "brackets"),
        ({"a name": 1}, [], "unknown setting `a name`", ""),
        (
            {"modle": "x", "lora": {"rnk": 4}},
            [],
            "unknown setting `lora.rnk`",
            "Did you mean lora.rank, lora.rslora, lora.targets, model?",
        ),
        (
            {"columns": "promt=q"},
            [],
            "not of `promt` (Did you mean prompt",
            "",
        ),
        ({"columns": {"zzz": "q"}}, [], "not of `zzz` (The keys are messages, conversations, prompt", ""),
        ({"columns": "prompt"}, [], "should be pairs of key and column", ""),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(
    values: dict[str, object], overrides: list[str], problem: str, advice: str
) -> None:
    with pytest.raises(UserError) as caught:
        settings.build(values, overrides)
    assert problem in caught.value.problem
    assert "\n" not in caught.value.problem
    assert advice in caught.value.advice


def test_a_date_in_yaml_is_read_as_text() -> None:
    assert settings.parse_yaml("model: 2026-11-21")["model"] == "2026-11-21"


def test_a_range_of_steps_in_yaml_is_read_as_text_not_as_a_base_60_number() -> None:
    assert settings.parse_yaml("profile: {steps: 20:23}")["profile"]["steps"] == "20:23"


def test_an_error_in_a_settings_file_names_the_line() -> None:
    with pytest.raises(UserError, match="line 2"):
        settings.parse_yaml("model: a\n  b: : c\n")


def test_settings_are_pickled_to_the_same_bytes_in_every_process() -> None:
    """Metaflow joins the nodes of a gang only if their artifacts are identical bytes."""
    code = (
        "import pickle, sys; from launchers import settings; "
        "given = {'lora': {'rank': 4}, 'seed': 3, 'tracker': ['wandb'], 'optimizer': {'lr': 1e-5}}; "
        "first = pickle.dumps(settings.build(given)); "
        "assert pickle.loads(first) == settings.build(given); "
        "assert pickle.dumps(pickle.loads(first)) == first; "
        "print(first.hex())"
    )
    pickled = [
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert len(set(pickled)) == 1


@pytest.mark.parametrize(
    ("old", "name"),
    [
        ("launcher", "engine"),
        ("lr", "optimizer.lr"),
        ("adam_beta2", "optimizer.betas"),
    ],
)
def test_a_setting_name_of_another_tool_is_refused_with_the_matching_name(old: str, name: str) -> None:
    for values in ({"values": {old: "x"}}, {"values": {}, "overrides": [f"{old}=x"]}):
        with pytest.raises(UserError, match=f"unknown setting `{old}`") as caught:
            settings.build(**values)  # type: ignore[arg-type]
        assert caught.value.advice == f"Did you mean {name}?"


def test_every_alias_of_another_tool_names_an_existing_setting() -> None:
    assert set(ALIASES.values()) <= set(settings.dotted_names())
    assert not ALIASES.keys() & set(settings.dotted_names())


@pytest.mark.parametrize(
    ("values", "name", "expected"),
    [
        ({"tracker": "wandb"}, "tracker", ("wandb",)),
        ({"new_tokens": "<tool>"}, "new_tokens", ("<tool>",)),
        ({"lora": {"targets": "q_proj"}}, "lora.targets", ("q_proj",)),
        ({"lora": {"targets": "all-linear"}}, "lora.targets", "all-linear"),
        ({"lora": {"modules_to_save": "norms"}}, "lora.modules_to_save", ("norms",)),
    ],
)
def test_a_single_value_is_accepted_for_a_list_setting(
    values: dict[str, Any], name: str, expected: object
) -> None:
    value: Any = settings.build(values)
    for part in name.split("."):
        value = getattr(value, part)
    assert value == expected


def test_a_duplicate_key_is_refused_with_both_lines() -> None:
    with pytest.raises(UserError, match="`epochs` twice, in lines 1 and 3"):
        settings.parse_yaml("epochs: 1\nseed: 3\nepochs: 2\n")
    with pytest.raises(UserError, match="`lr` twice, in lines 2 and 3"):
        settings.parse_yaml("optimizer:\n  lr: 1\n  lr: 2\n")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"patience": 3}, "evaluation.patience needs evaluations during training"),
        ({"every_steps": 5, "min_delta": 0.1}, "applies to evaluation.patience"),
        ({"every_steps": 5, "every_minutes": 1.0}, "exclude each other"),
        ({"every_steps": 5, "fraction": 0}, "no held-out rows"),
        ({"every_steps": 0}, "evaluation.every_steps = 0"),
        ({"every_steps": 30}, "evaluation.every_steps 30: max_steps is 20"),
    ],
)
def test_impossible_evaluation_settings_are_refused_in_one_line(
    values: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UserError) as caught:
        settings.build({"max_steps": 20, "evaluation": values})
    assert expected in caught.value.problem
    assert "\n" not in caught.value.problem


def test_grpo_is_not_evaluated_while_it_trains() -> None:
    with pytest.raises(UserError, match="evaluated only before and after the run"):
        settings.build({"task": "grpo", "evaluation": {"every_steps": 5}})


def test_the_best_step_is_kept_if_a_run_may_stop_early_or_if_requested() -> None:
    kept_settings = [{"patience": 2}, {"keep_best": True}, {"patience": 2, "keep_best": False}, {}]
    evaluation_settings = [
        settings.build({"evaluation": {"every_steps": 5, **each}}).evaluation for each in kept_settings
    ]
    assert [each.keeps_best for each in evaluation_settings] == [True, True, False, False]


def test_relative_paths_in_a_settings_file_are_resolved_next_to_it_first(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "more.txt", "score.py", "split"):
        (tmp_path / name).touch()
    text = """
    dataset: rows.jsonl
    mixture: {more.txt: 0.5, elsewhere.txt: 2}
    evaluation: {dataset: "split#test"}
    rl: {reward: "score.py:short"}
    rejection: {score: "/absolute/score.py:short"}
    """
    values = settings.parse_yaml(text, tmp_path)
    assert values["dataset"] == str(tmp_path / "rows.jsonl")
    assert values["mixture"] == {str(tmp_path / "more.txt"): 0.5, "elsewhere.txt": 2}
    assert values["evaluation"]["dataset"] == f"{tmp_path}/split#test"
    assert values["rl"]["reward"] == f"{tmp_path}/score.py:short"
    assert values["rejection"]["score"] == "/absolute/score.py:short"
    assert "model" not in values, "only what the file sets"
