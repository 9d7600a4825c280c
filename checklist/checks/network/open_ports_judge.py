"""Check that the ports used by collectives are open over the kernel's whole range, for IPv4 and IPv6."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from checklist.judging.advice import finding
from checklist.judging.context import JudgingContext, Judgment, decide, no_verdict, shorten, skipped
from checklist.measurements import OpenPorts
from checklist.result import Finding, Gravity

Way = tuple[int, int]  # source and destination node


def open_ports(context: JudgingContext) -> Judgment:
    """FAIL for a node with partly blocked ports, inbound or outbound; WARN for one blocked address family.

    Two other nodes connect to each node. A node that is reachable over only one of IPv4 and IPv6 is WARN if
    others are reachable over both, FAIL if the run uses the blocked family.

    Limits: none; a port is open or not. Sixteen ports are tried, so a blocked part below a sixteenth of the
    range can be missed, and its boundaries are known to a sixteenth.

    Not detected: which of two nodes has the firewall; ports outside the kernel's range. Check mesh covers a
    node without any open port.
    """
    results = context.measurements.open_ports
    if context.local or context.measurements.nodes_asked < 2:
        return skipped("open-ports", "All ranks are on one machine.")
    main = {(item.src, item.dst): item for item in results if not item.other_family and item.tried}
    if not main:
        return context.unmeasured("open-ports", "mesh")
    other = {(item.src, item.dst): item for item in results if item.other_family and item.tried}
    blocked = {pair for pair, item in main.items() if len(item.blocked) == len(item.tried)}
    reached = {pair: item for pair, item in main.items() if pair not in blocked}
    findings = [*_blocked_parts(context, reached), *_families(context, main, blocked, other)]
    if not reached and not findings:
        return no_verdict("open-ports", "No port of any node could be reached (see check mesh).")
    untried = set(context.measurements.nodes) - {dst for _, dst in main}
    if untried and not findings:
        return no_verdict("open-ports", f"Ports of {shorten(context.names(untried))} were not tried.")
    text = f"Open in the kernels' whole range, {_range(next(iter(main.values())))}."
    if other and all(item.blocked for item in other.values()):
        text += (
            f" Over {_family(next(iter(other.values())).address)} no node is reached, and nothing uses it."
        )
    return decide("open-ports", text, findings, nodes=context.all_names)


def _blocked_parts(context: JudgingContext, reached: dict[Way, OpenPorts]) -> list[Finding]:
    """Report blocked parts of the range, by the node responsible."""
    blocked = {pair for pair, item in reached.items() if item.blocked}
    findings = []
    pairs = set(reached)
    if blocked == pairs and len(blocked) > 2:
        text = _describe(next(iter(reached.values())))
        return [_blocked(f"Between all nodes {text}.")]
    inbound = _affected_nodes(blocked, pairs, 1)
    outbound = _affected_nodes({pair for pair in blocked if pair[1] not in inbound}, pairs, 0)
    for nodes, end, preposition in ((inbound, 1, "Into"), (outbound, 0, "Out of")):
        for node in sorted(nodes):
            item = next(item for pair, item in reached.items() if pair in blocked and pair[end] == node)
            name = context.name(node)
            findings.append(_blocked(f"{preposition} {name} {_describe(item)}.", nodes=[name]))
    for src, dst in sorted(pair for pair in blocked if pair[1] not in inbound and pair[0] not in outbound):
        names = context.names((src, dst))
        title = f"From {context.name(src)} to {context.name(dst)} {_describe(reached[src, dst])}."
        findings.append(_blocked(title, suspects=names))
    return findings


def _affected_nodes(affected: set[Way], all_pairs: set[Way], end: int, minimum: int = 2) -> set[int]:
    """Return nodes whose connections at that end are all bad, if there are at least ``minimum``."""
    blocked_by_node: dict[int, list[bool]] = defaultdict(list)
    for pair in all_pairs:
        blocked_by_node[pair[end]].append(pair in affected)
    return {node for node, are_bad in blocked_by_node.items() if len(are_bad) >= minimum and all(are_bad)}


def _families(
    context: JudgingContext, main: dict[Way, OpenPorts], cut: set[Way], other: dict[Way, OpenPorts]
) -> list[Finding]:
    """Report nodes where one address family is blocked, inbound or outbound, and the other is not."""
    closed = {pair for pair, item in other.items() if item.blocked}
    findings = []
    for blocked, results, usable in ((cut, main, set(other) - closed), (closed, other, set(main) - cut)):
        is_main = results is main
        blocked = blocked & usable  # if both families are blocked, the address family is not the cause
        if not blocked or (not is_main and blocked == set(results) and not _taken_by_name(context, results)):
            continue
        inbound = _affected_nodes(blocked, set(results), 1, minimum=1)
        outbound = (
            set()
            if inbound == {dst for _, dst in results}
            else _affected_nodes(blocked, set(results), 0, minimum=1) - inbound
        )
        family = _family(next(iter(results.values())).address)
        other_name = "IPv6" if family == "IPv4" else "IPv4"
        level: Gravity = "FAIL" if is_main else "WARN"
        for nodes, singular, plural in (
            (inbound, "is not reached", "are not reached"),
            (outbound, "reaches no other node", "reach no other node"),
        ):
            if nodes:
                names = context.names(nodes)
                verb = singular if len(names) == 1 else plural
                title = f"{shorten(names)} {verb} over {family}, only over {other_name}."
                findings.append(
                    finding(
                        "open-ports",
                        "family-blocked",
                        level,
                        title,
                        suspects=names,
                        family=family,
                        usual=other_name,
                    )
                )
    return findings


def _taken_by_name(context: JudgingContext, results: dict[Way, OpenPorts]) -> bool:
    """Return whether a hostname resolves to an address of that family, so that gloo uses it."""
    addresses = {fact.node: fact.hostname_address for fact in context.leaders}
    return any(addresses.get(item.dst) == item.address for item in results.values())


def _family(address: str) -> str:
    return "IPv6" if ":" in address else "IPv4"


def _blocked(title: str, nodes: Iterable[str] = (), suspects: Iterable[str] = ()) -> Finding:
    return finding("open-ports", "ports-blocked", "FAIL", title, nodes=nodes, suspects=suspects)


def _describe(item: OpenPorts) -> str:
    """Describe the blocked parts; each extends halfway to the open neighbor on either side."""
    ranges = " and ".join(f"{start} to {end}" for start, end in spans(item))
    summary = f"{len(item.blocked)} of {len(item.tried)} tried of {_range(item)}"
    return f"these ports are blocked: about {ranges} ({summary})"


def spans(item: OpenPorts) -> list[tuple[int, int]]:
    """Return spans (first, last) of adjacent blocked ports."""
    blocked, ranges = set(item.blocked), list[tuple[int, int]]()
    for index, port in enumerate(item.tried):
        if port not in blocked:
            continue
        start = (item.tried[index - 1] + port) // 2 + 1 if index else item.low
        end = (item.tried[index + 1] + port) // 2 if index + 1 < len(item.tried) else item.high
        if ranges and ranges[-1][1] == start - 1:
            ranges[-1] = (ranges[-1][0], end)
        else:
            ranges.append((start, end))
    return ranges


def _range(item: OpenPorts) -> str:
    return f"{item.low} to {item.high}"
