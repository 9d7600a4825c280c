"""Check that the ports used by collectives are open over the kernel's whole range, for IPv4 and IPv6."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from checklist.judging.advice import finding
from checklist.judging.context import Judgement, JudgingContext, answer, few, no_verdict, skipped
from checklist.measurements import OpenPorts
from checklist.result import Finding, Gravity

Way = tuple[int, int]  # source and destination node


def open_ports(context: JudgingContext) -> Judgement:
    """FAIL for a node with partly blocked ports, inbound or outbound; WARN for one blocked address family.

    Two other nodes connect to each node. A node that is reachable over only one of IPv4 and IPv6 is WARN if
    others are reachable over both, FAIL if the run uses the blocked family.

    Limits: none; a port is open or not. Sixteen ports are tried, so a blocked part below a sixteenth of the
    range can be missed, and its boundaries are known to a sixteenth.

    Not detected: which of two nodes has the firewall; ports outside the kernel's range. Check mesh covers a
    node without any open port.
    """
    tried = context.measurements.open_ports
    if context.local or context.measurements.nodes_asked < 2:
        return skipped("open-ports", "All ranks are on one machine.")
    main = {(one.src, one.dst): one for one in tried if not one.other_family and one.tried}
    if not main:
        return context.unmeasured("open-ports", "mesh")
    other = {(one.src, one.dst): one for one in tried if one.other_family and one.tried}
    cut = {way for way, one in main.items() if len(one.blocked) == len(one.tried)}
    reached = {way: one for way, one in main.items() if way not in cut}
    findings = [*_parts(context, reached), *_families(context, main, cut, other)]
    if not reached and not findings:
        return no_verdict("open-ports", "No port of any node could be reached (see check mesh).")
    untried = set(context.measurements.nodes) - {dst for _, dst in main}
    if untried and not findings:
        return no_verdict("open-ports", f"Ports of {few(context.names(untried))} were not tried.")
    good = f"Open all over the kernels' range, {_range(next(iter(main.values())))}."
    if other and all(one.blocked for one in other.values()):
        good += f" Over {_family(next(iter(other.values())).address)} no node is reached; nothing takes that."
    return answer("open-ports", good, findings, nodes=context.all_names)


def _parts(context: JudgingContext, reached: dict[Way, OpenPorts]) -> list[Finding]:
    """Report blocked parts of the range, by the node responsible."""
    bad = {way for way, one in reached.items() if one.blocked}
    findings = []
    whole = set(reached)
    if bad == whole and len(bad) > 2:
        words = _words(next(iter(reached.values())))
        return [_blocked(f"Between all nodes {words}.")]
    into = _whose(bad, whole, 1)
    out = _whose({way for way in bad if way[1] not in into}, whole, 0)
    for nodes, end, preposition in ((into, 1, "Into"), (out, 0, "Out of")):
        for node in sorted(nodes):
            one = next(one for way, one in reached.items() if way in bad and way[end] == node)
            name = context.name(node)
            findings.append(_blocked(f"{preposition} {name} {_words(one)}.", nodes=[name]))
    for src, dst in sorted(way for way in bad if way[1] not in into and way[0] not in out):
        ends = context.names((src, dst))
        title = f"From {context.name(src)} to {context.name(dst)} {_words(reached[src, dst])}."
        findings.append(_blocked(title, suspects=ends))
    return findings


def _whose(bad: set[Way], whole: set[Way], end: int, least: int = 2) -> set[int]:
    """Return nodes whose connections at that end are all bad, if there are at least ``least``."""
    ways: dict[int, list[bool]] = defaultdict(list)
    for way in whole:
        ways[way[end]].append(way in bad)
    return {node for node, are_bad in ways.items() if len(are_bad) >= least and all(are_bad)}


def _families(
    context: JudgingContext, main: dict[Way, OpenPorts], cut: set[Way], other: dict[Way, OpenPorts]
) -> list[Finding]:
    """Report nodes where one address family is blocked, inbound or outbound, and the other is not."""
    closed = {way for way, one in other.items() if one.blocked}
    findings = []
    for bad, ways, good in ((cut, main, set(other) - closed), (closed, other, set(main) - cut)):
        used = ways is main
        bad = bad & good  # if both families are blocked, the address family is not the cause
        if not bad or (not used and bad == set(ways) and not _taken_by_name(context, ways)):
            continue
        into = _whose(bad, set(ways), 1, least=1)
        out = set() if into == {dst for _, dst in ways} else _whose(bad, set(ways), 0, least=1) - into
        family = _family(next(iter(ways.values())).address)
        usual = "IPv6" if family == "IPv4" else "IPv4"
        level: Gravity = "FAIL" if used else "WARN"
        for nodes, one, several in (
            (into, "is not reached", "are not reached"),
            (out, "reaches no other node", "reach no other node"),
        ):
            if nodes:
                names = context.names(nodes)
                title = f"{few(names)} {one if len(names) == 1 else several} over {family}, but over {usual}."
                findings.append(
                    finding(
                        "open-ports",
                        "family-blocked",
                        level,
                        title,
                        suspects=names,
                        family=family,
                        usual=usual,
                    )
                )
    return findings


def _taken_by_name(context: JudgingContext, ways: dict[Way, OpenPorts]) -> bool:
    """Return whether a hostname resolves to an address of that family, so that gloo uses it."""
    own = {fact.node: fact.hostname_address for fact in context.leaders}
    return any(own.get(one.dst) == one.address for one in ways.values())


def _family(address: str) -> str:
    return "IPv6" if ":" in address else "IPv4"


def _blocked(title: str, nodes: Iterable[str] = (), suspects: Iterable[str] = ()) -> Finding:
    return finding("open-ports", "ports-blocked", "FAIL", title, nodes=nodes, suspects=suspects)


def _words(one: OpenPorts) -> str:
    """Describe the blocked parts; each extends halfway to the open neighbor on either side."""
    parts = " and ".join(f"{begin} to {end}" for begin, end in spans(one))
    tried = f"{len(one.blocked)} of {len(one.tried)} tried of {_range(one)}"
    return f"these ports are blocked: about {parts} ({tried})"


def spans(one: OpenPorts) -> list[tuple[int, int]]:
    """Return spans (first, last) of adjacent blocked ports."""
    blocked, found = set(one.blocked), list[tuple[int, int]]()
    for place, port in enumerate(one.tried):
        if port not in blocked:
            continue
        before = (one.tried[place - 1] + port) // 2 + 1 if place else one.low
        after = (one.tried[place + 1] + port) // 2 if place + 1 < len(one.tried) else one.high
        if found and found[-1][1] == before - 1:
            found[-1] = (found[-1][0], after)
        else:
            found.append((before, after))
    return found


def _range(one: OpenPorts) -> str:
    return f"{one.low} to {one.high}"
