"""Check of connectivity between all pairs of nodes over plain sockets."""

from __future__ import annotations

from collections import Counter

from checklist.judges.advice import finding
from checklist.judges.context import Judgement, JudgingContext, answer, no_verdict, skipped
from checklist.result import Figure, Finding

_CUT = {
    "both": ("node-unreachable", "is cut off: no other node reaches it, and it reaches none."),
    "inbound": ("inbound-blocked", "reaches the others, and none reaches it: only inbound is blocked."),
    "outbound": ("outbound-blocked", "is reached by the others, and reaches none: only outbound is blocked."),
}


def mesh(context: JudgingContext) -> Judgement:
    """FAIL for each pair of nodes that can't connect, or connects and stalls within 256 KB (an MTU).

    A node is at fault itself if it reaches no other while others are healthy, if no other reaches it, or if
    it only sends; both ends of a single bad pair are suspects.

    Limits: none here; a connection counts as cut after the control channel's ``Limits.connect``.

    Not detected: whether an end of a pair or a device between them drops the packets.
    """
    probes = context.measurements.probes
    nodes = context.measurements.nodes
    if context.measurements.nodes_asked < 2:
        return skipped("mesh", "There is one node only.")
    if not probes:
        return context.unmeasured("mesh", "mesh")
    bad = {(probe.src, probe.dst): probe for probe in probes if not probe.connected or probe.bulk_ok is False}
    findings: list[Finding] = []
    lost = cut_off(set(bad), nodes)
    for node, way in lost.items():
        code, words = _CUT[way]
        name = context.name(node)
        findings.append(finding("mesh", code, "FAIL", f"{name} {words}", nodes=[name]))
    for pair in sorted({(min(key), max(key)) for key in bad if not lost.keys() & set(key)}):
        a, b = pair
        ways = [probe for key in (pair, pair[::-1]) if (probe := bad.get(key)) is not None]
        cut = any(not probe.connected for probe in ways)
        arrow = "and" if len(ways) == 2 else "to"
        first, second = (a, b) if ways[0].src == a else (b, a)
        what = "can't connect" if cut else "connect, but 256 KB stall"
        reason = f": {ways[0].error}" if ways[0].error else ""
        title = f"{context.name(first)} {arrow} {context.name(second)} {what}{reason}."
        suspects = context.names(pair)
        code = "pair-cut" if cut else "mtu"
        findings.append(
            finding(
                "mesh",
                code,
                "FAIL",
                title,
                suspects=suspects,
                links=[(suspects[0], suspects[1])],
                peer=_address(context, second),
            )
        )
    expected = len(nodes) * (len(nodes) - 1)
    if len({(probe.src, probe.dst) for probe in probes}) < expected and not findings:
        return no_verdict("mesh", f"Only {len(probes)} of {expected} ordered pairs were tried.")
    seconds = [probe.seconds for probe in probes if probe.seconds is not None]
    slowest = [Figure(name="slowest", value=max(seconds), unit="s", verdict="NO-VERDICT")] if seconds else []
    good = f"All {expected} ordered pairs connect and move 256 KB."
    return answer("mesh", good, findings, nodes=context.all_names, figures=slowest)


def cut_off(bad: set[tuple[int, int]], nodes: tuple[int, ...]) -> dict[int, str]:
    """Return nodes whose pairs are all bad, in one or both directions, while other pairs are healthy."""
    sent, received = Counter(src for src, _ in bad), Counter(dst for _, dst in bad)
    others = len(nodes) - 1
    ways = {
        (True, True): "both",
        (True, False): "outbound",
        (False, True): "inbound",
    }
    lost = {
        node: ways[sent[node] == others, received[node] == others]
        for node in nodes
        if others in (sent[node], received[node])
    }
    return lost if len(nodes) - len(lost) >= 2 else {}


def _address(context: JudgingContext, node: int) -> str:
    fact = next((fact for fact in context.leaders if fact.node == node), None)
    usable = [text for text in (fact.addresses if fact else ()) if not text.startswith(("127.", "::1"))]
    return usable[0] if usable else context.name(node)


def unreached(context: JudgingContext) -> set[tuple[int, int]]:
    """Return ordered pairs that check mesh reports as cut or stalled, so other checks skip them."""
    return {
        (probe.src, probe.dst)
        for probe in context.measurements.probes
        if not probe.connected or probe.bulk_ok is False
    }
