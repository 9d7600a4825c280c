"""Virtual machines of one physical host, which are slow together because they share its hardware."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from checklist.judging.context import JudgingContext, Judgment, shorten, worst_of
from checklist.result import CheckResult, Finding

_SHARED = ("pairs", "host-limits")  # checks of hardware that virtual machines share: network and memory


def hosts(context: JudgingContext) -> list[tuple[str, ...]]:
    """Return the names of the nodes of each physical host that has several of them."""
    nodes_by_host: dict[str, set[int]] = defaultdict(set)
    for fact in context.leaders:
        if fact.physical_host is not None:
            nodes_by_host[fact.physical_host].add(fact.node)
    return [context.names(nodes) for nodes in nodes_by_host.values() if len(nodes) > 1]


def add(context: JudgingContext, judgment: Judgment) -> Judgment:
    """Turn findings about several nodes of one physical host into WARN that name the shared host."""
    if judgment.result.check not in _SHARED or not isinstance(judgment.result, CheckResult):
        return judgment
    named = {name for fault in judgment.findings for name in (*fault.nodes, *fault.suspects)}
    peers_by_name = {
        name: tuple(peer for peer in group if peer != name)
        for group in hosts(context)
        if len(named & set(group)) > 1
        for name in group
    }
    findings = tuple(_with_shared_host(fault, peers_by_name) for fault in judgment.findings)
    if findings == judgment.findings:
        return judgment
    verdict = worst_of([fault.verdict for fault in findings])
    titles = [fault.title for fault in findings if fault.verdict == verdict]
    more = f" And {len(titles) - 1} more." if len(titles) > 1 else ""
    result = replace(judgment.result, verdict=verdict, reason=titles[0] + more)
    return replace(judgment, result=result, findings=findings)


def _with_shared_host(fault: Finding, peers_by_name: dict[str, tuple[str, ...]]) -> Finding:
    """Return a finding about one of these nodes as WARN with the peers on its host; others unchanged."""
    names = (*fault.nodes, *fault.suspects)
    if len(names) != 1 or names[0] not in peers_by_name:
        return fault
    title = f"{fault.title} It shares its physical host with {shorten(peers_by_name[names[0]])}."
    return replace(fault, verdict="WARN", nodes=(), suspects=names, title=title)
