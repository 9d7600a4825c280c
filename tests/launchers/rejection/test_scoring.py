"""Scoring functions that work or fail, and scores of a reward model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from estimator.errors import UserError
from launchers.dataset.prompts import Prompt
from launchers.dataset.turns import Message
from launchers.rejection import answers as rows
from launchers.rejection import scoring
from launchers.rejection.answers import Answer, Answers
from launchers.rejection.scoring import ScoringRequest
from launchers.settings import Settings
from tests.launchers.scoring import reward_models

FUNCTIONS = """
def picky(prompt, answer): return 1.0 / len(answer)
"""
PROMPTS = [
    Prompt(
        index=index,
        text="",
        shown=f"question {index}",
        tokens=1,
        messages=(Message(role="user", content="q" * index),),
    )
    for index in range(1, 4)
]


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def request(tmp_path: Path, answered: list[Answers], **overrides: Any) -> ScoringRequest:
    (tmp_path / "answers").mkdir()
    rows.write_rows(tmp_path / "prompts.jsonl", PROMPTS)
    for shard, each in enumerate(answered):
        rows.write_rows(tmp_path / "answers" / rows.shard_name(shard), [each])
    return ScoringRequest(
        prompts=tmp_path / "prompts.jsonl",
        answers_dir=tmp_path / "answers",
        shards_dir=tmp_path / "scores",
        shards=len(answered),
        work_dir=tmp_path / "work",
        settings=Settings(),
        device="cpu",
        **overrides,
    )


def answers_of(index: int, *texts: str) -> Answers:
    return Answers(index=index, answers=tuple(Answer(text=text, tokens=1, ended=True) for text in texts))


def test_finished_shards_are_kept_and_an_answer_that_fails_to_score_is_named(
    tmp_path: Path, functions: Path
) -> None:
    answered = [answers_of(1, "ab", "a"), answers_of(2, "abcd", "")]
    answered_prompts: list[int] = []
    scoring_request = request(tmp_path, answered, score="picky", function=f"{functions}:picky")
    with pytest.raises(
        UserError, match=r"raised ZeroDivisionError.* for the answer '' to the prompt 'question 2'"
    ):
        scoring.score(scoring_request, lambda shard, _: answered_prompts.append(shard))
    assert answered_prompts == [0]
    functions.write_text(FUNCTIONS.replace("1.0 / len(answer)", "-1.0"))
    scoring.score(scoring_request, lambda shard, _: answered_prompts.append(shard))
    assert answered_prompts == [0, 1]
    stored_scores = [
        rows.read_scores(scoring_request.shards_dir / rows.shard_name(shard)) for shard in (0, 1)
    ]
    assert [each.scores for shard in stored_scores for each in shard] == [(0.5, 1.0), (-1.0, -1.0)]


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reward_models.make(tmp_path_factory.mktemp("reward"))


def test_a_reward_model_gives_an_answer_the_same_score_in_a_batch_as_alone(
    tmp_path: Path, reward_model: Path
) -> None:
    import torch

    from launchers.dataset import render
    from launchers.models import causal

    answered = [
        answers_of(1, "yes", "a far longer answer than that, of many words"),
        answers_of(3, "no", "yes"),
    ]
    scoring_request = request(tmp_path, answered, score="model", model_dir=reward_model)
    scoring.main(scoring_request.save())
    stored_scores = [
        score
        for shard in (0, 1)
        for each in rows.read_scores(scoring_request.shards_dir / rows.shard_name(shard))
        for score in each.scores
    ]
    tokenizer, model = render.load_tokenizer(reward_model, Settings()), causal.load(reward_model).eval()
    prompts = {prompt.index: prompt for prompt in PROMPTS}
    expected = []
    for each in answered:
        for answer in each.answers:
            conversation = prompts[each.index].with_answer(answer.text)
            ((tokens, _),) = render.tokenize([conversation], tokenizer)
            with torch.inference_mode():
                expected.append(model(torch.from_numpy(tokens).long()[None]).logits.item())
    assert stored_scores == pytest.approx(expected, abs=1e-4)
    assert len(set(stored_scores)) == 4
