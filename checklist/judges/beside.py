"""GPUs beside others of their kind: what one has less of."""

from __future__ import annotations

from checklist.judges.advice import finding
from checklist.judges.context import JudgingContext
from checklist.result import Finding, Gravity


def fewer(context: JudgingContext, field: str, code: str, verdict: Gravity, what: str) -> list[Finding]:
    """GPUs that have fewer of something than others of their kind; how many are due differs by kind."""
    kinds = {
        fact.rank: fact.gpu_names[fact.local_rank]
        for fact in context.facts
        if fact.local_rank < len(fact.gpu_names)
    }
    known = [(state, getattr(state, field)) for state in context.measurements.health if state.rank in kinds]
    most: dict[str, int] = {}
    for state, count in known:
        if count is not None:
            most[kinds[state.rank]] = max(count, most.get(kinds[state.rank], 0))
    findings = []
    for state, count in known:
        due = most.get(kinds[state.rank])
        if count is not None and due is not None and count < due:
            name = context.name_of_rank(state.rank)
            title = f"The GPU of rank {state.rank} ({name}) has {count} {what}, others of its kind {due}."
            findings.append(
                finding("gpu-health", code, verdict, title, nodes=[name], ranks=[state.rank], gpu=state.uuid)
            )
    return findings
