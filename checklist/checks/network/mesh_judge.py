"""Check of connections between all pairs of nodes over plain sockets: reachability, latency, retries."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from checklist.judging.advice import finding
from checklist.judging.context import (
    JudgingContext,
    Judgment,
    Measured,
    decide,
    no_verdict,
    shorten,
    skipped,
)
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


def mesh(context: JudgingContext) -> Judgment:
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
    failed = {
        (probe.src, probe.dst): probe for probe in probes if not probe.connected or probe.bulk_ok is False
    }
    findings: list[Finding] = []
    lost_nodes = cut_off(set(failed), nodes)
    for node, direction in lost_nodes.items():
        code, text = _CUT[direction]
        name = context.name(node)
        findings.append(finding("mesh", code, "FAIL", f"{name} {text}", nodes=[name]))
    for pair in sorted({(min(key), max(key)) for key in failed if not lost_nodes.keys() & set(key)}):
        a, b = pair
        probes_of_pair = [probe for key in (pair, pair[::-1]) if (probe := failed.get(key)) is not None]
        disconnected = any(not probe.connected for probe in probes_of_pair)
        arrow = "and" if len(probes_of_pair) == 2 else "to"
        first, other = (a, b) if probes_of_pair[0].src == a else (b, a)
        symptom = "cannot connect" if disconnected else "connect, but 256 KB stall"
        reason = f": {probes_of_pair[0].error}" if probes_of_pair[0].error else ""
        title = f"{context.name(first)} {arrow} {context.name(other)} {symptom}{reason}."
        suspects = context.names(pair)
        code = "pair-cut" if disconnected else "mtu"
        findings.append(
            finding(
                "mesh",
                code,
                "FAIL",
                title,
                suspects=suspects,
                links=[(suspects[0], suspects[1])],
                peer=_address(context, other),
            )
        )
    expected = len(nodes) * (len(nodes) - 1)
    if len({(probe.src, probe.dst) for probe in probes}) < expected and not findings:
        return no_verdict("mesh", f"Only {len(probes)} of {expected} ordered pairs were tried.")
    seconds = [probe.seconds for probe in probes if probe.seconds is not None]
    figures = [Figure(name="slowest", value=max(seconds), unit="s", verdict="NO-VERDICT")] if seconds else []
    round_trips = {} if context.local else _round_trips(probes)
    records = []
    if round_trips:
        median = statistics.median(round_trips.values())
        figures.append(Figure(name="round trip, median", value=median, unit="s", verdict="NO-VERDICT"))
        records.append(Measured(_ROUND_TRIP, None, median, "s"))
        findings += _distant(context, round_trips, median)
    findings += [] if context.local else _second_tries(context, probes)
    passed = f"All {expected} ordered pairs connect and move 256 KB."
    return decide("mesh", passed, findings, nodes=context.all_names, figures=figures, records=records)


def _round_trips(probes: Iterable[Probe]) -> dict[tuple[int, int], float]:
    """Return the shortest round trip of each pair of nodes, in seconds."""
    round_trips: dict[tuple[int, int], float] = {}
    for probe in probes:
        if probe.round_trip_s is not None and probe.round_trip_s > 0:
            pair = (min(probe.src, probe.dst), max(probe.src, probe.dst))
            round_trips[pair] = min(probe.round_trip_s, round_trips.get(pair, math.inf))
    return round_trips


def _distant(
    context: JudgingContext, round_trips: dict[tuple[int, int], float], typical: float
) -> list[Finding]:
    """Report nodes far from all others, else a network in which all are far from each other."""
    best: dict[int, float] = {}
    for pair, seconds in round_trips.items():
        for node in pair:
            best[node] = min(seconds, best.get(node, math.inf))
    median = statistics.median(best.values())
    limit = max(SLOWER * median, median + SLOWER_S)
    distant = {node: seconds for node, seconds in best.items() if seconds > limit}
    findings = []
    for node, seconds in sorted(distant.items()) if len(best) > 2 else ():
        name = context.name(node)
        title = f"{name}: the fastest round trip to any node takes {1000 * seconds:.3g} ms, "
        title += f"that of the median node {1000 * median:.3g} ms."
        nic = next((fact.nic for fact in context.leaders if fact.node == node), None)
        findings.append(
            finding("mesh", "latency-high", "WARN", title, suspects=[name], nic=nic or "<interface>")
        )
    if findings:
        return findings
    past = context.past(_ROUND_TRIP, None, typical, less_is_better=True)
    zones = {fact.zone for fact in context.leaders}
    if past is not None and typical > LONGER * past.median and typical > past.median + SLOWER_S / 10:
        comparison = f"it took {1000 * past.median:.3g} ms in earlier runs"
    elif typical > ZONE_S and len(zones) == 1 and None not in zones:
        comparison = f"within one zone it takes less than {1000 * ZONE_S:g} ms"
    else:
        return []
    title = f"The median round trip between nodes takes {1000 * typical:.3g} ms; {comparison}."
    return [finding("mesh", "latency-high", "WARN", title, nic="<interface>")]


def _second_tries(context: JudgingContext, probes: Iterable[Probe]) -> list[Finding]:
    """Report connections that needed a second try, if they form a pattern."""
    connected = [probe for probe in probes if probe.connected]
    retried = [probe for probe in connected if probe.tries > 1]
    if len(retried) < FEWEST_TRIES:
        return []

    def worst(group: Callable[[Probe], Iterable[Hashable]], share: float) -> list[Any]:
        totals = Counter(key for probe in connected for key in group(probe))
        retries = Counter(key for probe in retried for key in group(probe))
        return [key for key, n in retries.items() if n >= FEWEST_TRIES and n >= share * totals[key]]

    units = {fact.node: fact.network_nodes[-2:] for fact in context.leaders}
    nodes = worst(lambda probe: {probe.src, probe.dst}, SHARE_OF_NODE)
    units_pair = worst(lambda probe: _units(units, probe), SHARE_OF_UNITS)
    if units_pair:
        where = ", ".join(f"{a} and {b}" for a, b in sorted(units_pair)[:3])
        location, suspects = f"between {where}", []
    elif 0 < len(nodes) <= max(1, len(context.measurements.nodes) // 4):
        location, suspects = f"to or from {shorten(context.names(nodes))}", list(context.names(nodes))
    elif len(retried) >= SHARE_OF_ALL * len(connected):
        location, suspects = "spread over all nodes, as if one of several paths drops them", []
    else:
        return []
    paths = [f"{context.name(probe.src)} > {context.name(probe.dst)}" for probe in retried]
    title = f"{len(retried)} of {len(connected)} connections worked only on the second try, {location}: "
    title += shorten(tuple(paths)) + "."
    links = dict.fromkeys((context.name(probe.src), context.name(probe.dst)) for probe in retried)
    return [finding("mesh", "second-try", "WARN", title, suspects=suspects, links=links)]


def _units(units: dict[int, tuple[str, ...]], probe: Probe) -> list[tuple[str, str]]:
    """Return the pair of network units (racks, leaves) that a connection runs between."""
    a, b = units.get(probe.src, ()), units.get(probe.dst, ())
    return [(min(a[0], b[0]), max(a[0], b[0]))] if a and b and a[0] != b[0] else []


def cut_off(failed: set[tuple[int, int]], nodes: tuple[int, ...]) -> dict[int, str]:
    """Return nodes whose pairs are all bad, in one or both directions, while other pairs are healthy."""
    failed_out, failed_in = Counter(src for src, _ in failed), Counter(dst for _, dst in failed)
    peers = len(nodes) - 1
    directions = {
        (True, True): "both",
        (True, False): "outbound",
        (False, True): "inbound",
    }
    lost = {
        node: directions[failed_out[node] == peers, failed_in[node] == peers]
        for node in nodes
        if peers in (failed_out[node], failed_in[node])
    }
    return lost if len(nodes) - len(lost) >= 2 else {}


def _address(context: JudgingContext, node: int) -> str:
    fact = next((fact for fact in context.leaders if fact.node == node), None)
    addresses = [text for text in (fact.addresses if fact else ()) if not text.startswith(("127.", "::1"))]
    return addresses[0] if addresses else context.name(node)


def unreached(context: JudgingContext) -> set[tuple[int, int]]:
    """Return ordered pairs that check mesh reports as cut or stalled, so other checks skip them."""
    return {
        (probe.src, probe.dst)
        for probe in context.measurements.probes
        if not probe.connected or probe.bulk_ok is False
    }
