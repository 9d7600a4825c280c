"""finetune settings: listing and search."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from estimator.cli.app import app
from launchers.settings import dotted_names


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["settings", *arguments], prog_name="finetune")
    return done.output


def test_all_settings_are_listed_with_type_default_and_meaning() -> None:
    rows = json.loads(run("--json"))
    assert [row["name"] for row in rows] == dotted_names()
    assert [row["name"] for row in rows if not (row["meaning"] and row["type"] and row["option"])] == []
    shown = run("lora.rank")
    assert shown.startswith("lora.rank (--lora-rank): integer [default: 8]\n    ")


@pytest.mark.parametrize(
    ("word", "first"),
    [
        ("warmup", "schedule.warmup_steps"),
        ("batch_size", "global_batch_size"),
        ("lora-rank", "lora.rank"),
        ("num_train_epochs", "epochs"),
        ("Jinja", "chat_template"),
    ],
)
def test_a_setting_is_found_by_name_description_and_name_in_other_tools(word: str, first: str) -> None:
    assert run(word).startswith(f"{first} (")


def test_an_unknown_word_is_answered_with_similar_names_and_words() -> None:
    assert "Did you mean" in run("optimzer")
    assert "Did you mean learning" in run("lerning")
    assert "lists all of them" in run("zzzzz")
