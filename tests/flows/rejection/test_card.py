"""The cards of rejection sampling as blocks."""

from __future__ import annotations

from decorators.card.blocks import Chart, Grid, Text
from flows.rejection import card
from launchers.dataset.prompts import Prompt
from launchers.dataset.turns import Message
from launchers.rejection.answers import Answer, Answers, Scores
from launchers.rejection.selection import distribution, overview, select
from launchers.settings.sections import Rejection

PROMPTS = [
    Prompt(
        index=index,
        text="",
        shown=f"question {index}",
        tokens=1,
        messages=(Message(role="user", content="q"),),
    )
    for index in range(8)
]
ANSWERS = [
    Answers(index=index, answers=tuple(Answer(text=f"answer {n}", tokens=3, ended=False) for n in range(3)))
    for index in range(8)
]
SCORES = [Scores(index=index, scores=(index, index + 0.5, -index)) for index in range(8)]


def test_the_card_of_a_selection_has_both_histograms_and_the_extremes() -> None:
    _, selection = select(PROMPTS, ANSWERS, SCORES, Rejection())
    blocks = card.draw_selection("mine.py:f", selection)
    heading, chart, facts, _, best, _, worst = blocks
    assert isinstance(heading, Text)
    assert "8 answers kept of 24" in heading.markdown
    assert isinstance(chart, Chart)
    values = chart.spec["data"]["values"]
    for name, count in (("drawn", 24), ("kept", 8)):
        assert sum(row["answers"] for row in values if row["which"] == name) == count
    assert isinstance(facts, Grid)
    assert ("kept answers truncated at the maximum length", "8") in facts.rows
    assert isinstance(best, Grid)
    assert isinstance(worst, Grid)
    assert best.rows[:2] == (("prompt", "question 7"), ("7.5", "answer 1"))
    assert worst.rows[:2] == (("prompt", "question 7"), ("-7", "answer 2"))


def test_cards_of_earlier_steps_show_answers_and_scores() -> None:
    first = card.draw_answers([("prompts", "8")], PROMPTS, ANSWERS)[-1]
    assert isinstance(first, Grid)
    assert first.rows[:3] == (("prompt", "question 0"), ("3 tokens", "answer 0"), ("3 tokens", "answer 1"))
    blocks = card.draw_scores("mine.py:f", overview(PROMPTS, ANSWERS, SCORES))
    assert isinstance(blocks[0], Text)
    assert "Scores of 24 answers" in blocks[0].markdown


def test_equal_scores_have_one_bar_and_long_texts_one_line() -> None:
    (row,) = card.histogram({"drawn": distribution([1.0, 1.0])})["data"]["values"]
    assert row["high"] > row["low"]
    longest = ("ab " * card.MAX_CHARACTERS)[: card.MAX_CHARACTERS - 1] + "a"
    assert card.cell(longest) == longest
    assert (len(card.cell(longest + "x")), card.cell(longest + "x")[-4:]) == (card.MAX_CHARACTERS, " ...")
    assert "\n" not in card.cell("word\n" * 500)
    assert card.cell(" \n") == "(no text)"
