"""What pairs of nodes say: who reaches whom, who is slow with whom; and who did not come along at all."""

from __future__ import annotations

import statistics

from checklist.analysis.bottleneck import TAU
from checklist.analysis.diagnosis import Diagnosis, Fault, diagnose
from checklist.judges.advice import finding
from checklist.judges.context import Answer, Case, answer, no_verdict, skipped
from checklist.judges.speed import hold
from checklist.judges.thresholds import PAIR
from checklist.measurements import IDLE, PHASES, Hang
from checklist.result import Finding

CROWDED_SHARE = 0.5  # of the rounds; fewer may be another job's passing traffic


def mesh(case: Case) -> Answer:
    probes = case.measurements.probes
    nodes = case.measurements.nodes
    if case.measurements.nodes_asked < 2:
        return skipped("mesh", "There is one node only.")
    if not probes:
        return case.unmeasured("mesh", "mesh")
    bad = {(probe.src, probe.dst): probe for probe in probes if not probe.connected or probe.bulk_ok is False}
    found: list[Finding] = []
    lost = _cut_off(set(bad), nodes)
    for node in lost:
        title = f"{case.name(node)} is cut off: no other node reaches it, and it reaches none."
        found.append(finding("mesh", "node-unreachable", "FAIL", title, nodes=[case.name(node)]))
    for pair in sorted({(min(key), max(key)) for key in bad if not lost & set(key)}):
        a, b = pair
        ways = [probe for key in (pair, pair[::-1]) if (probe := bad.get(key)) is not None]
        cut = any(not probe.connected for probe in ways)
        arrow = "and" if len(ways) == 2 else "to"
        first, second = (a, b) if ways[0].src == a else (b, a)
        what = "can't connect" if cut else "connect, but 256 KB stall"
        told = f": {ways[0].error}" if ways[0].error else ""
        title = f"{case.name(first)} {arrow} {case.name(second)} {what}{told}."
        suspects = case.names(pair)
        code = "pair-cut" if cut else "mtu"
        found.append(finding("mesh", code, "FAIL", title, suspects=suspects, peer=_address(case, second)))
    expected = len(nodes) * (len(nodes) - 1)
    if len({(probe.src, probe.dst) for probe in probes}) < expected and not found:
        return no_verdict("mesh", f"Only {len(probes)} of {expected} ordered pairs were tried.")
    return answer(
        "mesh", f"All {expected} ordered pairs connect and move 256 KB.", found, nodes=case.all_names
    )


def _cut_off(bad: set[tuple[int, int]], nodes: tuple[int, ...]) -> set[int]:
    """Nodes of which every pair is bad while others are well with each other."""
    lost = {
        node
        for node in nodes
        if all((node, other) in bad and (other, node) in bad for other in nodes if other != node)
    }
    return lost if len(nodes) - len(lost) >= 2 else set()


def _address(case: Case, node: int) -> str:
    fact = next((fact for fact in case.leaders if fact.node == node), None)
    usable = [text for text in (fact.addresses if fact else ()) if not text.startswith(("127.", "::1"))]
    return usable[0] if usable else case.name(node)


