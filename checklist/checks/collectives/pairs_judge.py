"""Check of the bandwidth between pairs of nodes: slow nodes, directions and links, and regressions."""

from __future__ import annotations

import statistics
from dataclasses import replace

from checklist.analysis import sharing
from checklist.analysis.baseline import OWN_NETWORK, OWN_PAIR, PartLimits
from checklist.analysis.bottleneck import TAU
from checklist.analysis.diagnosis import Diagnosis, Fault, diagnose, without_lost
from checklist.analysis.paths import ACROSS_LEAVES, WITHIN_LEAF
from checklist.analysis.uplinks import uplinks
from checklist.checks.network.mesh_judge import cut_off, unreached
from checklist.checks.network.rails import rails, rails_between
from checklist.judging.advice import finding
from checklist.judging.comparison import Comparison, compare
from checklist.judging.context import (
    JudgingContext,
    Judgment,
    Measured,
    decide,
    no_verdict,
    shorten,
    skipped,
)
from checklist.judging.thresholds import PAIR, Threshold
from checklist.result import Figure, Finding, Gravity

SENT, RECEIVED = "pair, sent", "pair, received"  # keys in the history: a node's best pair, by direction
FEWEST_NODES = 4  # with fewer nodes, uniformly slow and healthy cannot be distinguished
CROWDED_SHARE = 0.5  # minimum share of the rounds; fewer may be transient traffic of another job


def pairs(context: JudgingContext) -> Judgment:
    """FAIL for a node, direction or link that is slow even in isolation, WARN for suspects.

    The expected bandwidth is that of paths of the same class: within an NVLink domain, within a leaf or
    across leaves, between nodes of the same kinds. WARN for slight slowness, and if a few nodes of one kind
    are far above the others. If only one rail of a node (a GPU and its network card) is slow, the rail is
    reported; a rail that is slow on all nodes is not attributed to any node (checklist/analysis/rails.py).
    Slow links that form all paths between groups of nodes are one uplink (checklist/analysis/uplinks.py).
    WARN for pairs that are slow only while sending together, in every repeat: they share a bottleneck
    (checklist/analysis/sharing.py). checklist/analysis/diagnosis.py localizes the faults; its result is
    stored as ``diagnosis``. In addition the median pair is compared with a floor and its history, and each
    node and pair with its own history.

    Limits: ``FAIL_SHARE``, 60 %, of the low end of checklist/analysis/expectation.py, or the user's row
    ``pair`` of thresholds (GB/s of one direction; the diagnosis expects that / ``TAU``);
    ``TAU``, 0.8 of the expected value (benchmarks/diagnosis.py), ``SLIGHT_TAU``, 0.92, for slight slowness
    outside the run's spread, and ``UNEVEN``, 1.1 times the median, of checklist/analysis/bottleneck.py;
    ``CROWDED_SHARE``, half of the rounds, as fewer may be another job's transient traffic; for history
    ``WARN_SHARE`` and ``FAIL_SHARE``, of a node ``OWN_NETWORK`` (8 and 20 %), of a pair ``OWN_PAIR`` (8 %,
    three times in a row, WARN) of checklist/analysis/baseline.py; ``FEWEST_NODES``, 4, below which a
    uniformly slow cluster cannot be recognized.

    Not detected: anything but failed pairs between nodes of one machine; with two nodes, whether the sender,
    the receiver or the link is slow.
    """
    lost_nodes = {hang.node for hang in context.measurements.hangs}
    measured = without_lost(context.measurements.pairs, lost_nodes)
    if context.measurements.nodes_asked < 2:
        return skipped("pairs", "There is one node only.")
    if not measured or not context.measurements.nodes:
        return context.unmeasured("pairs", "pairs")
    threshold = None if context.local else context.threshold(PAIR, measured[0].bytes)
    expected = context.expectation(PAIR, measured[0].bytes)
    # Floor and low end are the lowest healthy values; the diagnosis applies TAU to a spec
    spec = None if expected is None else expected.low / TAU
    spec = spec if threshold is None else threshold.floor / TAU
    count = len(context.paths.kinds)
    diagnosis = diagnose(measured, count, spec_gbytes_per_s=spec, paths=context.paths)
    judge = _local_pairs if context.local else _networked_pairs
    return replace(judge(context, diagnosis, threshold), diagnosis=diagnosis)


