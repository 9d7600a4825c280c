"""Findings about slow rails of a node, if its GPUs were measured separately."""

from __future__ import annotations

from checklist.analysis.rails import SlowRail, slow_between, slow_rails
from checklist.judging.advice import finding
from checklist.judging.common_cause import SLOW_RAIL
from checklist.judging.context import JudgingContext, shorten
from checklist.result import Finding

_WAYS = {"node": "is slow in both directions", "transmit": "sends slowly", "receive": "receives slowly"}


def rails(context: JudgingContext) -> dict[tuple[int, ...], list[Finding]]:
    """Return findings about rails, by their nodes."""
    findings: dict[tuple[int, ...], list[Finding]] = {}
    for rail in slow_rails(context.measurements.pairs):
        findings.setdefault(rail.nodes, []).append(_finding(context, rail))
    return findings


def rails_between(context: JudgingContext, src: int, dst: int) -> str:
    """Describe the slow rails of a slow link, with a leading space; empty if all rails are equally slow."""
    slow = slow_between(context.measurements.pairs, src, dst)
    if not slow:
        return ""
    return f" on rail{'s' if len(slow) > 1 else ''} {', '.join(map(str, slow))} alone"


def _finding(context: JudgingContext, rail: SlowRail) -> Finding:
    share = f"{rail.share:.0%} of what its neighbors carry"
    names = context.names(rail.nodes)
    ranks = [fact.rank for fact in context.facts if fact.node in rail.nodes and fact.local_rank == rail.rail]
    if len(names) == 1:
        card = f"GPU {rail.rail} and its network card"
        title = f"Rail {rail.rail} of {names[0]} ({card}) {_WAYS[rail.kind]}: {share}."
        return finding("pairs", SLOW_RAIL, "FAIL", title, nodes=names, ranks=ranks, rail=rail.rail)
    if len(names) == 2:
        title = f"Rail {rail.rail} between {names[0]} and {names[1]} is slow: {share}; faulty end unknown."
        return finding("pairs", SLOW_RAIL, "FAIL", title, suspects=names, ranks=ranks, rail=rail.rail)
    title = f"Rail {rail.rail} is slow on all {len(names)} nodes ({shorten(names)}): {share}."
    return finding("pairs", "slow-rail-everywhere", "FAIL", title, rail=rail.rail)
