"""Findings for physically impossible figures, added to the judgement of each check."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from checklist.judging.advice import finding
from checklist.judging.context import Judgement, JudgingContext, worst_of
from checklist.measurements import Unsound
from checklist.result import CheckResult, Finding

CODE = "bad-figure"


def add(context: JudgingContext, judged: Judgement) -> Judgement:
    """Add findings for impossible figures of the check to its judgement; it is no PASS then.

    WARN, because the clock, the driver or this package may be at fault; a check without other figures stays
    NO-VERDICT.
    """
    check = judged.result.check
    found = [one for one in context.measurements.unsound if one.check == check]
    if not found or not isinstance(judged.result, CheckResult):
        return judged
    by_teller: dict[tuple[int | None, int | None, int | None], list[Unsound]] = defaultdict(list)
    for one in found:
        by_teller[one.node, one.rank, one.dst].append(one)
    findings = tuple(_finding(context, same) for same in by_teller.values())
    doubted = {name for fault in findings for name in fault.suspects}
    result = replace(
        judged.result,
        reason=judged.result.reason if judged.findings else findings[0].title,
        nodes=tuple(name for name in judged.result.nodes if name not in doubted),
    )
    if result.measured:
        result = replace(result, verdict=worst_of([result.verdict, "WARN"]))
    return replace(judged, result=result, findings=(*judged.findings, *findings))


def _finding(context: JudgingContext, same: list[Unsound]) -> Finding:
    one = same[0]
    where = "" if one.node is None else f" by {context.name(one.node)}"
    if one.rank is not None:
        where = f" by rank {one.rank} ({context.name_of_rank(one.rank)})"
    if one.dst is not None:
        where += f" to {context.name(one.dst)}"
    more = f" And {len(same) - 1} more of its figures." if len(same) > 1 else ""
    figure = f"{one.value} {one.unit}".rstrip()
    title = f"{one.what}, as reported{where}, is impossible: {figure}: {one.why}.{more}"
    suspects = [] if one.node is None else [context.name(one.node)]
    ranks = [] if one.rank is None else [one.rank]
    return finding(one.check, CODE, "WARN", title, suspects=suspects, ranks=ranks, only=one.check)
