"""Check that EFA works within each host."""

from __future__ import annotations

from checklist.judging.advice import finding
from checklist.judging.context import Judgement, JudgingContext, answer, few, no_verdict, skipped
from checklist.measurements import NO_TOOL
from checklist.result import Figure


def efa(context: JudgingContext) -> Judgement:
    """FAIL for a node that cannot send a message to itself over EFA.

    Limits: none. The bandwidth is shown without a verdict, because no reference values are published.

    Not detected: whether EFA works between hosts (see checks pairs and transport); anything without EFA
    devices or the EFA installer's fi_pingpong; which device of a host failed, because libfabric uses the
    first.
    """
    tried = [local for local in context.measurements.locals if local.what == "efa_loopback"]
    if not any(fact.efa_devices for fact in context.leaders) and context.facts:
        return skipped("efa", "There are no EFA devices.")
    if not tried:
        return context.unmeasured("efa", "node")
    without = [local.rank for local in tried if (local.error or "").startswith(NO_TOOL)]
    measured = [local for local in tried if local.rank not in without]
    nodes = context.names(
        context.nodes_by_rank[one.rank] for one in measured if one.rank in context.nodes_by_rank
    )
    if not measured:
        return no_verdict("efa", "Not measured: there is no fi_pingpong, which AWS's EFA installer brings.")
    findings = []
    for local in measured:
        if local.value is None:
            name = context.name_of_rank(local.rank)
            title = f"EFA doesn't get a message from {name} to itself: {local.error or 'no reason known'}."
            findings.append(finding("efa", "efa-loopback", "FAIL", title, nodes=[name]))
    figures = [
        Figure(name="efa_loopback", value=local.value, unit="GB/s", verdict="NO-VERDICT", rank=local.rank)
        for local in measured
        if local.value is not None
    ]
    if without and not findings:
        names = few(tuple(dict.fromkeys(map(context.name_of_rank, without))))
        why = f"There is no fi_pingpong on {names}."
        return no_verdict("efa", why, measured=True, nodes=nodes, figures=figures)
    good = f"Messages from each of {len(measured)} hosts to itself arrive."
    return answer("efa", good, findings, nodes=nodes, figures=figures)
