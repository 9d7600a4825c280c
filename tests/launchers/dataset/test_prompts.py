"""Rows of prompts, with and without answers, and invalid ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from estimator.errors import UserError
from launchers.dataset import prepare, prompts, render
from launchers.dataset.files import BadRow
from launchers.dataset.prepared import IGNORE, PROMPTS, Prepared
from launchers.dataset.turns import Message
from launchers.models import tiny_llama
from launchers.settings import build

QUESTION = Message(role="user", content="Name a prime.")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Name a prime."},
        {"prompt": [{"role": "user", "content": "Name a prime."}]},
        {"messages": [{"role": "user", "content": "Name a prime."}]},
        {"conversations": [{"from": "human", "value": "Name a prime."}]},
        {"prompt": "Name a prime.", "completion": "Seven."},
        {"prompt": "Name a prime.", "completion": None},
        {"instruction": "Name a prime.", "output": "Seven."},
        {
            "messages": [
                {"role": "user", "content": "Name a prime."},
                {"role": "assistant", "content": "Seven."},
            ]
        },
    ],
)
def test_a_prompt_is_the_chat_before_its_last_answer(row: dict[str, Any]) -> None:
    assert prompts.parse(row).prompt_messages == (QUESTION,)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": ""}, "`prompt` is empty"),
        ({"prompt": [{"role": "assistant", "content": "x"}]}, "without a user turn"),
        ({"question": "x"}, "no `prompt`"),
        ([1], "a JSON list"),
    ],
)
def test_rows_without_a_prompt_are_refused_with_the_reason(row: Any, expected: str) -> None:
    with pytest.raises(BadRow, match=expected):
        prompts.parse(row)


def test_a_chat_template_that_leaves_out_the_tools_of_a_prompt_is_refused(tmp_path: Path) -> None:
    settings = build({"chat_template": "{{ messages[0]['content'] }}"})
    tokenizer = render.load_tokenizer(tiny_llama.make(tmp_path), settings)
    row = prompts.parse({"prompt": "How warm is it?", "tools": [{"name": "thermometer"}]}, 7)
    with pytest.raises(UserError, match="line 7: the chat template omits the tool thermometer"):
        list(prompts.prompts_of([row], tokenizer))


def test_prompts_are_prepared_in_groups_and_the_end_of_a_long_one_is_kept(tmp_path: Path) -> None:
    tiny_llama.make(tmp_path / "model")
    values = {"task": "grpo", "global_batch_size": 8, "epochs": 2, "evaluation": {"fraction": 0}}
    settings = build(values | {"rl": {"group_size": 4, "max_completion_length": 20}})
    rows = [prompts.parse({"prompt": f"Number {n}: " + "why? " * n}) for n in range(10)]
    info = prepare.prepare(rows, tmp_path / "model", settings, 50, tmp_path / "data", rows[:2])
    data = Prepared(tmp_path / "data")
    assert (info.global_batch_size, info.total_steps, info.seq_len) == (2, 10, 30)
    assert max(data.row_lengths) == 30
    assert info.truncated_rows > 0
    assert all((data.row(n).labels == IGNORE).all() for n in range(10))
    stored_prompts = prompts.read_prompts(tmp_path / "data" / PROMPTS)
    assert [each.shown for each in stored_prompts] == [row.messages[0].content for row in rows]
    assert len(prompts.read_prompts(tmp_path / "data" / "heldout" / PROMPTS)) == 2
    shorter = build(values | {"rl": {"group_size": 2, "max_completion_length": 20}})
    other = prepare.prepare(rows, tmp_path / "model", shorter, 50, tmp_path / "other")
    assert other.fingerprint != info.fingerprint
