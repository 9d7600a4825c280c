"""Held-out losses during training: selection of the best step, and early stopping.

Both depend only on the losses, so all ranks and nodes reach the same decision, also after a resume:
checkpoints contain the losses.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from estimator.vocabulary import TASKS

if TYPE_CHECKING:
    from launchers.settings.sections import Evaluation


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutLoss:
    """Loss on the held-out rows after a training step, computed as in launchers.evaluation.held_out."""

    step: int
    loss: float
    seconds: float  # duration of the evaluation
    metrics: dict[str, float] = field(default_factory=dict)  # task-specific figures by name

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def figures(self, task: str) -> dict[str, float]:
        """Return the figures as a flat mapping for trackers, with perplexity for token losses."""
        values = {"eval/loss": self.loss} | {f"eval/{name}": value for name, value in self.metrics.items()}
        if TASKS[task].next_token:
            values["eval/perplexity"] = math.exp(self.loss) if self.loss < 700 else math.inf
        return values


Losses = Sequence[HeldOutLoss]


def best_of(losses: Losses) -> HeldOutLoss | None:
    """Return the evaluation with the lowest loss, the earliest if several are equal; NaN is ignored."""
    valid = [loss for loss in losses if not math.isnan(loss.loss)]
    return min(valid, key=lambda loss: (loss.loss, loss.step), default=None)


def evaluations_without_gain(losses: Losses, min_delta: float) -> int:
    """Count the evaluations since the last one that improved the lowest loss by more than ``min_delta``."""
    lowest, since = math.inf, 0
    for loss in losses:
        if loss.loss < lowest - min_delta:
            lowest, since = loss.loss, 0
        else:
            since += 1
    return since


def stops_early(losses: Losses, settings: Evaluation) -> bool:
    """Whether early stopping ends the run after these evaluations."""
    return (
        settings.patience is not None
        and evaluations_without_gain(losses, settings.min_delta) >= settings.patience
    )


def describe_stop(losses: Losses, settings: Evaluation) -> str:
    """Format the reason for early stopping in one line."""
    best, last = best_of(losses), losses[-1]
    loss = "a lower held-out loss"
    if settings.min_delta:
        loss = f"a held-out loss lower by more than {settings.min_delta:g}"
    times = f"{settings.patience} evaluation{'s' if settings.patience != 1 else ''}"
    line = f"stopped after step {last.step}: {times} without {loss}"
    return line if best is None else f"{line}; the lowest was {best.loss:.4f} after step {best.step}"


def describe_export(
    losses: Losses, settings: Evaluation, *, exported: int, last_step: int
) -> list[tuple[str, str]]:
    """Return rows of (label, text): the exported step, and the reason for early stopping, if it was.

    ``exported``: step that was exported. The list is empty for a run without evaluations.
    """
    if not losses:
        return []
    best = best_of(losses)
    step = f"step {exported} of {last_step}"
    if settings.keeps_best and best is not None and best.step == exported:
        step += f", the lowest held-out loss ({best.loss:.4f})"
    elif settings.keeps_best and best is not None:
        step += f"; the checkpoint of step {best.step}, with the lowest held-out loss, was unusable"
    elif best is not None:
        step += f"; the lowest held-out loss was {best.loss:.4f} after step {best.step}"
    rows = [("exported", step)]
    if stops_early(losses, settings):
        rows.append(("stopped early", describe_stop(losses, settings).removeprefix("stopped ")))
    return rows


def evaluation_line(losses: Losses) -> str:
    """Format the newest evaluation for the terminal."""
    newest, best = losses[-1], best_of(losses)
    parts = [f"held-out loss {newest.loss:.4f} after step {newest.step}"]
    if "accuracy" in newest.metrics:
        parts.append(f"accuracy {newest.metrics['accuracy']:.1%}")
    if best is not None and best.step == newest.step:
        parts.append("the lowest so far")
    elif best is not None:
        parts.append(f"the lowest is {best.loss:.4f} of step {best.step}")
    return ", ".join([*parts, f"{newest.seconds:.1f} s"])


def exported_step(losses: Losses, settings: Evaluation, last_step: int) -> int:
    """Return the step to export after training to ``last_step``."""
    best = best_of(losses) if settings.keeps_best else None
    return last_step if best is None else best.step
