"""Table of the plans that were tried before a run."""

from __future__ import annotations

from collections.abc import Sequence

from decorators.card.blocks import size
from estimator.plan import Plan
from launchers.run.trial import TrialResult, describe_layout, describe_rate


def trial_rows(trials: Sequence[TrialResult], chosen: Plan | None) -> tuple[tuple[str, str, str], ...]:
    """One row per tried plan: speed and memory of a process, predicted and measured."""
    rows = []
    for trial in trials:
        memory, peak = trial.predicted_memory, trial.memory_peak
        reserved = " reserved" if trial.plan.layout.device == "cuda" else ""
        measured = f"{describe_rate(trial.tokens_per_second)}, {size(peak.size_bytes if peak else None)}"
        if trial.failure is not None:
            measured = "ran out of memory" if trial.out_of_memory else trial.failure
        mark = " (selected)" if chosen is not None and chosen.layout == trial.plan.layout else ""
        rows.append(
            (
                describe_layout(trial.plan) + mark,
                f"{describe_rate(trial.plan.prediction.tokens_per_second)}, "
                f"{size(memory.likely_bytes if memory else None)}{reserved}",
                f"{measured}{reserved}" if trial.failure is None else measured,
            )
        )
    return tuple(rows)
