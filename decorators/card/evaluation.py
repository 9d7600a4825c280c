"""Card blocks of an evaluation: metrics of both models, a reward model's calibration, answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from decorators.card.blocks import UNKNOWN, Block, Chart, Grid, Picture, Text, breakable
from decorators.card.charts import SCHEMA
from estimator.vocabulary import IMAGE_TASK, TASKS
from launchers.evaluation.held_out import CalibrationBin, Score
from launchers.evaluation.result import EXACT_MATCH, EvaluationResult
from launchers.harness.result import HEADERS, HarnessResult
from launchers.report.telemetry import EvaluationImages

_NAMES = {"accuracy": "pairs ranked correctly"}
_SHOWN_CHARS = 400  # maximum length of a prompt or an answer
# special tokens of common model families
_CHAT_TOKENS = re.compile(r"<\|[\w ]{1,40}\|>|</?s>|<bos>|<eos>|<end_of_turn>")
_SPEAKER = re.compile(  # Llama's, ChatML's, Gemma's
    r"(?:<\|start_header_id\|>|<\|im_start\|>|<start_of_turn>)\s*(\w+)\s*(?:<\|end_header_id\|>)?"
)


def evaluation_blocks(result: EvaluationResult) -> list[Block]:
    """Return the blocks of an evaluation, from top to bottom."""
    blocks: list[Block] = [Text(markdown="### Before and after"), _figures(result)]
    if result.calibration:
        blocks.append(Chart(spec=calibration_chart(result.calibration)))
    if result.pictures:
        blocks.append(Text(markdown="### Held-out captions, from the same seed before and after"))
        drawn: tuple[tuple[Any, ...], ...] = tuple(
            (
                _shown(image.prompt),
                Picture(png=image.base, label="before"),
                Picture(png=image.finetuned, label="after"),
            )
            for image in result.pictures
        )
        blocks.append(Grid(headers=("caption", "before", "after"), rows=drawn))
    if result.answers:
        blocks.append(Text(markdown="### Answers to held-out prompts"))
        for example in result.examples:
            numbered = enumerate(example.images, 1)
            cells = (
                # In the first column, because headers do not wrap
                ("message", example.question or example.prompt),
                ("expected", example.reference),
                ("before", example.base),
                ("after", example.finetuned),
            )
            rows: tuple[tuple[Any, ...], ...] = tuple((name, _shown(text)) for name, text in cells)
            rows = (*((f"image {number}", Picture(png=png, label="")) for number, png in numbered), *rows)
            blocks.append(Grid(headers=("", f"row {result.answers.index(example) + 1}"), rows=rows))
    return blocks


def drawn_blocks(drawn: Sequence[EvaluationImages]) -> list[Block]:
    """Return images drawn of held-out captions while training, a row per caption, the base model's first."""
    names = [f"after step {image.step}" if image.step else "base model" for image in drawn]
    rows: tuple[tuple[Any, ...], ...] = tuple(
        (
            _shown(caption),
            *(
                Picture(png=image.pictures[number], label=name)
                for name, image in zip(names, drawn, strict=True)
            ),
        )
        for number, caption in enumerate(drawn[-1].captions)
    )
    return [
        Text(markdown="### Held-out captions during training, from the same seeds"),
        Grid(headers=("caption", *names), rows=rows),
    ]


def task_blocks(result: HarnessResult) -> list[Block]:
    """Return the table of the tasks' metrics and how the tasks were run."""
    rows = tuple(row.cells() for row in result.rows)
    return [
        Text(markdown=f"### Tasks before and after\n\n{result.options}"),
        Grid(headers=HEADERS, rows=rows),
    ]


def _shown(text: str) -> str:
    """Shorten and escape a text for a narrow cell, without template markup."""
    text = _SPEAKER.sub(r" \1: ", text)
    text = " ".join(_CHAT_TOKENS.sub(" ", text).split()).removesuffix(" assistant:").removesuffix(" model:")
    shortened = text[:_SHOWN_CHARS] + ("..." if len(text) > _SHOWN_CHARS else "")
    return breakable(shortened) or "(nothing)"


def _figures(result: EvaluationResult) -> Grid:
    results = (result.base, result.finetuned)
    rows = [("held-out loss", *(_figure(score, "loss") for score in results))]
    if TASKS[result.task].draws_answers:  # only its metrics are computed
        rows = []
    if result.finetuned is None:
        return Grid(headers=("", "before", "after"), rows=tuple(rows))
    if not result.finetuned.metrics:
        base_value = UNKNOWN if result.base is None else f"{result.base.perplexity:,.4g}"
        rows.append(("perplexity", base_value, f"{result.finetuned.perplexity:,.4g}"))
    for name in result.finetuned.metrics:
        title = _NAMES.get(name, name.replace("_", " "))
        rows.append((title, *(_figure(score, name) for score in results)))
    if result.exact_match is not None:
        match = result.exact_match
        counts = (f"{count:,} of {match.answers:,}" for count in (match.base, match.finetuned))
        rows.append((f"{EXACT_MATCH} (exact match)", *counts))
    unit = "pairs" if result.finetuned.metrics else "rows"
    unit = {"grpo": "prompts", IMAGE_TASK: "images"}.get(result.task, unit)
    rows.append((f"held-out {unit}", f"{result.finetuned.rows:,}", f"{result.finetuned.rows:,}"))
    return Grid(headers=("", "before", "after"), rows=tuple(rows))


def _figure(score: Score | None, name: str) -> str:
    if score is None:
        return UNKNOWN
    value = score.loss if name == "loss" else score.metrics.get(name)
    if value is None:
        return UNKNOWN
    return f"{value:.1%}" if name == "accuracy" else f"{value:.4f}"


def calibration_chart(bins: tuple[CalibrationBin, ...]) -> dict[str, Any]:
    """Calibration chart: ranking accuracy over predicted probability, equal on the diagonal."""
    values = [{"sure": bucket.confidence, "right": bucket.right, "pairs": bucket.pairs} for bucket in bins]
    share = {"type": "quantitative", "axis": {"format": "%"}}
    return {
        "$schema": SCHEMA,
        "width": "container",
        "height": 190,
        "title": {"text": "calibration on held-out pairs", "fontSize": 12, "anchor": "start"},
        "layer": [
            {
                "data": {"values": [{"sure": 0.5, "right": 0.5}, {"sure": 1.0, "right": 1.0}]},
                "mark": {"type": "line", "strokeDash": [4, 4], "color": "#999"},
                "encoding": {"x": {"field": "sure", **share}, "y": {"field": "right", **share}},
            },
            {
                "data": {"values": values},
                "mark": {"type": "line", "point": {"size": 60}, "tooltip": True},
                "encoding": {
                    "x": {
                        "field": "sure",
                        "title": "predicted probability",
                        "scale": {"domain": [0.5, 1.0]},
                        **share,
                    },
                    "y": {
                        "field": "right",
                        "title": "ranked correctly",
                        "scale": {"domain": [0.0, 1.05]},
                        **share,
                    },
                },
            },
        ],
    }
