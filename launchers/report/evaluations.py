"""Losses on held-out rows while a run trains: which is the best, and whether the run is to stop.

Both follow from the losses alone, so that all ranks and nodes decide alike, and so does a run that goes on
from a checkpoint, which keeps them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from estimator.vocabulary import TASKS
from launchers.sections import Evaluation


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutLoss:
    """What the model gives on the held-out rows after a step, by the measure of launchers.held_out."""

    step: int
    loss: float
    seconds: float  # that the evaluation took
    metrics: dict[str, float] = field(default_factory=dict)  # the task's own figures by name

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def figures(self, task: str) -> dict[str, float]:
        """Everything that is known, flat, for a tracker; of tokens their perplexity too."""
        values = {"eval/loss": self.loss} | {f"eval/{name}": value for name, value in self.metrics.items()}
        if TASKS[task].next_token:
            values["eval/perplexity"] = math.exp(self.loss) if self.loss < 700 else math.inf
        return values


Losses = Sequence[HeldOutLoss]


def best_of(losses: Losses) -> HeldOutLoss | None:
    """The lowest loss, the earliest of equal ones; NaN is never the best."""
    known = [each for each in losses if not math.isnan(each.loss)]
    return min(known, key=lambda each: (each.loss, each.step), default=None)


def without_gain(losses: Losses, min_delta: float) -> int:
    """How many evaluations have been made since the last that was lower by more than ``min_delta``."""
    lowest, since = math.inf, 0
    for each in losses:
        if each.loss < lowest - min_delta:
            lowest, since = each.loss, 0
        else:
            since += 1
    return since


def is_over(losses: Losses, settings: Evaluation) -> bool:
    """Whether early stopping ends the run after these."""
    return settings.patience is not None and without_gain(losses, settings.min_delta) >= settings.patience


def why_over(losses: Losses, settings: Evaluation) -> str:
    """Why :func:`is_over`, in a line."""
    best, last = best_of(losses), losses[-1]
    lower = f"lower by more than {settings.min_delta:g}" if settings.min_delta else "lower"
    times = f"{settings.patience} evaluation{'s' if settings.patience != 1 else ''}"
    line = f"stopped after step {last.step}: {times} without a {lower} held-out loss"
    return line if best is None else f"{line}; the lowest was {best.loss:.4f} after step {best.step}"


def handed_over(
    losses: Losses, settings: Evaluation, *, exported: int, last_step: int
) -> list[tuple[str, str]]:
    """Rows of (what, value): which step a run hands over, and why it has ended before its last one.

    ``exported``: the step that is the result; nothing is said of a run that was not evaluated.
    """
    if not losses:
        return []
    best = best_of(losses)
    step = f"step {exported} of {last_step}"
    if settings.keeps_best and best is not None and best.step == exported:
        step += f", the lowest held-out loss ({best.loss:.4f})"
    elif settings.keeps_best and best is not None:
        step += f"; the checkpoint of step {best.step}, the lowest held-out loss, could not be used"
    elif best is not None:
        step += f"; the lowest held-out loss was {best.loss:.4f} after step {best.step}"
    rows = [("exported", step)]
    if is_over(losses, settings):
        rows.append(("stopped early", why_over(losses, settings).removeprefix("stopped ")))
    return rows


def evaluation_line(losses: Losses) -> str:
    """The newest one for the terminal."""
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
    """The step whose model a run hands over that has trained to ``last_step``."""
    best = best_of(losses) if settings.keeps_best else None
    return last_step if best is None else best.step