def _local_pairs(context: JudgingContext, _: Diagnosis, threshold: Threshold | None) -> Judgment:
    """Judge nodes that are processes of one machine, where only failed pairs are meaningful."""
    figures = _median_pair(context, threshold)[2]
    failed = next((pair for pair in context.measurements.pairs if pair.error is not None), None)
    if failed is not None:
        link = (failed.src, failed.dst)
        title = f"{context.name(failed.src)} to {context.name(failed.dst)} failed: {failed.error}."
        fault = finding("pairs", "slow-undecided", "FAIL", title, suspects=context.names(link))
        return decide("pairs", "", [fault], nodes=context.all_names, figures=figures)
    reason = "Measured, with nothing to compare with: all nodes are on one machine."
    return no_verdict("pairs", reason, measured=True, nodes=context.all_names, figures=figures)


def _networked_pairs(context: JudgingContext, diagnosis: Diagnosis, threshold: Threshold | None) -> Judgment:
    """Judge pairs of nodes on a network.

    Findings, in this order of precedence: faults that the diagnosis names, with undecided and crowded links;
    the median pair below its reference; nodes below their own past, or else uneven paths. NO-VERDICT without
    findings if pairs are unmeasured, or if few nodes have no reference.
    """
    median, comparison, figures = _median_pair(context, threshold)
    size = context.measurements.pairs[0].bytes
    sides = {SENT: _sides(context, diagnosis.transmit), RECEIVED: _sides(context, diagnosis.receive)}
    sides[PAIR] = _best_by_pair(context)
    records = [
        Measured(op, size, median if op == PAIR else min(parts.values()), "GB/s", parts)
        for op, parts in sides.items()
        if parts
    ]
    common = comparison.basis == "expectation" and diagnosis.why == "no-good-pair"
    undecided = [] if common else _undecided(context, diagnosis)  # the median pair shows by how much
    findings = [*_faults(context, diagnosis), *undecided, *_crowded(context, diagnosis)]
    unmeasured = unreached(context)
    if unmeasured and not findings:
        reason = f"{len(unmeasured)} pairs could not be measured (see check mesh); the others are in order."
        return no_verdict("pairs", reason, measured=True, nodes=context.all_names, figures=figures)
    if comparison.level in ("WARN", "FAIL") and not findings:
        separator = " " if comparison.basis == "expectation" else ", "
        title = f"The median pair reaches {median:.4g} GB/s{separator}{comparison.deficit}."
        findings.append(finding("pairs", comparison.code, comparison.level, title))
    findings = findings or _below_own_past(context, size, sides) or _uneven(context, diagnosis)
    if len(context.measurements.nodes) < FEWEST_NODES and comparison.level is None and not findings:
        reason = "Measured, no outlier; with fewer than 4 nodes a verdict needs a threshold or a history."
        return no_verdict(
            "pairs", reason, measured=True, nodes=context.all_names, figures=figures, records=records
        )
    cleared_count = len(diagnosis.with_status("cleared"))
    count = sum(pair.first for pair in context.measurements.pairs)
    passed = f"No node, direction or link is slow among {count} measurements."
    passed += f" {cleared_count} were slow at first, but not when measured alone." if cleared_count else ""
    return decide("pairs", passed, findings, nodes=context.all_names, figures=figures, records=records)


def _median_pair(
    context: JudgingContext, threshold: Threshold | None
) -> tuple[float, Comparison, tuple[Figure, ...]]:
    """Return the median first-pass GB/s, its comparison with floor and history, and its figure."""
    size = context.measurements.pairs[0].bytes
    first = [float(pair.gbytes_per_s or 0) for pair in context.measurements.pairs if pair.first]
    median = statistics.median(first) if first else 0.0
    past = None if context.local else context.past(PAIR, size, median)
    expected = context.expectation(PAIR, size)
    comparison = compare(median, threshold, past=past, expectation=expected)
    return median, comparison, (comparison.figure("pairs, median", median, "GB/s", size_bytes=size),)


def _sides(context: JudgingContext, best: tuple[float | None, ...]) -> dict[str, float]:
    """Return the best bandwidth that each node sent (or received), by node."""
    return {context.name(node): value for node, value in enumerate(best) if value}


def _best_by_pair(context: JudgingContext) -> dict[str, float]:
    best: dict[str, float] = {}
    for pair in context.measurements.pairs:
        if pair.gbytes_per_s:
            name = f"{context.name(pair.src)} > {context.name(pair.dst)}"
            best[name] = max(pair.gbytes_per_s, best.get(name, 0.0))
    return best