def pairs(case: Case) -> tuple[Answer, Diagnosis | None]:
    """The verdict, and the diagnosis for the heat map."""
    measured = case.measurements.pairs
    nodes = len(case.measurements.nodes)
    if case.measurements.nodes_asked < 2:
        return skipped("pairs", "There is one node only."), None
    if not measured or not nodes:
        return case.unmeasured("pairs", "pairs"), None
    size = measured[0].bytes
    threshold = None if case.local else case.threshold(PAIR, size)
    # The table's floor is the lowest that is well; the diagnosis asks for tau of the spec
    spec = None if threshold is None else threshold.floor / TAU
    found_by = diagnose(measured, max(case.measurements.nodes) + 1, spec_gbytes_per_s=spec)
    first = [float(pair.gbytes_per_s or 0) for pair in measured if not pair.alone]
    middle = statistics.median(first) if first else 0.0
    failed = [pair for pair in measured if pair.error is not None]
    held = hold(middle, threshold, past=None if case.local else case.past(PAIR, size, middle))
    figures = (held.figure("pairs, median", middle, "GB/s", size_bytes=size),)
    records = [(PAIR, size, middle, "GB/s")]
    if case.local:
        if failed:
            title = f"{case.name(failed[0].src)} to {case.name(failed[0].dst)} failed: {failed[0].error}."
            fault = finding(
                "pairs", "slow-undecided", "FAIL", title, suspects=case.names((failed[0].src, failed[0].dst))
            )
            return answer("pairs", "", [fault], nodes=case.all_names, figures=figures), found_by
        why = "Measured, with nothing to compare with: all nodes are on one machine."
        return no_verdict("pairs", why, measured=True, nodes=case.all_names, figures=figures), found_by
    findings = [*_faults(case, found_by), *_undecided(case, found_by), *_crowded(case, found_by)]
    cut = _unreached(case)
    if cut and not findings:
        why = f"{len(cut)} pairs could not be measured, as check mesh tells; the others are in order."
        return no_verdict("pairs", why, measured=True, nodes=case.all_names, figures=figures), found_by
    if held.level in ("WARN", "FAIL") and not findings:
        title = f"The median pair reaches {middle:.4g} GB/s, {held.words}."
        findings.append(finding("pairs", held.code, held.level, title))
    if nodes < 4 and held.level is None and not findings:
        why = "Measured, all alike; with fewer than 4 nodes there must be a threshold or a history to judge."
        return (
            no_verdict("pairs", why, measured=True, nodes=case.all_names, figures=figures, records=records),
            found_by,
        )
    cleared = len(found_by.with_status("cleared"))
    good = f"No node, direction or link is slow among {len(first)} measurements."
    good += f" {cleared} were slow at first, but not when measured alone." if cleared else ""
    return answer("pairs", good, findings, nodes=case.all_names, figures=figures, records=records), found_by


def _unreached(case: Case) -> set[tuple[int, int]]:
    """Ordered pairs that the mesh has found cut or stalled: its findings, which need no second one here."""
    return {
        (probe.src, probe.dst)
        for probe in case.measurements.probes
        if not probe.connected or probe.bulk_ok is False
    }


def _faults(case: Case, diagnosis: Diagnosis) -> list[Finding]:
    cut = _unreached(case)
    lost = _cut_off(cut, case.measurements.nodes)
    return [
        _fault(case, fault)
        for fault in diagnosis.faults
        if fault.status != "cleared"
        and fault.node not in lost
        and not {(fault.src, fault.dst), (fault.dst, fault.src)} & cut
    ]


def _fault(case: Case, fault: Fault) -> Finding:
    share = f"{fault.ratio:.0%} of what it should be"
    sure = fault.status == "confirmed"
    if fault.node is not None:
        name = case.name(fault.node)
        how = {"transmit": "sends slowly", "receive": "receives slowly"}.get(
            fault.kind, "is slow in both directions"
        )
        title, code = f"{name} {how}: {share}.", f"slow-{fault.kind}"
        names: tuple[str, ...] = (name,)
    else:
        src, dst = case.name(int(fault.src or 0)), case.name(int(fault.dst or 0))
        arrow = "and" if fault.both_ways else "to"
        title, code, names = f"The link from {src} {arrow} {dst} is slow: {share}.", "slow-link", (src, dst)
        if fault.both_ways:
            title = f"The link between {src} and {dst} is slow: {share}."
        if not fault.ratio:
            title = f"Nothing gets {'between' if fault.both_ways else 'from'} {src} {arrow} {dst}."
    if not sure:
        return finding("pairs", "slow-suspect", "WARN", f"{title} Not measured again alone.", suspects=names)
    if fault.node is None:
        return finding("pairs", code, "FAIL", title, suspects=names, src=names[0], dst=names[1])
    nic = next((fact.nic for fact in case.leaders if fact.node == fault.node), None)
    return finding("pairs", code, "FAIL", title, nodes=names, nic=nic or "<interface>")


