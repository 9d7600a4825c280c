"""Results of evaluations: totals, comparison of answers, and their text."""

from __future__ import annotations

import json

import pytest

from launchers.evaluation.held_out import Score
from launchers.evaluation.result import Answer, EvaluationResult, ExactMatch


def test_a_result_survives_json() -> None:
    answer = Answer(prompt="p", reference="r", base="b", finetuned="f")
    result = EvaluationResult(
        base=Score(loss=2.0, labels=5, rows=1), finetuned=None, answers=(answer,), device="cpu"
    )
    assert EvaluationResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_the_summary_shows_both_losses_and_the_table_shows_answers() -> None:
    result = EvaluationResult(
        base=Score(loss=2.0, labels=5, rows=1),
        finetuned=Score(loss=1.0, labels=5, rows=1),
        answers=(Answer(prompt="two\nlines", reference="reference", base="before", finetuned="x" * 500),),
    )
    assert "2.0000 before, 1.0000 after (perplexity 7.389 -> 2.718" in result.text()
    first = [line.split()[0] for line in result.table().splitlines()]
    assert first == ["message", "expected", "before", "after"]
    assert "two lines" in result.table()
    assert all(len(line) < 200 for line in (*result.text().splitlines(), *result.table().splitlines()))


def answer(number: int, finetuned: str = "yes") -> Answer:
    return Answer(
        prompt=f"<|p|>{number}", reference="yes", base="no", finetuned=finetuned, question=f"{number}?"
    )


def test_answers_equal_to_the_reference_are_counted_ignoring_surrounding_white_space() -> None:
    answers = (answer(1), answer(2, " yes\n"), answer(3, "yes indeed"), answer(4, "Yes"), answer(5, ""))
    result = EvaluationResult(base=None, finetuned=None, answers=answers)
    assert result.exact_match == ExactMatch(answers=5, base=0, finetuned=2)
    assert "held-out answers right: 0 of 5 before, 2 of 5 after" in result.text()


@pytest.mark.parametrize("task", ["pretrain", "dpo", "grpo"])
def test_answers_are_counted_only_if_there_is_one_right_answer(task: str) -> None:
    result = EvaluationResult(task=task, base=None, finetuned=None, answers=(answer(1),))
    assert result.exact_match is None
    assert "right" not in result.table()
    assert EvaluationResult(base=None, finetuned=None).exact_match is None


def test_the_table_has_the_first_answers_and_a_wrong_one_if_the_first_are_right() -> None:
    right = tuple(answer(number) for number in range(1, 6))
    shown = EvaluationResult(base=None, finetuned=None, answers=(*right, answer(6, "no"), answer(7, "no")))
    assert [each.question for each in shown.examples] == ["1?", "2?", "6?"]
    assert [shown.table().count(verdict) for verdict in ("(right)", "(wrong)")] == [2, 1]
    assert len(EvaluationResult(base=None, finetuned=None, answers=right).examples) == 3
    early = EvaluationResult(base=None, finetuned=None, answers=(answer(6, "no"), *right))
    assert [each.question for each in early.examples] == ["6?", "1?", "2?"]