def _below_own_past(
    context: JudgingContext, size: int | None, sides: dict[str, dict[str, float]]
) -> list[Finding]:
    """Report nodes (by their best pair) and pairs that are slower than their own history."""
    findings = []
    kinds: tuple[tuple[str, str, PartLimits], ...] = (
        (SENT, "sends", OWN_NETWORK),
        (RECEIVED, "receives", OWN_NETWORK),
        (PAIR, "reaches", OWN_PAIR),
    )
    for op, verb, limits in kinds:
        for name, past in context.worse_parts(op, size, sides[op], limits).items():
            streak = "" if limits.in_a_row == 1 else f", {limits.in_a_row} times in a row"
            title = f"{name} {verb} {sides[op][name]:.4g} GB/s at best, {-past.change:.0%} worse than in "
            title += f"earlier runs, {past.median:.4g}{streak}."
            level: Gravity = "FAIL" if past.verdict == "FAIL" else "WARN"
            names = name.split(" > ")
            blamed, suspects = (names, []) if op != PAIR else ([], names)
            findings.append(finding("pairs", "below-history", level, title, nodes=blamed, suspects=suspects))
    return findings


def _uneven(context: JudgingContext, diagnosis: Diagnosis) -> list[Finding]:
    """Report classes where either a few nodes are faster or most are slow, which cannot be distinguished."""
    findings = []
    for path in diagnosis.uneven:
        title = f"{len(path.fast)} of {path.nodes} nodes reach up to {path.most_gbytes_per_s:.4g} GB/s "
        title += (
            f"{path.path}, most of them {path.reference_gbytes_per_s:.4g}: some have a faster path, or most "
        )
        title += "are slow."
        findings.append(finding("pairs", "uneven", "WARN", title, suspects=context.names(path.fast)))
    return findings


def _faults(context: JudgingContext, diagnosis: Diagnosis) -> list[Finding]:
    unmeasured = unreached(context)
    lost_nodes = cut_off(unmeasured, context.measurements.nodes)
    faults = [
        fault
        for fault in diagnosis.faults
        if fault.status != "cleared"
        and fault.node not in lost_nodes
        and not {(fault.src, fault.dst), (fault.dst, fault.src)} & unmeasured
    ]
    on_rails = rails(context)
    links = [fault for fault in faults if fault.node is None and fault.status == "confirmed"]
    uplink = _uplink(context, links)
    others = [fault for fault in faults if uplink is None or fault not in links]
    unexplained = [fault for fault in others if (fault.node,) not in on_rails]  # else a slow rail explains it
    return [
        *([uplink] if uplink else ()),
        *(finding for group in on_rails.values() for finding in group),
        *(_fault(context, finding) for finding in unexplained),
    ]


def _uplink(context: JudgingContext, links: list[Fault]) -> Finding | None:
    """Report all slow links as one finding if they are exactly the paths between groups of nodes."""
    slow = [(int(fault.src or 0), int(fault.dst or 0)) for fault in links]
    measured = ((p.src, p.dst) for p in context.measurements.pairs if p.gbytes_per_s is not None)
    groups = uplinks(slow, measured)
    if not groups:
        return None
    shares = sorted(fault.ratio for fault in links)
    share = f"{shares[0]:.0%}" if shares[-1] - shares[0] < 0.01 else f"{shares[0]:.0%} to {shares[-1]:.0%}"
    labels = [shorten(context.names(group)) for group in groups]
    label = " and ".join(labels)
    if len(labels) > 2:
        label = f"{len(labels)} groups, the smallest of them {labels[0]},"
    paths = len({(min(pair), max(pair)) for pair in slow})
    title = f"The uplink between {label} is slow: each of the {paths} paths over it has {share} of its "
    title += "expected bandwidth."
    return finding(
        "pairs",
        "slow-uplink",
        "WARN" if all(fault.slight for fault in links) else "FAIL",
        title,
        suspects=context.names(groups[0]),
        links=dict.fromkeys((context.name(min(pair)), context.name(max(pair))) for pair in slow),
        src=context.name(groups[0][0]),
        dst=context.name(groups[-1][0]),
    )