def _undecided(case: Case, diagnosis: Diagnosis) -> list[Finding]:
    cut = _unreached(case)
    undecided = [pair for pair in diagnosis.undecided if pair not in cut]
    if not undecided:
        return []
    involved = case.names({node for pair in undecided for node in pair})
    src, dst = undecided[0]
    more = f" and {len(undecided) - 1} more" if len(undecided) > 1 else ""
    slow = f"{case.name(src)} to {case.name(dst)}{more}"
    why = {
        "two-nodes": "two nodes can't tell whether the sender, the receiver or the link is at fault",
        "no-good-pair": "no pair is well, so it is the network as a whole or nearly every node",
        "too-few-witnesses": "too few nodes that are well have seen it to name one",
        None: "",
    }[diagnosis.why]
    title = f"Slow: {slow}; {why}."
    return [
        finding(
            "pairs",
            "slow-undecided",
            "FAIL" if diagnosis.undecided_settled else "WARN",
            title,
            suspects=involved,
            more=diagnosis.nodes + 1,
        )
    ]


def _crowded(case: Case, diagnosis: Diagnosis) -> list[Finding]:
    rounds = {pair.round for pair in case.measurements.pairs if not pair.alone}
    if len(diagnosis.crowded_rounds) < max(1, CROWDED_SHARE * len(rounds)):
        return []
    title = f"In {len(diagnosis.crowded_rounds)} of {len(rounds)} rounds most pairs slowed each other down."
    return [finding("pairs", "crowded", "WARN", title)]


def hangs(case: Case) -> Answer:
    found = []
    for hang in case.measurements.hangs:
        if hang.kind != "taken":
            name, title = case.name_of_rank(hang.rank), _hang_title(case, hang)
            where = _where(hang)
            found.append(
                finding("hangs", hang.kind, "FAIL", title, nodes=[name], ranks=[hang.rank], where=where)
            )
    taken = [hang for hang in case.measurements.hangs if hang.kind == "taken"]
    if taken and not found:
        names = ", ".join(dict.fromkeys(case.name_of_rank(hang.rank) for hang in taken))
        told = f"{names} was lost in {_where(taken[0])}, and its step with it: the cluster's events tell why."
        return no_verdict("hangs", told)
    failed = [phase for phase in case.measurements.phases if phase.status == "failed"]
    if failed and not found:
        reasons: dict[str, list[str]] = {}
        for phase in failed:
            reasons.setdefault(phase.reason or "no reason known", []).append(phase.name)
        told = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
        return no_verdict("hangs", f"A phase ended early and nobody can be named: {told}.")
    if not case.measurements.phases:
        return no_verdict("hangs", "Not measured: no phase ran.")
    # A run that leaves out phases can't clear a hang in one of them: it covers nobody
    whole = {phase.name for phase in case.measurements.phases if phase.status == "done"} == set(PHASES)
    return answer("hangs", "Every phase ended in time.", found, nodes=case.all_names if whole else ())


def _hang_title(case: Case, hang: Hang) -> str:
    name, where = case.name_of_rank(hang.rank), _where(hang)
    detail = f": {hang.detail}." if hang.detail else "."
    if hang.kind in ("died", "lost"):
        return f"Rank {hang.rank} ({name}) {'died' if hang.kind == 'died' else 'was lost'} in {where}{detail}"
    step = "" if hang.sequence is None else f" after {hang.sequence} operations"
    return f"Rank {hang.rank} ({name}) hung in {where}{step}; waited for {hang.waited_s:.0f} s{detail}"


def _where(hang: Hang) -> str:
    return f"phase {hang.phase}" if hang.op == IDLE else f"{hang.op} of phase {hang.phase}"
