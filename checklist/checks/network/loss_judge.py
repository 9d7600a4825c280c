"""Check for packet loss between nodes: where it occurs, and whether it is intermittent."""

from __future__ import annotations

from collections.abc import Iterable

from checklist.analysis import recurrence
from checklist.analysis.packet_loss import LOSSY, SERIOUS, Loss, find, rate
from checklist.analysis.recurrence import NIGHTS, WITHIN_DAYS, Look, Recurrence
from checklist.checks.network.ports import has_any, nic_of, ports
from checklist.judging.advice import finding
from checklist.judging.context import Judgement, JudgingContext, answer, no_verdict, skipped
from checklist.measurements import Counters
from checklist.result import Figure, Finding, Gravity, Result, Verdict

CROWDED = 3  # minimum number of nodes or links with loss only under load: then the shared network is at fault
COMES_AND_GOES = ("loss-intermittent", "carrier")  # codes of intermittent findings kept for later runs


def loss(context: JudgingContext) -> Judgement:
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
    counted = [one for one in run.counters if one.tcp_segments is not None or has_any(one)]
    rated = [pair for pair in run.pairs if pair.segments is not None or pair.gbytes_per_s_p95 is not None]
    if not counted and not rated:
        return context.unmeasured("loss", "pairs")
    share = rate(run.pairs)
    figures = [] if share is None else [_figure(share, judged=not context.local)]
    if context.local:
        why = "Measured, and says nothing: all nodes are on one machine."
        return no_verdict("loss", why, measured=True, nodes=context.all_names, figures=figures)
    findings = [*_of_pairs(context), *(fault for one in counted for fault in ports(context, one))]
    if not any(fault.code.startswith("loss-") for fault in findings):
        findings += [fault for one in counted for fault in _of_node(context, one)]
    findings += _recurring(context, findings)
    good = "No port has counted an error" if share is None else f"{share:.3%} of the segments were sent again"
    return answer("loss", f"{good}.", findings, nodes=context.all_names, figures=figures)


def look_of(result: Result) -> Look | None:
    """Return the record of intermittent faults for later runs; None if the run did not check for them."""
    check = result.check("loss")
    if check is None or not check.measured or result.measurements.local:
        return None
    return _look(result.finished_unix, check.nodes, result.findings)


def _look(unix: float, nodes: tuple[str, ...], findings: Iterable[Finding]) -> Look:
    seen = {fault.nodes or fault.suspects for fault in findings if fault.code in COMES_AND_GOES}
    return Look(unix=unix, nodes=nodes, seen=tuple(sorted(seen)))


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
    losses = find(context.measurements.pairs)
    found = [_lasting(context, one) for one in losses if not one.comes_and_goes and one.alone is not False]
    passing = [one for one in losses if one.comes_and_goes]
    crowded = [one for one in passing if not one.stall_s]
    if len(crowded) >= CROWDED:
        passing = [one for one in passing if one.stall_s]
        found.append(_crowded(crowded))
    return found + [_intermittent(context, one) for one in passing]


def _crowded(losses: list[Loss]) -> Finding:
    """Report loss at many places that is absent in isolation as a fault of the shared network."""
    pairs, worst = sum(len(one.pairs) for one in losses), max(one.rate for one in losses)
    title = f"Packets of {pairs} pairs are lost while others send too, up to {worst:.1%}, and of none alone."
    return finding("loss", "loss-crowded", "WARN", title)


def _lasting(context: JudgingContext, lost: Loss) -> Finding:
    symptom = f"{lost.rate:.1%} of the segments are sent again"
    if not lost.rate:
        symptom = "slow messages take more than twice as long as the best"
    verdict: Gravity = "FAIL" if lost.rate >= SERIOUS and lost.alone is True else "WARN"
    where, names = _whose(context, lost)
    if lost.node is None:
        src, dst = (context.name(node) for node in lost.pairs[0])
        title = f"Packets are lost {where}: {symptom}."
        return finding(
            "loss", "loss-link", verdict, title, suspects=names, links=[(src, dst)], src=src, dst=dst
        )
    title = f"Packets {where} are lost, with {len(lost.pairs)} other nodes: {symptom}."
    return finding("loss", "loss-node", verdict, title, nodes=names, nic=nic_of(context, lost.node))


def _whose(context: JudgingContext, lost: Loss) -> tuple[str, tuple[str, ...]]:
    """Return a description of the lost packets, and the node or both ends of the link."""
    if lost.node is None:
        src, dst = (context.name(node) for node in lost.pairs[0])
        where = f"between {src} and {dst}" if len(lost.pairs) > 1 else f"from {src} to {dst}"
        return where, context.names(lost.pairs[0])
    name = context.name(lost.node)
    return f"that {name} {'sends' if lost.kind == 'transmit' else 'is sent'}", (name,)


def _intermittent(context: JudgingContext, lost: Loss) -> Finding:
    """Report temporary serious loss, with its dates and frequency."""
    where, names = _whose(context, lost)
    signs = [f"{lost.rate:.1%} of the segments were sent again"] if lost.rate >= LOSSY else []
    signs += [f"a message was held up for {lost.stall_s:.1f} s"] if lost.stall_s else []
    then = {False: "not when measured alone", True: "alone too", None: "not measured again"}[lost.alone]
    tonight = Look(unix=context.finished_unix, nodes=context.all_names, seen=(names,))
    often = recurrence.of(names, [*recurrence.recent(context.looks, context.finished_unix), tonight])
    title = f"Packets {where} were lost for a while: {', '.join(signs)}, {then}. Seen {often.words}."
    blamed, suspects = ((), names) if lost.node is None else (names, ())
    nic = nic_of(context, lost.pairs[0][0] if lost.node is None else lost.node)
    return finding("loss", "loss-intermittent", "WARN", title, nodes=blamed, suspects=suspects, nic=nic)


def _recurring(context: JudgingContext, findings: list[Finding]) -> list[Finding]:
    """Report nodes and links of this run with loss on several nights, including this one or not."""
    earlier = recurrence.recent(context.looks, context.finished_unix)
    tonight = _look(context.finished_unix, context.all_names, findings)
    here = set(context.all_names)
    again = recurrence.recurring((*earlier, tonight))
    return [_of_nights(context, one) for one in again if set(one.names) <= here]


def _of_nights(context: JudgingContext, again: Recurrence) -> Finding:
    link = len(again.names) > 1
    who = f"between {' and '.join(again.names)}" if link else f"of {again.names[0]}"
    title = f"The link {who} comes and goes: seen {again.words}."
    blamed, suspects = ((), again.names) if link else (again.names, ())
    node = next(node for node in context.measurements.nodes if context.name(node) == again.names[0])
    return finding(
        "loss",
        "loss-recurring",
        "FAIL",
        title,
        nodes=blamed,
        suspects=suspects,
        nic=nic_of(context, node),
        nights=NIGHTS,
        days=WITHIN_DAYS,
    )


def _of_node(context: JudgingContext, counted: Counters) -> list[Finding]:
    """Report retransmissions of a whole node that no pair explains; the other end may be at fault."""
    if not counted.tcp_segments or not counted.tcp_retransmitted:
        return []
    share = counted.tcp_retransmitted / (counted.tcp_segments + counted.tcp_retransmitted)
    if share < SERIOUS:
        return []
    name = context.name(counted.node)
    title = f"{name} sent {share:.1%} of its TCP segments again in phase {counted.phase}."
    return [finding("loss", "loss-world", "WARN", title, suspects=[name])]
