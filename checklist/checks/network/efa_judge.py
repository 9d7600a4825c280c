"""Check that EFA works within each host."""

from __future__ import annotations

from checklist.judging.advice import finding
from checklist.judging.context import JudgingContext, Judgment, decide, no_verdict, shorten, skipped
from checklist.measurements import NO_TOOL
from checklist.result import Figure


def efa(context: JudgingContext) -> Judgment:
    """FAIL for a node that cannot send a message to itself over EFA.

    Limits: none. The bandwidth is shown without a verdict, because no reference values are published.

    Not detected: whether EFA works between hosts (see checks pairs and transport); anything without EFA
    devices or the EFA installer's fi_pingpong; which device of a host failed, because libfabric uses the
    first.
    """
    results = [local for local in context.measurements.locals if local.what == "efa_loopback"]
    if not any(fact.efa_devices for fact in context.leaders) and context.facts:
        return skipped("efa", "There are no EFA devices.")
    if not results:
        return context.unmeasured("efa", "node")
    ranks_without_tool = [local.rank for local in results if (local.error or "").startswith(NO_TOOL)]
    completed = [local for local in results if local.rank not in ranks_without_tool]
    nodes = context.names(
        context.nodes_by_rank[result.rank] for result in completed if result.rank in context.nodes_by_rank
    )
    if not completed:
        return no_verdict("efa", "Not measured: there is no fi_pingpong, a part of AWS's EFA installer.")
    findings = []
    for local in completed:
        if local.value is None:
            name = context.name_of_rank(local.rank)
            title = (
                f"EFA does not deliver a message from {name} to itself: {local.error or 'no reason known'}."
            )
            findings.append(finding("efa", "efa-loopback", "FAIL", title, nodes=[name]))
    figures = [
        Figure(name="efa_loopback", value=local.value, unit="GB/s", verdict="NO-VERDICT", rank=local.rank)
        for local in completed
        if local.value is not None
    ]
    if ranks_without_tool and not findings:
        names = shorten(tuple(dict.fromkeys(map(context.name_of_rank, ranks_without_tool))))
        no_tool = f"There is no fi_pingpong on {names}."
        return no_verdict("efa", no_tool, measured=True, nodes=nodes, figures=figures)
    passed = f"Messages from each of {len(completed)} hosts to itself arrive."
    return decide("efa", passed, findings, nodes=nodes, figures=figures)
