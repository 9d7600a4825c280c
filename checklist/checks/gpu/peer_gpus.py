"""Comparison of GPUs with GPUs of the same model, and with their own state before the load."""

from __future__ import annotations

from collections.abc import Iterable

from checklist.judging.advice import finding
from checklist.judging.context import JudgingContext
from checklist.measurements import GpuHealth
from checklist.result import Finding, Gravity


def kinds_of(context: JudgingContext) -> dict[int, str]:
    """Return the GPU model of each rank."""
    return {
        fact.rank: fact.gpu_names[fact.local_rank]
        for fact in context.facts
        if fact.local_rank < len(fact.gpu_names)
    }


def load_s(context: JudgingContext) -> float:
    """Return the seconds between the readings of GPU health before and after the load."""
    return sum(
        phase.seconds for phase in context.measurements.phases if phase.name in ("mesh", "diag", "node")
    )


def below_peers(
    context: JudgingContext,
    states: Iterable[GpuHealth],
    field: str,
    code: str,
    verdict: Gravity,
    what: str,
    *,
    check: str = "gpu-health",
) -> list[Finding]:
    """Report GPUs whose count of a resource (e.g. active NVLinks) is below the maximum of their model."""
    kinds = kinds_of(context)
    counts = [(state, getattr(state, field)) for state in states if state.rank in kinds]
    maximum: dict[str, int] = {}
    for state, count in counts:
        if count is not None:
            maximum[kinds[state.rank]] = max(count, maximum.get(kinds[state.rank], 0))
    findings = []
    for state, count in counts:
        expected = maximum.get(kinds[state.rank])
        if count is not None and expected is not None and count < expected:
            name = context.name_of_rank(state.rank)
            title = (
                f"The GPU of rank {state.rank} ({name}) has {count} {what}, others of its kind {expected}."
            )
            findings.append(
                finding(check, code, verdict, title, nodes=[name], ranks=[state.rank], gpu=state.uuid)
            )
    return findings
