"""Whether packets are lost between nodes, and by whom."""

from __future__ import annotations

from checklist.analysis.packet_loss import LOSSY, SERIOUS, Loss, find, rate
from checklist.judges.advice import finding
from checklist.judges.context import Judgement, JudgingContext, answer, no_verdict, skipped
from checklist.measurements import Counters
from checklist.result import Figure, Finding, Gravity, Verdict

DOWN = "link_downed"  # the one error of an RDMA port that is serious however seldom


def loss(context: JudgingContext) -> Judgement:
    """FAIL where a link or node loses packets also when it is measured alone, WARN for less sure signs.

    Signs are TCP segments sent again between a pair, messages of a pair that take far longer than its best,
    errors that RDMA ports have counted, and a node's own retransmissions where no pair tells more.

    Limits: ``LOSSY`` (0.2 % of the segments, WARN) and ``SERIOUS`` (1 %, FAIL) of
    checklist/analysis/packet_loss.py, with their reasons there; ``DOWN``, a link that went down, fails
    however seldom.

    Can't tell: anything between nodes of one machine (NO-VERDICT); loss over RDMA where ports keep no
    counters; for one pair, which of its ends.
    """
    run = context.measurements
    if run.nodes_asked < 2:
        return skipped("loss", "There is one node only.")
    counted = [one for one in run.counters if one.tcp_segments is not None or one.rdma_errors is not None]
    rated = [pair for pair in run.pairs if pair.segments is not None or pair.gbytes_per_s_p95 is not None]
    if not counted and not rated:
        return context.unmeasured("loss", "pairs")
    share = rate(run.pairs)
    figures = [] if share is None else [_figure(share, judged=not context.local)]
    if context.local:
        why = "Measured, and says nothing: all nodes are on one machine."
        return no_verdict("loss", why, measured=True, nodes=context.all_names, figures=figures)
    losses = [one for one in find(run.pairs) if one.alone is not False]
    findings = [_of_pairs(context, one) for one in losses]
    findings += [fault for one in counted for fault in _of_ports(context, one)]
    if not losses:
        findings += [fault for one in counted for fault in _of_node(context, one)]
    good = "No port has counted an error" if share is None else f"{share:.3%} of the segments were sent again"
    return answer("loss", f"{good}.", findings, nodes=context.all_names, figures=figures)


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


def _of_pairs(context: JudgingContext, lost: Loss) -> Finding:
    (src, dst), many = lost.pairs[0], len(lost.pairs)
    symptom = f"{lost.rate:.1%} of the segments are sent again"
    if not lost.rate:
        symptom = "slow messages take more than twice as long as the best"
    serious = lost.rate >= SERIOUS and lost.alone is True
    verdict: Gravity = "FAIL" if serious else "WARN"
    if lost.node is None:
        ends = context.names((src, dst))
        arrow = "between {} and {}" if many > 1 else "from {} to {}"
        title = f"Packets are lost {arrow.format(context.name(src), context.name(dst))}: {symptom}."
        return finding(
            "loss", "loss-link", verdict, title, suspects=ends, src=context.name(src), dst=context.name(dst)
        )
    name = context.name(lost.node)
    how = "sends" if lost.kind == "transmit" else "is sent"
    title = f"Packets that {name} {how} are lost, with {many} other nodes: {symptom}."
    nic = next((fact.nic for fact in context.leaders if fact.node == lost.node), None)
    return finding("loss", "loss-node", verdict, title, nodes=[name], nic=nic or "<interface>")


def _of_ports(context: JudgingContext, counted: Counters) -> list[Finding]:
    """Findings about errors that a node's RDMA ports have counted during the run."""
    errors = counted.rdma_errors or {}
    if not errors:
        return []
    name = context.name(counted.node)
    down = any(port.endswith(DOWN) for port in errors)
    worst = sorted(errors.items(), key=lambda item: (not item[0].endswith(DOWN), -item[1]))[:3]
    counts = ", ".join(f"{port} +{grown}" for port, grown in worst)
    title = f"{name}: RDMA ports counted errors in phase {counted.phase}: {counts}."
    return [finding("loss", "rdma-errors", "FAIL" if down else "WARN", title, nodes=[name])]


def _of_node(context: JudgingContext, counted: Counters) -> list[Finding]:
    """Retransmissions of a whole node, where no pair tells more: the other end may be at fault."""
    if not counted.tcp_segments or not counted.tcp_retransmitted:
        return []
    share = counted.tcp_retransmitted / (counted.tcp_segments + counted.tcp_retransmitted)
    if share < SERIOUS:
        return []
    name = context.name(counted.node)
    title = f"{name} sent {share:.1%} of its TCP segments again in phase {counted.phase}."
    return [finding("loss", "loss-world", "WARN", title, suspects=[name])]
