"""What lm-evaluation-harness has found of both models, task by task."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskScore:
    """One metric of one task, of one model."""

    task: str
    metric: str  # with its filter where that isn't the usual one: "exact_match,strict-match"
    value: float
    stderr: float | None  # None: the harness knows none for this metric
    rows: int | None  # scored; None for a group, which has its tasks' rows
    higher_is_better: bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskMetric:
    """One metric of one task, before and after."""

    task: str
    metric: str
    before: float
    after: float
    before_stderr: float | None
    after_stderr: float | None
    rows: int | None
    higher_is_better: bool | None

    def cells(self) -> tuple[str, ...]:
        """The row of a table, under :data:`HEADERS`."""
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
    """All metrics of all tasks, in the order that the tasks were asked for, and how they were asked."""

    rows: tuple[TaskMetric, ...]
    limit: int | None
    num_fewshot: int | None
    chat: bool
    version: str  # of lm-evaluation-harness
    schema: int = 1

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def how(self) -> str:
        """What the figures depend on beside the models, in a line."""
        asked = [f"lm-evaluation-harness {self.version}"]
        if self.num_fewshot is not None:
            asked.append(f"{self.num_fewshot} examples before each question")
        if self.limit is not None:
            asked.append(f"at most {self.limit:,} rows of a task")
        if self.chat:
            asked.append("through the chat template")
        return ", ".join(asked) + "; \N{PLUS-MINUS SIGN} standard error"

    def facts(self) -> list[tuple[str, str]]:
        """Rows of (what, value) for the end of a run and the model's page."""
        return [
            (
                f"{row.task}, {row.metric}",
                f"{_figure(row.before, row.before_stderr)} before, "
                f"{_figure(row.after, row.after_stderr)} after",
            )
            for row in self.rows
        ]

    def text(self) -> str:
        """The table for a terminal."""
        table = [HEADERS, *(row.cells() for row in self.rows)]
        widths = [max(len(row[column]) for row in table) for column in range(len(HEADERS))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table
        ]
        return "\n".join([*(line.rstrip() for line in lines), self.how])


def _figure(value: float, stderr: float | None) -> str:
    return f"{value:.4f}" + ("" if stderr is None else f" \N{PLUS-MINUS SIGN} {stderr:.4f}")


def scores_of(results: dict[str, Any]) -> list[TaskScore]:
    """The scores in what ``lm_eval.simple_evaluate`` returns, whose keys are ``METRIC,FILTER``."""
    found = []
    for task, values in results["results"].items():
        counted = results.get("n-samples", {}).get(task)
        for key, value in values.items():
            metric, _, chosen = key.partition(",")
            if not chosen or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = values.get(f"{metric}_stderr,{chosen}")
            found.append(
                TaskScore(
                    task=task,
                    metric=metric if chosen == "none" else key,
                    value=float(value),
                    stderr=float(stderr) if isinstance(stderr, int | float) else None,
                    rows=counted["effective"] if counted else None,
                    higher_is_better=results.get("higher_is_better", {}).get(task, {}).get(metric),
                )
            )
    return found


def merged(base: Sequence[TaskScore], finetuned: Sequence[TaskScore]) -> tuple[TaskMetric, ...]:
    """Both models' scores beside each other: the same tasks and metrics in the same order."""
    return tuple(
        TaskMetric(
            task=before.task,
            metric=before.metric,
            before=before.value,
            after=after.value,
            before_stderr=before.stderr,
            after_stderr=after.stderr,
            rows=before.rows,
            higher_is_better=before.higher_is_better,
        )
        for before, after in zip(base, finetuned, strict=True)
    )
