"""Findings for physically impossible figures, added to the judgment of each check."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from checklist.judging.advice import finding
from checklist.judging.context import JudgingContext, Judgment, worst_of
from checklist.measurements import Unsound
from checklist.result import CheckResult, Finding

CODE = "bad-figure"


def add(context: JudgingContext, judgment: Judgment) -> Judgment:
    """Add findings for impossible figures of the check to its judgment; it is no PASS then.

    WARN, because the clock, the driver or this package may be at fault; a check without other figures stays
    NO-VERDICT.
    """
    check = judgment.result.check
    unsound = [item for item in context.measurements.unsound if item.check == check]
    if not unsound or not isinstance(judgment.result, CheckResult):
        return judgment
    by_source: dict[tuple[int | None, int | None, int | None], list[Unsound]] = defaultdict(list)
    for item in unsound:
        by_source[item.node, item.rank, item.dst].append(item)
    findings = tuple(_finding(context, items) for items in by_source.values())
    suspect_names = {name for fault in findings for name in fault.suspects}
    result = replace(
        judgment.result,
        reason=judgment.result.reason if judgment.findings else findings[0].title,
        nodes=tuple(name for name in judgment.result.nodes if name not in suspect_names),
    )
    if result.measured:
        result = replace(result, verdict=worst_of([result.verdict, "WARN"]))
    return replace(judgment, result=result, findings=(*judgment.findings, *findings))


def _finding(context: JudgingContext, items: list[Unsound]) -> Finding:
    first = items[0]
    where = "" if first.node is None else f" by {context.name(first.node)}"
    if first.rank is not None:
        where = f" by rank {first.rank} ({context.name_of_rank(first.rank)})"
    if first.dst is not None:
        where += f" to {context.name(first.dst)}"
    more = f" And {len(items) - 1} more of its figures." if len(items) > 1 else ""
    value = f"{first.value} {first.unit}".rstrip()
    title = f"{first.what}, as reported{where}, is impossible: {value}: {first.why}.{more}"
    suspects = [] if first.node is None else [context.name(first.node)]
    ranks = [] if first.rank is None else [first.rank]
    return finding(first.check, CODE, "WARN", title, suspects=suspects, ranks=ranks, only=first.check)
