"""Cards of rejection sampling: distribution of the scores, best and worst answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from decorators.card.blocks import Block, Chart, Grid, Text, breakable, safe
from decorators.card.charts import SCHEMA
from launchers.dataset.prompts import Prompt
from launchers.rejection.answers import Answers
from launchers.rejection.selection import Distribution, Overview, Selection

MAX_CHARACTERS = 300  # length of an answer or a prompt in a table
EXAMPLES = 5  # number of prompts shown with their answers on the card of the generation
_COLORS = {"drawn": "#bab0ac", "kept": "#54a24b"}


def draw_answers(
    facts: Sequence[tuple[str, str]], prompts: Sequence[Prompt], answers: Sequence[Answers]
) -> list[Block]:
    """Return the card of the generation: statistics, and all answers to the first prompts."""
    prompt_texts = {prompt.index: prompt.shown for prompt in prompts}
    first = sorted(answers, key=lambda each: each.index)[:EXAMPLES]
    rows = [
        row
        for item in first
        for row in (
            ("prompt", cell(prompt_texts[item.index])),
            *((f"{answer.tokens} tokens", cell(answer.text)) for answer in item.answers),
        )
    ]
    return [
        Text(markdown="## Sampled answers"),
        Grid(headers=("", ""), rows=tuple(facts)),
        Text(markdown="### The first prompts"),
        Grid(headers=("", ""), rows=tuple(rows)),
    ]


def draw_scores(scored_by: str, overview: Overview) -> list[Block]:
    """Return the card of the scoring."""
    heading = (
        f"## Scores of {overview.drawn.answers:,} answers\n\nby {safe(scored_by)}: {overview.drawn.text()}"
    )
    return [Text(markdown=heading), Chart(spec=histogram({"drawn": overview.drawn})), *_examples(overview)]


def draw_selection(scored_by: str, selection: Selection) -> list[Block]:
    """Return the card of the selection: all answers compared with the selected ones."""
    kept, drawn = selection.kept, selection.overview.drawn
    rows = (
        ("prompts", f"{selection.prompts:,}"),
        ("answers drawn", f"{drawn.answers:,}; {drawn.text()}"),
        ("answers kept", f"{kept.answers:,}; {kept.text()}"),
        ("prompts left out, their best answer below min_score", f"{selection.below:,}"),
        ("answers without text", f"{selection.empty:,}"),
        ("kept answers truncated at the maximum length", f"{selection.cut:,}"),
    )
    return [
        Text(
            markdown=f"## {kept.answers:,} answers kept of {drawn.answers:,}\n\n"
            f"scored by {safe(breakable(scored_by))}"
        ),
        Chart(spec=histogram({"drawn": drawn, "kept": kept})),
        Grid(headers=("", ""), rows=rows),
        *_examples(selection.overview),
    ]


def histogram(distributions: dict[str, Distribution]) -> dict[str, Any]:
    """Return the histogram of scores, one color per distribution."""
    values = []
    for name, distribution in distributions.items():
        for bar in distribution.bins:
            half_width = 0.5 if bar.high == bar.low else 0.0  # a bar needs a width
            position = {"low": bar.low - half_width, "high": bar.high + half_width}
            values.append({**position, "answers": bar.answers, "which": name})
    return {
        "$schema": SCHEMA,
        "width": "container",
        "height": 160,
        "data": {"values": values},
        "mark": {"type": "bar", "tooltip": True, "opacity": 0.75, "binSpacing": 1},
        "encoding": {
            "x": {"field": "low", "type": "quantitative", "title": "score", "bin": {"binned": True}},
            "x2": {"field": "high"},
            "y": {"field": "answers", "type": "quantitative", "title": "answers", "stack": None},
            "color": {
                "field": "which",
                "type": "nominal",
                "title": None,
                "scale": {"domain": list(distributions), "range": [_COLORS[name] for name in distributions]},
            },
        },
    }


def cell(text: str) -> str:
    """Format a text for a narrow table cell: on one line, shortened."""
    flat = " ".join(text.split()) or "(no text)"
    short = flat if len(flat) <= MAX_CHARACTERS else f"{flat[: MAX_CHARACTERS - 4]} ..."
    return breakable(short)


def _examples(overview: Overview) -> list[Block]:
    blocks: list[Block] = []
    for title, examples in (("Best answers", overview.best), ("Worst answers", overview.worst)):
        # Two columns fit a narrow page
        rows = [
            row
            for example in examples
            for row in (("prompt", cell(example.prompt)), (f"{example.score:.4g}", cell(example.answer)))
        ]
        blocks += [
            Text(markdown=f"### {title}, each with its score"),
            Grid(headers=("", ""), rows=tuple(rows)),
        ]
    return blocks
