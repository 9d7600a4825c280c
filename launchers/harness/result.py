"""Results of lm-evaluation-harness for both models, by task and metric."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskScore:
    """One metric of one model on one task."""

    task: str
    metric: str  # with its filter unless that is "none": "exact_match,strict-match"
    value: float
    stderr: float | None  # None: not provided for this metric
    rows: int | None  # number of scored rows; None for a group of tasks
    higher_is_better: bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskMetric:
    """One metric of one task, before and after training."""

    task: str
    metric: str
    before: float
    after: float
    before_stderr: float | None
    after_stderr: float | None
    rows: int | None
    higher_is_better: bool | None

    def cells(self) -> tuple[str, ...]:
        """Return the table row for :data:`HEADERS`."""
        sign = {True: " (higher is better)", False: " (lower is better)", None: ""}[self.higher_is_better]
        return (
            self.task,
            f"{self.metric}{sign}",
            _figure(self.before, self.before_stderr),
            _figure(self.after, self.after_stderr),
            "" if self.rows is None else f"{self.rows:,}",
        )


HEADERS = ("task", "metric", "before", "after", "rows")


@dataclass(frozen=True, kw_only=True, slots=True)
class HarnessResult:
    """All metrics of all tasks, in the order of the settings, with the evaluation options."""

    rows: tuple[TaskMetric, ...]
    limit: int | None
    num_fewshot: int | None
    chat: bool
    version: str  # of lm-evaluation-harness
    schema: int = 1

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def options(self) -> str:
        """Evaluation options that the scores depend on, in one line."""
        parts = [f"lm-evaluation-harness {self.version}"]
        if self.num_fewshot is not None:
            parts.append(f"{self.num_fewshot} examples before each question")
        if self.limit is not None:
            parts.append(f"at most {self.limit:,} rows of a task")
        if self.chat:
            parts.append("through the chat template")
        return ", ".join(parts) + "; \N{PLUS-MINUS SIGN} standard error"

    def facts(self) -> list[tuple[str, str]]:
        """Return rows of (label, value) for the closing report and the model's README."""
        return [
            (
                f"{row.task}, {row.metric}",
                f"{_figure(row.before, row.before_stderr)} before, "
                f"{_figure(row.after, row.after_stderr)} after",
            )
            for row in self.rows
        ]

    def text(self) -> str:
        """Format the table for a terminal."""
        table = [HEADERS, *(row.cells() for row in self.rows)]
        widths = [max(len(row[column]) for row in table) for column in range(len(HEADERS))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table
        ]
        return "\n".join([*(line.rstrip() for line in lines), self.options])


def _figure(value: float, stderr: float | None) -> str:
    return f"{value:.4f}" + ("" if stderr is None else f" \N{PLUS-MINUS SIGN} {stderr:.4f}")


def scores_of(results: dict[str, Any]) -> list[TaskScore]:
    """Extract the scores from the result of ``lm_eval.simple_evaluate``, whose keys are ``METRIC,FILTER``."""
    scores = []
    for task, values in results["results"].items():
        row_counts = results.get("n-samples", {}).get(task)
        for key, value in values.items():
            metric, _, filter_name = key.partition(",")
            if not filter_name or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = values.get(f"{metric}_stderr,{filter_name}")
            scores.append(
                TaskScore(
                    task=task,
                    metric=metric if filter_name == "none" else key,
                    value=float(value),
                    stderr=float(stderr) if isinstance(stderr, int | float) else None,
                    rows=row_counts["effective"] if row_counts else None,
                    higher_is_better=results.get("higher_is_better", {}).get(task, {}).get(metric),
                )
            )
    return scores


def merged(base: Sequence[TaskScore], finetuned: Sequence[TaskScore]) -> tuple[TaskMetric, ...]:
    """Combine both models' scores, which have the same tasks and metrics in the same order."""
    return tuple(
        TaskMetric(
            task=base_score.task,
            metric=base_score.metric,
            before=base_score.value,
            after=finetuned_score.value,
            before_stderr=base_score.stderr,
            after_stderr=finetuned_score.stderr,
            rows=base_score.rows,
            higher_is_better=base_score.higher_is_better,
        )
        for base_score, finetuned_score in zip(base, finetuned, strict=True)
    )
