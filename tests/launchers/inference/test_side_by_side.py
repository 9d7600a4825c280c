"""Answers side by side: each column has the answers of its model, and a key resolves blind columns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator.errors import UserError
from launchers.inference import finished, side_by_side
from launchers.inference.conversation import Conversation, Sampling, load_base, load_finetuned
from launchers.inference.side_by_side import Comparison, Row

GREEDY = Sampling(max_new_tokens=6, temperature=0)


def test_each_column_has_the_answers_of_its_model_with_scores(adapter_dir: Path, tmp_path: Path) -> None:
    model, prompts = finished.from_folder(adapter_dir), ["Hello", "What is a kettle?"]
    comparison = side_by_side.compare(
        {"17": model},
        prompts,
        GREEDY,
        "cpu",
        base_of=model,
        score=lambda prompts, answers: [len(p + a) for p, a in zip(prompts, answers, strict=True)],
    )
    loaded = load_finetuned(model, "cpu", tmp_path)
    for place, each in enumerate((loaded, load_base(loaded, model, "cpu"))):
        for prompt, row in zip(prompts, comparison.rows, strict=True):
            expected = Conversation(loaded=each, sampling=GREEDY).ask(prompt).text
            assert row.answers[place] == expected
            assert row.scores is not None
            assert row.scores[place] == len(prompt + expected)
    assert comparison.columns == ("17", "base")
    assert comparison.means == tuple(
        sum(row.scores[place] for row in comparison.rows if row.scores) / 2 for place in (0, 1)
    )


@given(seed=st.integers(0, 1000), models=st.integers(1, 4), prompts=st.integers(1, 8))
def test_the_key_of_anonymous_columns_restores_every_answer(seed: int, models: int, prompts: int) -> None:
    names = tuple(f"run{model}" for model in range(models))
    rows = [
        Row(
            prompt=f"p{prompt}",
            answers=tuple(f"{name} to p{prompt}" for name in names),
            scores=tuple(float(place) for place in range(models)),
        )
        for prompt in range(prompts)
    ]
    blind = Comparison(columns=names, rows=tuple(rows)).blind(seed)
    assert not any("run" in column for column in blind.columns)
    assert blind.means is None
    key = json.loads(blind.key_json())
    for row, names_by_column in zip(blind.rows, key["prompts"], strict=True):
        for column, answer in zip(blind.columns, row.answers, strict=True):
            assert answer == f"{names_by_column[column]} to {row.prompt}"
    assert key["mean_scores"] == {name: float(place) for place, name in enumerate(names)}


def test_prompts_are_lines_of_text_or_the_last_question_of_json_rows(tmp_path: Path) -> None:
    plain, rows = tmp_path / "p.txt", tmp_path / "p.jsonl"
    plain.write_text("one\n\n two \n")
    turns = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "a"}]
    turns.append({"role": "user", "content": "last"})
    rows.write_text(json.dumps({"prompt": "one"}) + "\n" + json.dumps({"messages": turns}) + "\n")
    assert side_by_side.read_prompts(plain) == ["one", "two"]
    assert side_by_side.read_prompts(rows) == ["one", "last"]
    rows.write_text('{"prompt": "x"}\n{"text": "y"}\n')
    with pytest.raises(UserError, match="line 2: there is no prompt"):
        side_by_side.read_prompts(rows)
    for wrong in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(UserError, match="cannot be read"):
            side_by_side.read_prompts(wrong)
