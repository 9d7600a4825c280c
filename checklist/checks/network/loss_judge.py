"""Check for packet loss between nodes: where it occurs, and whether it is intermittent."""

from __future__ import annotations

from collections.abc import Iterable

from checklist.analysis import recurrence
from checklist.analysis.packet_loss import LOSSY, SERIOUS, Loss, find, rate
from checklist.analysis.recurrence import NIGHTS, WITHIN_DAYS, Recurrence, Sightings
from checklist.checks.network.ports import has_counters, nic_of, ports
from checklist.judging.advice import finding
from checklist.judging.context import JudgingContext, Judgment, decide, no_verdict, skipped
from checklist.measurements import Counters
from checklist.result import Figure, Finding, Gravity, Result, Verdict
from estimator.formatting import format_count

CROWDED = 3  # minimum number of nodes or links with loss only under load: then the shared network is at fault
COMES_AND_GOES = ("loss-intermittent", "carrier")  # codes of intermittent findings kept for later runs


def loss(context: JudgingContext) -> Judgment:
    """FAIL for a link or node that loses packets even in isolation, WARN for weaker signs.

    Signs are a pair's TCP retransmissions, messages of a pair that take far longer than its fastest, error
    counters of ports, and a node's total retransmissions if no pair explains them. Serious loss that is
    absent in isolation is WARN, and FAIL once it was seen on several nights.

    Limits: ``LOSSY`` (0.2 % of the segments, WARN) and ``SERIOUS`` (1 %, FAIL), ``STALLED`` (a message below
    a tenth of the pair's best rate) for ``STALL_S`` of checklist/analysis/packet_loss.py, with their reasons
    there; ``CROWDED`` (3) places at once are not attributed to nodes; ``NIGHTS`` (3) within ``WITHIN_DAYS``
    (14) of checklist/analysis/recurrence.py; a link that went down (``DOWN``, ``ETHERNET_DOWN``) or a carrier
    change fails regardless of frequency.

    Not detected: anything between nodes of one machine (NO-VERDICT); loss over RDMA if ports keep no
    counters; for a single pair, which of its ends is at fault.
    """
    run = context.measurements
    if run.nodes_asked < 2:
        return skipped("loss", "There is one node only.")
    counters = [
        reading for reading in run.counters if reading.tcp_segments is not None or has_counters(reading)
    ]
    rated = [pair for pair in run.pairs if pair.segments is not None or pair.gbytes_per_s_p95 is not None]
    if not counters and not rated:
        return context.unmeasured("loss", "pairs")
    share = rate(run.pairs)
    figures = [] if share is None else [_figure(share, judged=not context.local)]
    if context.local:
        reason = "Measured, but not judged: all nodes are on one machine."
        return no_verdict("loss", reason, measured=True, nodes=context.all_names, figures=figures)
    findings = [*_of_pairs(context), *(fault for reading in counters for fault in ports(context, reading))]
    if not any(fault.code.startswith("loss-") for fault in findings):
        findings += [fault for reading in counters for fault in _of_node(context, reading)]
    findings += _recurring(context, findings)
    text = "No port has counted an error"
    if share is not None:
        text = f"{share:.3%} of the segments were retransmitted"
    return decide("loss", f"{text}.", findings, nodes=context.all_names, figures=figures)


def sightings_of(result: Result) -> Sightings | None:
    """Return the record of intermittent faults for later runs; None if the run did not check for them."""
    check = result.check("loss")
    if check is None or not check.measured or result.measurements.local:
        return None
    return _sightings(result.finished_unix, check.nodes, result.findings)


def _sightings(unix: float, nodes: tuple[str, ...], findings: Iterable[Finding]) -> Sightings:
    groups = {fault.nodes or fault.suspects for fault in findings if fault.code in COMES_AND_GOES}
    return Sightings(unix=unix, nodes=nodes, seen=tuple(sorted(groups)))


def _figure(share: float, *, judged: bool) -> Figure:
    verdict: Verdict = "PASS" if share < LOSSY else "WARN"
    return Figure(
        name="segments sent again",
        value=100 * share,
        unit="%",
        verdict=verdict if judged else "NO-VERDICT",
        expected=100 * LOSSY,
        basis="floor",
        source="checklist/analysis/packet_loss.py",
    )


def _of_pairs(context: JudgingContext) -> list[Finding]:
    """Report losses of pairs; many that vanish in isolation are one finding of the shared network."""
    losses = find(context.measurements.pairs)
    findings = [
        _lasting(context, case) for case in losses if not case.comes_and_goes and case.alone is not False
    ]
    passing = [case for case in losses if case.comes_and_goes]
    congested = [case for case in passing if not case.stall_s]
    if len(congested) >= CROWDED:
        passing = [case for case in passing if case.stall_s]
        findings.append(_crowded(congested))
    return findings + [_intermittent(context, case) for case in passing]


