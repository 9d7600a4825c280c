"""Checks of collectives over all ranks: correct values, speed, and the network in use."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from checklist.analysis.busbw import OPS, SMALL_BYTES
from checklist.analysis.expectation import Expectation
from checklist.judging.advice import finding
from checklist.judging.comparison import compare, compare_with_history
from checklist.judging.context import (
    JudgingContext,
    Judgment,
    Measured,
    Records,
    decide,
    no_verdict,
    skipped,
)
from checklist.judging.wiring import has_no_rdma
from checklist.measurements import Collective
from checklist.result import Figure, Finding
from estimator.formatting import format_bytes

_TOPOLOGY = "NCCL_TOPO_FILE"
# Codes of findings that the expected range contradicts
EXPECTED_CODES = ("below-expected", "speed-of-tcp", "speed-of-one-port", "half-speed")
_ONE_PORT = (0.7, 1.5)  # multiples of one port's part of the expected figure that count as one port
_TCP = 0.3  # share below which few ports are slower than any fault of one of them explains
_HALF = (0.4, 0.62)  # share of the expected figure that counts as half


def correctness(context: JudgingContext) -> Judgment:
    """FAIL for an operation that failed or returned wrong values on any rank.

    Values differ by rank and position, so a partial or misplaced result is detected.

    Limits: none; values are compared for equality.

    Not detected: the rank that produced a wrong value; ranks that received one are suspects. NO-VERDICT if
    the values of an operation were not compared.
    """
    results = context.measurements.collectives
    if not results:
        return context.unmeasured("correctness", "world")
    findings = []
    for op in dict.fromkeys(item.op for item in results):
        results_of_op = [item for item in results if item.op == op]
        incorrect = [item for item in results_of_op if item.correct is False]
        failed = [item for item in results_of_op if item.error is not None]
        if incorrect:
            findings.append(_wrong(context, op, incorrect))
        elif failed:
            title = f"{op} of {failed[0].bytes} bytes ({failed[0].dtype}) failed: {failed[0].error}."
            findings.append(finding("correctness", "collective-failed", "FAIL", title))
    checked = {item.op for item in results if item.correct is not None}
    missing = sorted(set(OPS) - checked)
    if missing and not findings:
        return no_verdict("correctness", f"The values of {', '.join(missing)} were not compared.")
    return decide(
        "correctness", f"{len(checked)} operations gave the right values.", findings, nodes=context.all_names
    )


def _wrong(context: JudgingContext, op: str, failed: list[Collective]) -> Finding:
    ranks = sorted({rank for item in failed for rank in item.wrong_ranks})
    values = sum(item.wrong_values or 0 for item in failed)
    where = f" on rank {', '.join(map(str, ranks))}" if ranks else ""
    title = f"{op} gave {values or 'some'} wrong values{where} ({failed[0].dtype}, {failed[0].bytes} bytes)."
    # The rank that receives a wrong value did not necessarily produce it
    suspects = [context.name_of_rank(rank) for rank in ranks]
    return finding(
        "correctness", "wrong-values", "FAIL", title, suspects=dict.fromkeys(suspects), ranks=ranks
    )


def transport(context: JudgingContext) -> Judgment:
    """FAIL if NCCL's world differs from the job's, or if it uses sockets although RDMA devices exist.

    WARN if GPU Direct RDMA is off.

    Limits: none; nodes and ranks are counted, the network is the one that NCCL's log names.

    Not detected: anything with gloo, which writes no log, or if the log names no network (NO-VERDICT).
    """
    used = context.measurements.transport
    if used is None:
        if context.measurements.backend == "gloo":
            return skipped("transport", "gloo has one transport and keeps no log of it.")
        return context.unmeasured("transport", "world")
    if not context.facts:
        return context.unmeasured("transport", "facts")
    findings = []
    nodes = len(context.measurements.nodes)
    world = context.measurements.nodes_asked * context.measurements.gpus_per_node_asked
    if used.nodes_seen is not None and used.nodes_seen != nodes and not context.local:
        title = f"NCCL saw {used.nodes_seen} nodes, the launcher {nodes}."
        network = f"{used.nodes_seen} of {nodes} nodes"
        findings.append(finding("transport", "separate-world", "FAIL", title, seen=network))
    elif used.ranks_seen not in (None, world) and len(context.facts) == world:  # else check ranks reports it
        title = f"NCCL's world has {used.ranks_seen} ranks, the job's {world}."
        network = f"{used.ranks_seen} of {world} ranks"
        findings.append(finding("transport", "separate-world", "FAIL", title, seen=network))
    devices = _rdma(context)
    if devices and used.network == "socket" and nodes > 1:
        title = f"NCCL uses plain sockets although there are {devices}."
        findings.append(finding("transport", "rdma-unused", "FAIL", title, devices=devices))
    if used.gpu_direct is False and used.network in ("ib", "efa"):
        title = "GPU Direct RDMA is off: data between nodes goes through host memory."
        findings.append(finding("transport", "gdr-off", "WARN", title))
    if not findings and (
        used.nodes_seen is None or (used.network is None and nodes > 1 and not context.local)
    ):
        return no_verdict("transport", "The log names neither the network in use nor the number of nodes.")
    network = f"{used.network or 'within one machine'}" + (
        f" over {used.interface}" if used.interface else ""
    )
    return decide("transport", f"{used.nodes_seen} nodes, {network}.", findings, nodes=context.all_names)


def _rdma(context: JudgingContext) -> str:
    """Describe the RDMA devices of the nodes; empty if there are none."""
    efa = max((fact.efa_devices or 0 for fact in context.leaders), default=0)
    if efa or (context.machine is not None and context.machine.fabric.upper().startswith("EFA")):
        return f"{efa} EFA devices" if efa else "EFA devices in this machine type"
    ib = max((len(fact.ib_devices or ()) for fact in context.leaders), default=0)
    return f"{ib} InfiniBand devices" if ib else ""


def latency(context: JudgingContext) -> Judgment:
    """FAIL or WARN for small messages and barriers that take longer than in earlier runs.

    Limits: messages up to ``SMALL_BYTES``, 4 KiB, where latency dominates; ``WARN_SHARE`` and ``FAIL_SHARE``
    of checklist/analysis/baseline.py. thresholds.csv has no rows, because latencies by machine type are not
    published.

    Not detected: which rank is late; anything without a history or on one machine (NO-VERDICT).
    """
    times: dict[str, list[float]] = defaultdict(list)
    for item in _timed(context):
        if item.op == "barrier" or (item.op == "all_reduce" and 0 < item.bytes <= SMALL_BYTES):
            times[item.op].append(float(item.seconds_median or 0))
    if not times:
        return context.unmeasured("latency", "world")
    figures: list[Figure] = []
    findings: list[Finding] = []
    records: Records = []
    for op, seconds in times.items():
        name, value = f"{op} latency", statistics.median(seconds)
        records.append(Measured(name, None, value, "s"))
        comparison = compare_with_history(
            None if context.local else context.past(name, None, value, less_is_better=True)
        )
        figures.append(comparison.figure(name, value, "s"))
        if comparison.level in ("WARN", "FAIL"):
            title = f"{op} of a small message takes {value * 1e6:.0f} us, {comparison.deficit} s."
            findings.append(finding("latency", comparison.code, comparison.level, title))
    return _judge_figures(context, "latency", figures, findings, records)


def bandwidth(context: JudgingContext) -> Judgment:
    """FAIL or WARN for a collective whose busbw is below that of healthy clusters, or below its history.

    The expected range follows from the rates of links and ports (checklist/analysis/expectation.py), or from
    the user's --expect; a row of the user's thresholds for the operation replaces it.

    Limits: at sizes from ``SMALLEST_BYTES``, 64 MiB, WARN below the low end of the published range, FAIL
    below ``FAIL_SHARE``, 60 %, of it or of the network's rate; for the largest size ``WARN_SHARE`` and
    ``FAIL_SHARE`` of checklist/analysis/baseline.py.

    Not detected: which node is slow (see check pairs). NO-VERDICT between GPU nodes if no all-reduce has an
    expected range, also with a history, because a cluster that was always slow has a steady one; and if a
    figure is ``BEYOND``, 1.2 times, the known links' bound, which then are not the ones in use.
    """
    large = [
        item for item in _timed(context) if item.busbw_gbytes_per_s is not None and item.bytes > SMALL_BYTES
    ]
    if not large:
        return context.unmeasured("bandwidth", "world")
    figures: list[Figure] = []
    findings: list[Finding] = []
    records: Records = []
    expectations = _expectations(context, large)
    contradicted = _contradicted(context, large, expectations)
    for item, expected in zip(large, expectations, strict=True):
        name, value = f"{item.op} {item.dtype}", float(item.busbw_gbytes_per_s or 0)
        largest = _is_largest(item, large)
        if largest:
            records.append(Measured(name, item.bytes, value, "GB/s"))
        if contradicted is not None:
            expected = None
        comparison = compare(
            value,
            None if context.local else context.threshold(item.op, item.bytes, item.algorithm),
            past=context.past(name, item.bytes, value) if largest and not context.local else None,
            expectation=expected,
        )
        if largest or comparison.level is not None:
            figures.append(comparison.figure(name, value, "GB/s", size_bytes=item.bytes))
        if comparison.level in ("WARN", "FAIL"):
            separator = " " if comparison.basis == "expectation" else ", "
            title = f"{name} of {format_bytes(item.bytes)}: {value:.3g} GB/s{separator}{comparison.deficit}"
            code, pattern = comparison.code, ""
            if comparison.basis in ("floor", "expectation") and _topology_suspect(context):
                code = "topology-file"
            elif comparison.basis == "expectation" and expected is not None:
                code, pattern = _advice_for(context, value / expected.typical)
            topology = context.measurements.environment.get(_TOPOLOGY, "")
            title += f"; {pattern}." if pattern else "."
            findings.append(finding("bandwidth", code, comparison.level, title, file=topology))
    findings.sort(key=lambda fault: fault.verdict != "FAIL")  # the headline shows the gravest size
    return _judge_figures(context, "bandwidth", figures, findings, records, contradicted)


def _expectations(context: JudgingContext, items: Sequence[Collective]) -> list[Expectation | None]:
    return [
        context.expectation(item.op, item.bytes, item.algorithm, largest=_is_largest(item, items))
        for item in items
    ]


def _contradicted(
    context: JudgingContext, items: Sequence[Collective], expectations: Sequence[Expectation | None]
) -> Expectation | None:
    """Return an expectation that a figure is too fast for: other links than the known ones are in use."""
    if context.machine is not None and has_no_rdma(context.machine):
        return None  # there are no others; the machine type's rate is a baseline above which it may burst
    for item, expected in zip(items, expectations, strict=True):
        if expected is not None and expected.contradicted_by(float(item.busbw_gbytes_per_s or 0)):
            return expected
    return None


def _is_largest(item: Collective, items: Sequence[Collective]) -> bool:
    return item.bytes == max(peer.bytes for peer in items if (peer.op, peer.dtype) == (item.op, item.dtype))


def _advice_for(context: JudgingContext, share: float) -> tuple[str, str]:
    """Return the advice for a share of the expected figure, and its description."""
    ports = context.wiring.used_ports or 1
    one_domain = context.wiring.domains == 1
    if one_domain:
        return "below-expected", ""
    if context.wiring.fabric not in (None, "tcp"):
        used = context.measurements.transport
        if (used is not None and used.network == "socket") or share < min(_ONE_PORT[0] / ports, _TCP):
            return "speed-of-tcp", "about the speed of TCP"
    if ports > 2 and _ONE_PORT[0] <= share * ports <= _ONE_PORT[1]:
        return "speed-of-one-port", f"about the part of one of {ports} ports"
    if _HALF[0] <= share <= _HALF[1]:
        return "half-speed", "about half"
    return "below-expected", ""


def _topology_suspect(context: JudgingContext) -> bool:
    """Return whether NCCL was given a topology file although copies between the GPUs are fast enough."""
    floors = context.thresholds_by_rank("peer_copy")
    slow = any(
        local.what == "peer_copy" and local.rank in floors and (local.value or 0) < floors[local.rank].floor
        for local in context.measurements.locals
    )
    return _TOPOLOGY in context.measurements.environment and not slow


def _judge_figures(
    context: JudgingContext,
    check: str,
    figures: list[Figure],
    findings: list[Finding],
    records: Records,
    contradicted: Expectation | None = None,
) -> Judgment:
    """Decide a check from its figures. ``contradicted``: an expectation that a figure is too fast for."""
    judged = [figure for figure in figures if figure.basis != "none"]
    # Compared with more than its own history
    speed_known = any(figure.basis in ("floor", "expectation") for figure in figures)
    if check == "bandwidth" and context.several_gpu_nodes and not findings and not speed_known:
        return no_verdict(
            check,
            _unknown_speed(context, judged, contradicted),
            measured=True,
            nodes=context.all_names,
            figures=figures,
            records=records,
        )
    if judged:
        passed = f"{len(judged)} of {len(figures)} figures have a reference, and are as expected."
        return decide(check, passed, findings, nodes=context.all_names, figures=figures, records=records)
    reason = (
        "all nodes are on one machine" if context.local else "no expectation for this network, no history"
    )
    return no_verdict(
        check,
        f"Measured, with nothing to compare with: {reason}.",
        measured=True,
        nodes=context.all_names,
        figures=figures,
        records=records,
    )


def _unknown_speed(context: JudgingContext, judged: list[Figure], contradicted: Expectation | None) -> str:
    """Explain why there is no expected speed."""
    missing = "the range is"
    if contradicted is not None:
        missing = (
            f"it is faster than the known links allow ({contradicted.arithmetic}), so the links in use are"
        )
    elif context.wiring.network_gbytes_per_s is None:
        missing = "the rate of the network's ports is"
    note = " It is as fast as in earlier runs, which may have been slow too." if judged else ""
    return f"Measured; {missing} unknown, so there is no expected speed.{note}"


def _timed(context: JudgingContext) -> Sequence[Collective]:
    return [
        item
        for item in context.measurements.collectives
        if item.error is None and item.seconds_median is not None
    ]
