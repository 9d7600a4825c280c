"""Comparison of runs: metrics, settings that differ, and curves in one chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from typing import Any

from decorators.card.blocks import UNKNOWN, Block, Chart, Grid, Text, safe, size
from decorators.card.charts import SCHEMA, WHOLE_LABEL, smoothed_values, thin
from decorators.profile.measured import Measured
from estimator.formatting import format_clock
from estimator.plan import Plan
from launchers.evaluation.result import EvaluationResult
from launchers.report.evaluations import HeldOutLoss, best_of
from launchers.report.metrics import Metrics, typical

_POINTS = 200  # points per curve
_IGNORED = ("output_dir",)  # settings that do not affect results


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """Record of one run. Fields are None or empty until the run reaches them."""

    run: str
    started: datetime
    state: str  # "finished", "failed", "running", "killed", or "running or killed" if unknown
    plan: Plan
    settings: dict[str, str]  # by dotted names
    metrics: tuple[Metrics, ...] = ()
    measured: Measured | None = None
    evaluation: EvaluationResult | None = None
    evaluations: tuple[HeldOutLoss, ...] = ()  # during training

    def to_dict(self) -> dict[str, Any]:
        measured, evaluation = self.measured, self.evaluation
        return {
            "run": self.run,
            "started": self.started.isoformat(timespec="seconds"),
            "state": self.state,
            "plan": self.plan.to_dict(),
            "settings": self.settings,
            "metrics": [metrics.to_dict() for metrics in self.metrics],
            "measured": measured.to_dict() if measured else None,
            "evaluation": evaluation.to_dict() if evaluation else None,
            "evaluations": [result.to_dict() for result in self.evaluations],
        }


def short_names(runs: Sequence[str]) -> list[str]:
    """Return the shortest endings of run ids, of four or more characters, that differ."""
    length = next(n for n in count(4) if len({run[-n:] for run in runs}) == len(set(runs)))
    return [run[-length:] for run in runs]


def figures(records: Sequence[RunRecord]) -> list[tuple[str, tuple[str, ...]]]:
    """Rows of (metric, one value per run); "predicted -> measured" where both exist."""
    rows = [
        ("started", [f"{r.started:%Y-%m-%d %H:%M}" for r in records]),
        ("state", [r.state for r in records]),
        ("model", [r.plan.model for r in records]),
        ("method", [f"{r.plan.method}, {r.plan.engine}" for r in records]),
        ("nodes x processes", [_processes(r.plan) for r in records]),
        ("steps", [f"{r.metrics[-1].step:,}" if r.metrics else "-" for r in records]),
        ("loss, first -> last", [_losses(r) for r in records]),
        ("held-out loss, before -> after", [_held_out(r) for r in records]),
        ("held-out loss while training, lowest -> last", [_while_training(r) for r in records]),
        ("memory, predicted -> measured", [_memory(r) for r in records]),
        ("tokens/s, predicted -> measured", [_speed(r) for r in records]),
        ("time, predicted -> measured", [_time(r) for r in records]),
        ("USD, predicted -> measured", [_usd(r) for r in records]),
    ]
    return [(name, tuple(cells)) for name, cells in rows if set(cells) - {_pair(None, None), "-"}]


def differing_settings(records: Sequence[RunRecord]) -> list[tuple[str, tuple[str, ...]]]:
    """Rows of (dotted name, one value per run) for the settings that differ between runs."""
    names = dict.fromkeys(name for record in records for name in record.settings)
    rows = [(name, tuple(record.settings.get(name, "-") for record in records)) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1 and name not in _IGNORED]


def draw_runs(flow: str, records: Sequence[RunRecord]) -> list[Block]:
    """Return the blocks of the page that compares runs."""
    heads = tuple(record.run for record in records)
    blocks: list[Block] = [
        Text(markdown=f"## {safe(flow)}: {len(records)} run{'s' if len(records) > 1 else ''}"),
        Grid(headers=("", *heads), rows=tuple((name, *cells) for name, cells in figures(records))),
    ]
    settings = differing_settings(records)
    if settings:
        blocks.append(Text(markdown="### Settings that differ"))
        blocks.append(Grid(headers=("", *heads), rows=tuple((name, *cells) for name, cells in settings)))
    elif len(records) > 1:
        blocks.append(Text(markdown="All settings are equal."))
    trained = [record for record in records if record.metrics]
    for title, field in (("loss", "loss"), ("learning rate", "lr"), ("tokens/s", "tokens_per_second")):
        if trained:
            blocks.append(Chart(spec=curves(trained, title, field)))
    return blocks


def curves(records: Sequence[RunRecord], title: str, field: str) -> dict[str, Any]:
    """Line chart of one metric of several runs over the steps, smoothed except for the learning rate."""
    values = []
    for record in records:
        points = [(m.step, value) for m in record.metrics if (value := getattr(m, field)) is not None]
        smoothed = [value for _, value in points] if field == "lr" else smoothed_values(points)
        values += [
            {"run": record.run, "step": step, "value": value}
            for step, value in thin([*zip((step for step, _ in points), smoothed, strict=True)], _POINTS)
        ]
    return {
        "$schema": SCHEMA,
        "width": "container",
        "height": 190,
        "title": {
            "text": title if field == "lr" else f"{title}, smoothed over a twentieth of the steps",
            "fontSize": 12,
            "anchor": "start",
        },
        "data": {"values": values},
        "mark": {"type": "line", "tooltip": True},
        "encoding": {
            "x": {
                "field": "step",
                "type": "quantitative",
                "axis": {"tickMinStep": 1, "labelExpr": WHOLE_LABEL},
            },
            "y": {
                "field": "value",
                "type": "quantitative",
                "title": None,
                "scale": {"zero": field != "loss"},
                "axis": {"format": ".1e" if field == "lr" else "~s", "tickCount": 5},
            },
            "color": {
                "field": "run",
                "type": "nominal",
                "title": None,
                "sort": [record.run for record in records],
                "legend": {"orient": "bottom", "columns": 3},
            },
        },
    }


def _processes(plan: Plan) -> str:
    gpu = f" {plan.request.gpu_type}" if plan.request.gpu_type else ""
    return f"{plan.layout.nodes} x {plan.layout.processes_per_node}{gpu}"


def _losses(record: RunRecord) -> str:
    if not record.metrics:
        return "-"
    return f"{record.metrics[0].loss:.4f} -> {record.metrics[-1].loss:.4f}"


def _held_out(record: RunRecord) -> str:
    result = record.evaluation
    if result is None or result.finetuned is None:
        return "-"
    base_loss = UNKNOWN if result.base is None else f"{result.base.loss:.4f}"
    return f"{base_loss} -> {result.finetuned.loss:.4f}"


def _while_training(record: RunRecord) -> str:
    best = best_of(record.evaluations)
    if best is None:
        return "-"
    return f"{best.loss:.4f} (step {best.step}) -> {record.evaluations[-1].loss:.4f}"


def _pair(predicted: str | None, measured: str | None) -> str:
    return f"{predicted or '?'} -> {measured or '?'}"


def _memory(record: RunRecord) -> str:
    peak = record.measured.memory_peak if record.measured else None
    predicted = record.plan.prediction.memory.counted(peak.counter if peak else "device")
    pair = _pair(size(predicted.likely_bytes) if predicted else None, size(peak.size_bytes) if peak else None)
    return f"{pair}, reserved by torch" if peak and peak.counter == "reserved" else pair


def _speed(record: RunRecord) -> str:
    predicted = record.plan.prediction.tokens_per_second
    measured = typical(record.metrics, lambda metrics: metrics.tokens_per_second)
    return _pair(*(None if value is None else f"{value:,.0f}" for value in (predicted, measured)))


def _time(record: RunRecord) -> str:
    hours = record.plan.prediction.hours
    seconds = record.measured.duration_seconds if record.measured else None
    return _pair(
        None if hours is None else format_clock(hours * 3600),
        None if seconds is None else format_clock(seconds),
    )


def _usd(record: RunRecord) -> str:
    predicted = record.plan.prediction.usd
    measured = record.measured.usd if record.measured else None
    return _pair(*(None if value is None else f"{value:,.2f}" for value in (predicted, measured)))
