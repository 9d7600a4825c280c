"""Check of connections between all pairs of nodes over plain sockets: reachability, latency, retries."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from checklist.judging.advice import finding
from checklist.judging.context import Judgement, JudgingContext, Measured, answer, few, no_verdict, skipped
from checklist.measurements import Probe
from checklist.result import Figure, Finding

SLOWER, SLOWER_S = 3.0, 0.002  # a node's fastest round trip against the median node's, both exceeded
ZONE_S = 0.002  # TCP within one zone; clouds and LANs stay well below 1 ms
LONGER = 2.0  # multiple of the past
FEWEST_TRIES = 3
SHARE_OF_NODE, SHARE_OF_UNITS, SHARE_OF_ALL = 0.25, 0.5, 0.08  # one of 8 hashed paths is 12 %
_ROUND_TRIP = "round trip"

_CUT = {
    "both": ("node-unreachable", "is cut off: no other node reaches it, and it reaches none."),
    "inbound": ("inbound-blocked", "reaches the others, and none reaches it: only inbound is blocked."),
    "outbound": ("outbound-blocked", "is reached by the others, and reaches none: only outbound is blocked."),
}


def mesh(context: JudgingContext) -> Judgement:
    """FAIL for each pair of nodes that cannot connect, or connects and stalls within 256 KB (an MTU).

    A node is at fault itself if it reaches no other while others are healthy, if no other reaches it, or if
    it only sends; both ends of a single bad pair are suspects.

    WARN for a node whose fastest round trip to any other is longer than that of its peers, for a network
    whose usual round trip is long within one zone or longer than in earlier runs, and for connections that
    needed a second try in a pattern: those of one node, those between two network units, or a share of all
    paths, as if one of several hashed paths drops them.

    Limits: a connection counts as cut after the control channel's ``Limits.connect``; round trips are TCP's,
    the shortest of ten in either direction: ``SLOWER``, 3 times and ``SLOWER_S``, 2 ms more than the median
    node, or ``ZONE_S``, 2 ms, for the median; ``LONGER``, twice the past. Second tries: ``FEWEST_TRIES``, 3,
    and ``SHARE_OF_NODE``, a quarter of a node's paths, ``SHARE_OF_UNITS``, half of those between two units,
    or ``SHARE_OF_ALL``, 8 % of all.

    Not detected: whether an end of a pair or a device between them drops the packets; round trips of RDMA.
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
        what = "cannot connect" if cut else "connect, but 256 KB stall"
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
    figures = [Figure(name="slowest", value=max(seconds), unit="s", verdict="NO-VERDICT")] if seconds else []
    trips = {} if context.local else _round_trips(probes)
    records = []
    if trips:
        usual = statistics.median(trips.values())
        figures.append(Figure(name="round trip, median", value=usual, unit="s", verdict="NO-VERDICT"))
        records.append(Measured(_ROUND_TRIP, None, usual, "s"))
        findings += _far(context, trips, usual)
    findings += [] if context.local else _second_tries(context, probes)
    good = f"All {expected} ordered pairs connect and move 256 KB."
    return answer("mesh", good, findings, nodes=context.all_names, figures=figures, records=records)


def _round_trips(probes: Iterable[Probe]) -> dict[tuple[int, int], float]:
    """Return the shortest round trip of each pair of nodes, in seconds."""
    trips: dict[tuple[int, int], float] = {}
    for probe in probes:
        if probe.round_trip_s is not None and probe.round_trip_s > 0:
            pair = (min(probe.src, probe.dst), max(probe.src, probe.dst))
            trips[pair] = min(probe.round_trip_s, trips.get(pair, math.inf))
    return trips


def _far(context: JudgingContext, trips: dict[tuple[int, int], float], usual: float) -> list[Finding]:
    """Report nodes far from all others, else a network in which all are far from each other."""
    best: dict[int, float] = {}
    for pair, seconds in trips.items():
        for node in pair:
            best[node] = min(seconds, best.get(node, math.inf))
    middle = statistics.median(best.values())
    limit = max(SLOWER * middle, middle + SLOWER_S)
    far = {node: seconds for node, seconds in best.items() if seconds > limit}
    findings = []
    for node, seconds in sorted(far.items()) if len(best) > 2 else ():
        name = context.name(node)
        title = f"{name}: the fastest round trip to any node takes {1000 * seconds:.3g} ms, "
        title += f"that of the median node {1000 * middle:.3g} ms."
        nic = next((fact.nic for fact in context.leaders if fact.node == node), None)
        findings.append(
            finding("mesh", "latency-high", "WARN", title, suspects=[name], nic=nic or "<interface>")
        )
    if findings:
        return findings
    past = context.past(_ROUND_TRIP, None, usual, less_is_better=True)
    zones = {fact.zone for fact in context.leaders}
    if past is not None and usual > LONGER * past.median and usual > past.median + SLOWER_S / 10:
        than = f"it took {1000 * past.median:.3g} ms in earlier runs"
    elif usual > ZONE_S and len(zones) == 1 and None not in zones:
        than = f"within one zone it takes less than {1000 * ZONE_S:g} ms"
    else:
        return []
    title = f"The median round trip between nodes takes {1000 * usual:.3g} ms; {than}."
    return [finding("mesh", "latency-high", "WARN", title, nic="<interface>")]


def _second_tries(context: JudgingContext, probes: Iterable[Probe]) -> list[Finding]:
    """Report connections that needed a second try, if they form a pattern."""
    every = [probe for probe in probes if probe.connected]
    tried = [probe for probe in every if probe.tries > 1]
    if len(tried) < FEWEST_TRIES:
        return []

    def worst(group: Callable[[Probe], Iterable[Hashable]], share: float) -> list[Any]:
        all_of = Counter(key for probe in every for key in group(probe))
        again = Counter(key for probe in tried for key in group(probe))
        return [key for key, n in again.items() if n >= FEWEST_TRIES and n >= share * all_of[key]]

    units = {fact.node: fact.network_nodes[-2:] for fact in context.leaders}
    nodes = worst(lambda probe: {probe.src, probe.dst}, SHARE_OF_NODE)
    between = worst(lambda probe: _units(units, probe), SHARE_OF_UNITS)
    if between:
        where = ", ".join(f"{a} and {b}" for a, b in sorted(between)[:3])
        what, suspects = f"between {where}", []
    elif 0 < len(nodes) <= max(1, len(context.measurements.nodes) // 4):
        what, suspects = f"to or from {few(context.names(nodes))}", list(context.names(nodes))
    elif len(tried) >= SHARE_OF_ALL * len(every):
        what, suspects = "spread over all nodes, as if one of several paths drops them", []
    else:
        return []
    paths = [f"{context.name(probe.src)} > {context.name(probe.dst)}" for probe in tried]
    title = f"{len(tried)} of {len(every)} connections worked only on the second try, {what}: "
    title += few(tuple(paths)) + "."
    links = dict.fromkeys((context.name(probe.src), context.name(probe.dst)) for probe in tried)
    return [finding("mesh", "second-try", "WARN", title, suspects=suspects, links=links)]


def _units(units: dict[int, tuple[str, ...]], probe: Probe) -> list[tuple[str, str]]:
    """Return the pair of network units (racks, leaves) that a connection runs between."""
    a, b = units.get(probe.src, ()), units.get(probe.dst, ())
    return [(min(a[0], b[0]), max(a[0], b[0]))] if a and b and a[0] != b[0] else []


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
