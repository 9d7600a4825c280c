"""Card section of a profiled window: time and memory of its steps."""

from __future__ import annotations

import re

from decorators.card import charts
from decorators.card.blocks import MAY_BREAK, Block, Chart, Grid, Log, Text, safe
from decorators.card.charts import MeasuredPart
from estimator.plan import Plan
from launchers.report.window import Window, collectives, compare, milliseconds

NOT_PREDICTED = "not predicted"
_BREAKS = re.compile(r"(_|::)(?=\w)")


def window_blocks(window: Window, plan: Plan | None) -> list[Block]:
    """Return the blocks: mean step time by kind of work with its prediction, collectives, the most expensive
    operators, and memory by category.
    """
    prediction = plan.prediction if plan is not None else None
    rows = tuple(
        (
            kind,
            NOT_PREDICTED if guess is None else milliseconds(guess),
            "" if seconds is None else milliseconds(seconds),
            "" if seconds is None else f"{seconds / window.split.step_seconds:.1%}",
        )
        for kind, guess, seconds in compare(window, prediction)
    )
    operators = tuple(
        (
            _BREAKS.sub(rf"\1{MAY_BREAK}", operator.name),
            milliseconds(operator.seconds),
            f"{operator.seconds / window.split.step_seconds:.1%}",
            _calls(operator.calls),
        )
        for operator in window.split.operators
    )
    blocks: list[Block] = [Text(markdown=f"### Profiled: {safe(window.steps)}, rank {window.rank}")]
    if prediction is not None and not prediction.step_parts:
        blocks.append(Text(markdown="The plan has no time predictions for this device."))
    blocks.append(_by_kind("share", rows))
    moved = tuple(
        (
            _BREAKS.sub(rf"\1{MAY_BREAK}", operator.kind),
            NOT_PREDICTED if operator.predicted is None else milliseconds(operator.predicted),
            "" if operator.measured is None else milliseconds(operator.measured),
            milliseconds(operator.hidden) if operator.hidden else "",
        )
        for operator in collectives(window, prediction)
    )
    if moved:
        blocks.append(
            Text(markdown="**Collectives**; hidden time overlaps with other work and costs nothing")
        )
        blocks.append(_by_kind("hidden", moved))
    blocks.append(Text(markdown="**Most expensive operators**"))
    blocks.append(Grid(headers=("operator", "a step", "share", "calls"), rows=operators))
    if window.memory:
        measured = [MeasuredPart(name=name, size_bytes=size) for name, size in window.memory]
        unit = "GPU" if window.split.device == "cuda" else "process"
        blocks.append(Text(markdown="**Memory of the window's tensors by category**"))
        predicted = prediction.memory.counted("allocated") if prediction else None
        capacity = prediction.memory.capacity_bytes if prediction else None
        blocks.append(Chart(spec=charts.memory_bars(predicted, measured, unit, capacity)))
    # Shown as logs, which scroll and can be copied, because a path may be wider than the page.
    blocks.append(Text(markdown="Trace for ui.perfetto.dev:"))
    blocks.append(Log(text=window.trace))
    if window.snapshot:
        blocks.append(Text(markdown="CUDA memory snapshot for pytorch.org/memory_viz:"))
        blocks.append(Log(text=window.snapshot))
    return blocks


def _by_kind(last_column: str, rows: tuple[tuple[str, str, str, str], ...]) -> Grid:
    """Table of a step's times by kind; without predictions (as on a CPU) their column is omitted."""
    if any(row[1] != NOT_PREDICTED for row in rows):
        return Grid(headers=("a step", "predicted", "measured", last_column), rows=rows)
    measured = tuple((kind, *figures) for kind, _, *figures in rows)
    return Grid(headers=("a step", "measured", last_column), rows=measured)


def _calls(calls: float) -> str:
    return f"{calls:,.0f}" if calls == round(calls) else f"{calls:,.1f}"