def _fault(context: JudgingContext, fault: Fault) -> Finding:
    share = f"{fault.ratio:.0%} of the expected speed"
    confirmed = fault.status == "confirmed"
    gravity: Gravity = "WARN" if fault.slight else "FAIL"
    nvlink = " over NVLink" if fault.over == "nvlink" else ""
    if fault.node is not None:
        name = context.name(fault.node)
        direction = {"transmit": "sends slowly", "receive": "receives slowly"}.get(
            fault.kind, "is slow in both directions"
        )
        title, code = f"{name} {direction}{nvlink}: {share}.", f"slow-{fault.kind}"
        names: tuple[str, ...] = (name,)
    else:
        src, dst = context.name(int(fault.src or 0)), context.name(int(fault.dst or 0))
        arrow = "and" if fault.both_ways else "to"
        share += rails_between(context, int(fault.src or 0), int(fault.dst or 0))
        title, code, names = (
            f"The link from {src} {arrow} {dst} is slow{nvlink}: {share}.",
            "slow-link",
            (src, dst),
        )
        if fault.both_ways:
            title = f"The link between {src} and {dst} is slow{nvlink}: {share}."
        if not fault.ratio:
            title = f"No data passes {'between' if fault.both_ways else 'from'} {src} {arrow} {dst}."
    if not confirmed:
        return finding("pairs", "slow-suspect", "WARN", f"{title} Not measured again alone.", suspects=names)
    if fault.node is None:
        link = (names[0], names[1])
        return finding("pairs", code, gravity, title, suspects=names, links=[link], src=link[0], dst=link[1])
    nic = next((fact.nic for fact in context.leaders if fact.node == fault.node), None)
    return finding("pairs", code, gravity, title, nodes=names, nic=nic or "<interface>")


def _undecided(context: JudgingContext, diagnosis: Diagnosis) -> list[Finding]:
    unmeasured = unreached(context)
    pairs = [pair for pair in diagnosis.undecided if pair not in unmeasured]
    if not pairs:
        return []
    involved = context.names({node for pair in pairs for node in pair})
    src, dst = pairs[0]
    more = f" and {len(pairs) - 1} more" if len(pairs) > 1 else ""
    slow = f"{context.name(src)} to {context.name(dst)}{more}"
    reasons = {
        "two-nodes": "two nodes do not show whether the sender, the receiver or the link is at fault",
        "no-good-pair": "no pair is healthy, so it is the network as a whole or nearly every node",
        "too-few-witnesses": "too few healthy nodes have measured it to name one",
        None: "",
    }[diagnosis.why]
    title = f"Slow: {slow}; {reasons}."
    return [
        finding(
            "pairs",
            "slow-undecided",
            "FAIL" if diagnosis.undecided_settled else "WARN",
            title,
            suspects=involved,
            links=dict.fromkeys((context.name(min(pair)), context.name(max(pair))) for pair in pairs),
            more=diagnosis.nodes + 1,
        )
    ]


def _crowded(context: JudgingContext, diagnosis: Diagnosis) -> list[Finding]:
    rounds = {pair.round for pair in context.measurements.pairs if pair.first}
    findings = [*_narrow_uplinks(diagnosis), *_shared(context, diagnosis)]
    if len(diagnosis.crowded_rounds) < max(1, CROWDED_SHARE * len(rounds)):
        return findings
    title = f"In {len(diagnosis.crowded_rounds)} of {len(rounds)} rounds most pairs slowed each other down."
    return [*findings, finding("pairs", "crowded", "WARN", title)]


def _shared(context: JudgingContext, diagnosis: Diagnosis) -> list[Finding]:
    """Report pairs that are healthy in isolation but slow in every repeat together: a shared bottleneck."""
    shared = sharing.find(context.measurements.pairs)
    slow = {(fault.src, fault.dst) for fault in diagnosis.with_status("confirmed")}
    if shared is None or any({link, link[::-1]} & slow for link in shared.links):
        return []  # pairs that are slow in isolation have their own finding
    links = [(context.name(src), context.name(dst)) for src, dst in shared.links]
    directions = shorten(tuple(f"{src} to {dst}" for src, dst in links))
    title = f"{directions} reach {shared.share:.0%} of their speeds alone when they send at the same time: "
    title += "they share a path with too little bandwidth."
    return [finding("pairs", "crowded", "WARN", title, links=links)]


def _narrow_uplinks(diagnosis: Diagnosis) -> list[Finding]:
    """Report paths across leaves with far less bandwidth than within a leaf, for nodes of the same kinds."""
    findings = []
    for path, within in diagnosis.references.items():
        across = diagnosis.references.get(path.replace(WITHIN_LEAF, ACROSS_LEAVES), within)
        if path.startswith(WITHIN_LEAF) and across < TAU * within:
            title = f"Pairs across leaves reach {across:.4g} GB/s, those within a leaf {within:.4g}."
            findings.append(finding("pairs", "crowded", "WARN", title))
    return findings