def _crowded(losses: list[Loss]) -> Finding:
    """Report loss at many places that is absent in isolation as a fault of the shared network."""
    pairs, worst = sum(len(case.pairs) for case in losses), max(case.rate for case in losses)
    title = (
        f"{pairs} pairs lose up to {worst:.1%} of their packets if all pairs send at once, and none alone."
    )
    return finding("loss", "loss-crowded", "WARN", title)


def _lasting(context: JudgingContext, fault: Loss) -> Finding:
    """Build the finding of a lasting loss: FAIL if it is serious and persists in isolation."""
    symptom = f"{fault.rate:.1%} of the segments are retransmitted"
    if not fault.rate:
        symptom = "slow messages take more than twice as long as the best"
    verdict: Gravity = "FAIL" if fault.rate >= SERIOUS and fault.alone is True else "WARN"
    where, names = _locate(context, fault)
    if fault.node is None:
        src, dst = (context.name(node) for node in fault.pairs[0])
        title = f"Packets are lost {where}: {symptom}."
        return finding(
            "loss", "loss-link", verdict, title, suspects=names, links=[(src, dst)], src=src, dst=dst
        )
    title = f"Packets {where} are lost: {symptom}."
    return finding("loss", "loss-node", verdict, title, nodes=names, nic=nic_of(context, fault.node))


def _locate(context: JudgingContext, fault: Loss) -> tuple[str, tuple[str, ...]]:
    """Return a description of the lost packets, and the node or both ends of the link."""
    if fault.node is None:
        src, dst = (context.name(node) for node in fault.pairs[0])
        where = f"between {src} and {dst}" if len(fault.pairs) > 1 else f"from {src} to {dst}"
        return where, context.names(fault.pairs[0])
    name = context.name(fault.node)
    peers = format_count(len(fault.pairs), "other node")
    where = f"by {name} to {peers}" if fault.kind == "transmit" else f"to {name} by {peers}"
    return f"sent {where}", (name,)


def _intermittent(context: JudgingContext, fault: Loss) -> Finding:
    """Report temporary serious loss, with its dates and frequency."""
    where, names = _locate(context, fault)
    symptoms = [f"{fault.rate:.1%} of the segments were retransmitted"] if fault.rate >= LOSSY else []
    symptoms += [f"a message was delayed by {fault.stall_s:.1f} s"] if fault.stall_s else []
    timing = {False: "not when measured alone", True: "also when measured alone", None: "not measured again"}[
        fault.alone
    ]
    this_run = Sightings(unix=context.finished_unix, nodes=context.all_names, seen=(names,))
    recurred = recurrence.count_nights(
        names, [*recurrence.recent(context.sightings, context.finished_unix), this_run]
    )
    title = f"Packets {where} were lost for a while: {', '.join(symptoms)}, {timing}."
    title += f" Seen {recurred.description}."
    nodes, suspects = ((), names) if fault.node is None else (names, ())
    nic = nic_of(context, fault.pairs[0][0] if fault.node is None else fault.node)
    return finding("loss", "loss-intermittent", "WARN", title, nodes=nodes, suspects=suspects, nic=nic)


def _recurring(context: JudgingContext, findings: list[Finding]) -> list[Finding]:
    """Report nodes and links of this run that lost packets on several nights, in this run or earlier ones."""
    history = recurrence.recent(context.sightings, context.finished_unix)
    this_run = _sightings(context.finished_unix, context.all_names, findings)
    present = set(context.all_names)
    recurrences = recurrence.recurring((*history, this_run))
    return [_of_nights(context, case) for case in recurrences if set(case.names) <= present]


def _of_nights(context: JudgingContext, case: Recurrence) -> Finding:
    """Build the finding of a node or link that lost packets on several nights."""
    link = len(case.names) > 1
    owner = f"between {' and '.join(case.names)}" if link else f"of {case.names[0]}"
    title = f"The link {owner} loses packets again and again: seen {case.description}."
    nodes, suspects = ((), case.names) if link else (case.names, ())
    node = next(node for node in context.measurements.nodes if context.name(node) == case.names[0])
    return finding(
        "loss",
        "loss-recurring",
        "FAIL",
        title,
        nodes=nodes,
        suspects=suspects,
        nic=nic_of(context, node),
        nights=NIGHTS,
        days=WITHIN_DAYS,
    )


def _of_node(context: JudgingContext, counters: Counters) -> list[Finding]:
    """Report retransmissions of a whole node that no pair explains; the other end may be at fault."""
    if not counters.tcp_segments or not counters.tcp_retransmitted:
        return []
    share = counters.tcp_retransmitted / (counters.tcp_segments + counters.tcp_retransmitted)
    if share < SERIOUS:
        return []
    name = context.name(counters.node)
    title = f"{name} retransmitted {share:.1%} of its TCP segments in phase {counters.phase}."
    return [finding("loss", "loss-world", "WARN", title, suspects=[name])]
