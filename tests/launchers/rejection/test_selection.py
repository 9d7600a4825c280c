"""Selection of answers, and statistics of scores."""

from __future__ import annotations

import pytest

from estimator.errors import UserError
from launchers.dataset.prompts import Prompt
from launchers.dataset.turns import Message
from launchers.rejection.answers import Answer, Answers, Scores
from launchers.rejection.selection import Comparison, distribution, mean_of, overview, select
from launchers.settings.sections import Rejection

PROMPTS = [
    Prompt(
        index=index,
        text=f"<{index}>",
        shown=f"question {index}",
        tokens=1,
        messages=(Message(role="user", content="q"),),
    )
    for index in range(4)
]
TEXTS = {0: ("a", "b"), 1: ("c", "  "), 2: ("d", "e"), 3: (" ", "")}
SCORES = [
    Scores(index=0, scores=(1.0, 3.0)),
    Scores(index=1, scores=(2.0, 9.0)),
    Scores(index=2, scores=(5.0, 5.0)),
    Scores(index=3, scores=(7.0, 7.0)),
]
ANSWERS = [
    Answers(index=index, answers=tuple(Answer(text=text, tokens=1, ended=text != "d") for text in texts))
    for index, texts in TEXTS.items()
]


def selected_answers(**values: float) -> list[tuple[int, str, float]]:
    selection, _ = select(PROMPTS, ANSWERS, SCORES, Rejection(**values))
    return [(each.index, each.conversation.messages[-1].content, each.score) for each in selection]


def test_the_best_answer_of_each_prompt_is_kept_unless_it_is_empty() -> None:
    assert selected_answers() == [(0, "b", 3.0), (1, "c", 2.0), (2, "d", 5.0)]


def test_min_score_and_top_share_drop_prompts() -> None:
    assert (selected_answers(min_score=3), selected_answers(top_share=0.3)) == (
        [(0, "b", 3.0), (2, "d", 5.0)],
        [(2, "d", 5.0)],
    )
    assert selected_answers(min_score=2.5, top_share=0.5) == [(2, "d", 5.0)]


def test_a_selection_counts_the_dropped_prompts() -> None:
    _, selection = select(PROMPTS, ANSWERS, SCORES, Rejection(min_score=3))
    assert (selection.prompts, selection.empty, selection.cut, selection.below) == (4, 3, 1, 1)
    assert (selection.overview.drawn.answers, selection.kept.mean) == (8, 4.0)
    assert "answers kept:  2" in selection.text()


def test_if_no_answer_is_left_the_best_score_is_reported() -> None:
    with pytest.raises(UserError, match="the best of all has 5") as raised:
        select(PROMPTS, ANSWERS, SCORES, Rejection(min_score=6))
    assert "min-score" in raised.value.advice


def test_an_overview_lists_the_best_and_the_worst_answers_in_order() -> None:
    overview_shown = overview(PROMPTS, ANSWERS, SCORES)
    assert [each.score for each in overview_shown.best] == [9.0, 7.0, 7.0, 5.0, 5.0]
    assert [each.score for each in overview_shown.worst] == [1.0, 2.0, 3.0, 5.0, 5.0]


def test_every_score_is_in_one_bin() -> None:
    values = [0.1 * step for step in range(101)]
    histogram = distribution(values)
    assert sum(each.answers for each in histogram.bins) == 101
    assert histogram.bins[0].low == histogram.low == 0
    assert histogram.bins[-1].high == histogram.high == values[-1]
    some = distribution([0.0, 5.0, values[-1]], histogram)
    assert [(each.low, each.high) for each in some.bins] == [(each.low, each.high) for each in histogram.bins]
    assert (some.bins[0].answers, some.bins[-1].answers, sum(each.answers for each in some.bins)) == (1, 1, 3)
    same = distribution([2.0, 2.0])
    assert [(each.low, each.high, each.answers) for each in same.bins] == [(2.0, 2.0, 2)]


def test_mean_scores_cover_the_answers_to_the_requested_prompts() -> None:
    assert mean_of(SCORES, {0, 1}) == 15 / 4
    assert mean_of(SCORES, set()) is None
    assert "not compared" in Comparison(prompts=0, before=None, after=None).text()
