"""Checks of GPU, memory and storage speed: against an absolute floor, then peers, then history."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from checklist.analysis.paths import peers_of
from checklist.judging.advice import finding
from checklist.judging.comparison import Level, compare, compare_with_history
from checklist.judging.context import (
    JudgingContext,
    Judgment,
    Measured,
    Records,
    decide,
    no_verdict,
    skipped,
)
from checklist.judging.thresholds import Threshold
from checklist.measurements import NO_FOLDER, Facts, Local
from checklist.registry import LOCALS
from checklist.result import Figure, Finding, Gravity

PEERS = 4  # minimum number of values for outlier detection
OUTLIER = (
    -3.5
)  # modified z-score (Iglewicz and Hoaglin); alone it flags 8 to 12 % of healthy fleets of 4 to 8
_Z_OF_MAD = 0.6745
PEERS_WARN, PEERS_FAIL = 0.95, 0.90  # share of the median, as for history
UNEVEN = 1.1  # fastest / slowest GPU of one model from which half of them may be slow
EXTREMES = 20  # one in this many is excluded at either end of that: large fleets have legitimate outliers
_UUID_LETTERS = 12  # "GPU-" and eight more characters distinguish the GPUs of a node
GPU_ALONE = ("gemm", "hbm")  # checks internal to a GPU; copies also depend on sockets and bridges


def peers(values: Sequence[float]) -> list[Literal["PASS", "WARN", "FAIL"]] | None:
    """Rate each value against the others; higher is better. None if there are too few values.

    WARN for an outlier by the median absolute deviation that is also more than 5 % below the median, FAIL for
    more than 10 %.
    """
    if len(values) < PEERS:
        return None
    median = statistics.median(values)
    mad = statistics.median(abs(value - median) for value in values)
    verdicts: list[Literal["PASS", "WARN", "FAIL"]] = []
    for value in values:
        outside = value < median and (mad == 0 or _Z_OF_MAD * (value - median) / mad < OUTLIER)
        if outside and value < PEERS_WARN * median:
            verdicts.append("FAIL" if value < PEERS_FAIL * median else "WARN")
        else:
            verdicts.append("PASS")
    return verdicts


def gemm(context: JudgingContext) -> Judgment:
    """FAIL for a GPU whose matmuls are below the floor, its peers or its history; WARN for near it.

    If all GPUs are below the floor, no single node is reported.

    Peers are GPUs of one model, restricted to one NVLink domain if it has enough of them; floors are selected
    by rank. WARN if the GPUs of one model are so uneven that half of them may be slow.

    Two figures: the fastest matmuls of a burst (``gemm_bf16``), measured like the table's sources, and
    matmuls over seconds (``gemm_bf16_sustained``), during which a GPU at its power limit lowers its clocks
    (by a seventh with normally distributed operands); the table has no row for the latter.

    Limits: the rows ``gemm_bf16``, ``gemm_bf16_sustained`` and ``gemm_fp32`` of thresholds.csv (TFLOPS);
    with at least ``PEERS`` values, an ``OUTLIER`` below ``PEERS_WARN`` or ``PEERS_FAIL`` of their
    median; ``UNEVEN``, 1.1 from the slowest to the fastest, without one of ``EXTREMES`` at either end; for
    the slowest, and for each GPU by itself, ``WARN_SHARE`` and ``FAIL_SHARE`` of
    checklist/analysis/baseline.py.

    Not detected: the cause. On CPUs the figure depends on other load: NO-VERDICT.
    """
    return _judge_node(context, "gemm")


def hbm(context: JudgingContext) -> Judgment:
    """FAIL for a GPU whose memory copies are below the floor, its peers or its history; WARN for near it.

    On CPUs host memory is measured instead (``memory_copy``), without a verdict. Peers, floors by rank and
    WARN for uneven GPUs are as in check gemm.

    Limits: the row ``hbm_copy`` of thresholds.csv (GB/s, read plus write); with ``PEERS`` or more values, an
    ``OUTLIER`` below ``PEERS_WARN`` or ``PEERS_FAIL`` of their median; ``UNEVEN`` without one of
    ``EXTREMES``; for the slowest, and for each GPU by itself, ``WARN_SHARE`` and ``FAIL_SHARE`` of
    checklist/analysis/baseline.py.

    Not detected: memory errors; check gpu-health queries the GPU for those.
    """
    return _judge_node(context, "hbm")


def host_copy(context: JudgingContext) -> Judgment:
    """FAIL for a GPU whose copies to or from pinned host memory are too slow; WARN for near it.

    GPUs below one PCIe root port are measured one at a time (checklist/checks/gpu/pcie.py).

    Limits: the rows ``h2d`` and ``d2h`` of thresholds.csv (GB/s); with at least ``PEERS`` values, an
    ``OUTLIER`` below ``PEERS_WARN`` or ``PEERS_FAIL`` of their median; for the slowest, and for each GPU by
    itself, ``WARN_SHARE`` and ``FAIL_SHARE`` of checklist/analysis/baseline.py. Uneven GPUs (``UNEVEN``,
    ``EXTREMES``) are no finding here, because distances to the CPU sockets differ.

    Not distinguished: a narrow PCIe link and remote host memory (NUMA); check gpu-health counts lanes.
    """
    return _judge_node(context, "host-copy")


def peer_copy(context: JudgingContext) -> Judgment:
    """FAIL for a GPU whose copies to another GPU of its node are too slow; WARN for near it.

    Limits: the row ``peer_copy`` of thresholds.csv (GB/s); with at least ``PEERS`` values, an ``OUTLIER``
    below ``PEERS_WARN`` or ``PEERS_FAIL`` of their median; for the slowest, and for each GPU by its slowest
    peer, ``WARN_SHARE`` and ``FAIL_SHARE`` of checklist/analysis/baseline.py. Uneven GPUs (``UNEVEN``,
    ``EXTREMES``) are no finding here, because NVLink bridges connect only some of them.

    Not detected: which of the two GPUs is slow; PCIe used instead of NVLink if no row covers the GPU.
    """
    return _judge_node(context, "peer-copy")


def storage(context: JudgingContext) -> Judgment:
    """FAIL if the work directory cannot be written and read; otherwise PASS, regardless of speed.

    Limits: rows ``storage_write`` and ``storage_read`` (GB/s) and ``storage_files`` (files/s: create, stat
    and remove small files) that a user adds to thresholds.csv; the shipped table has none, because no source
    publishes one. For the slowest rank ``WARN_SHARE`` and ``FAIL_SHARE`` of checklist/analysis/baseline.py.
    Ranks are not compared with each other (``PEERS``, ``OUTLIER``, ``PEERS_WARN``, ``PEERS_FAIL``,
    ``UNEVEN``, ``EXTREMES``), because a file system is shared.

    Not detected: the cause of a failure, so nodes are only suspects.
    """
    return _judge_node(context, "storage")


def datastore(context: JudgingContext) -> Judgment:
    """FAIL if the datastore cannot be written and read; otherwise PASS, regardless of speed.

    Limits: rows ``datastore_write`` and ``datastore_read`` that a user adds to thresholds.csv (GB/s); the
    shipped table has none, because no source publishes one. For the slowest rank ``WARN_SHARE`` and
    ``FAIL_SHARE`` of checklist/analysis/baseline.py. Ranks are not compared with each other (``PEERS``,
    ``OUTLIER``, ``PEERS_WARN``, ``PEERS_FAIL``, ``UNEVEN``, ``EXTREMES``), because a store is shared.

    Not detected: anything without a datastore (NO-VERDICT); the cause of a failure.
    """
    return _judge_node(context, "datastore")


def _judge_node(context: JudgingContext, check: str) -> Judgment:
    """Judge one single-node check: all its figures on all ranks."""
    # Of GPU nodes, host memory is judged by check host-limits
    gpu_nodes = ("memory_copy",) if context.cuda else ()
    kinds = [kind for kind in LOCALS.values() if kind.check == check and kind.name not in gpu_nodes]
    locals_ = [local for local in context.measurements.locals if local.what in {kind.name for kind in kinds}]
    if not locals_:
        reason = _does_not_apply(context, check)
        if check == "datastore" and context.ran("node"):
            return no_verdict(check, "Not measured: no folder or S3 was given as the datastore.")
        return skipped(check, reason) if reason else context.unmeasured(check, "node")
    stores = check in ("storage", "datastore")
    findings = _failed(context, check, [local for local in locals_ if local.value is None], stores=stores)
    figures: list[Figure] = []
    records: Records = []
    for kind in kinds:
        results = [local for local in locals_ if local.what == kind.name and local.value is not None]
        if results:
            figures += _judge_locals(context, check, results, findings)
            # The slowest rank limits a job over all of them and shows a single bad one
            minimum = min(float(local.value or 0) for local in results)
            by_gpu = {} if stores or not context.cuda else _by_gpu(context, results)
            records.append(Measured(kind.name, None, minimum, kind.unit, by_gpu))
    nodes = context.names(
        node for local in locals_ if (node := context.nodes_by_rank.get(local.rank)) is not None
    )
    # Successful writes and reads are a result by themselves, regardless of speed
    if findings or stores or any(figure.basis != "none" for figure in figures):
        names = ", ".join(dict.fromkeys(figure.name for figure in figures if "," not in figure.name))
        passed = f"{names}: {'done without error' if stores else 'as expected'}."
        passed += "".join(
            f" Note: {note}." for note in dict.fromkeys(local.note for local in locals_ if local.note)
        )
        return decide(check, passed, findings, nodes=nodes, figures=figures, records=records)
    reason = (
        "on CPUs it depends on what else runs"
        if not context.cuda
        else "no threshold, fewer than 4 peers, no history"
    )
    return no_verdict(
        check,
        f"Measured, with nothing to compare with: {reason}.",
        measured=True,
        nodes=nodes,
        figures=figures,
        records=records,
    )


def _failed(context: JudgingContext, check: str, failed: list[Local], *, stores: bool) -> list[Finding]:
    """Report failed measurements. ``stores``: shared storage, whose failure may have no single cause."""
    findings: list[Finding] = []
    missing: dict[str, list[Local]] = {}
    for local in failed:
        if (local.error or "").startswith(NO_FOLDER):
            missing.setdefault((local.error or "").removeprefix(NO_FOLDER).strip(), []).append(local)
            continue
        name = context.name_of_rank(local.rank)
        title = (
            f"{local.what} could not be measured by rank {local.rank} ({name}): "
            f"{local.error or 'no reason known'}."
        )
        code, nodes, suspects = ("storage-failed", [], [name]) if stores else ("local-failed", [name], [])
        findings.append(
            finding(check, code, "FAIL", title, nodes=nodes, suspects=suspects, ranks=[local.rank])
        )
    for folder, affected in missing.items():
        names = list(dict.fromkeys(context.name_of_rank(local.rank) for local in affected))
        title = f"The folder {folder} ({check}) does not exist on {', '.join(names)}."
        ranks = [local.rank for local in affected]
        findings.append(
            finding(check, "no-folder", "FAIL", title, suspects=names, ranks=ranks, folder=folder)
        )
    return findings


def _does_not_apply(context: JudgingContext, check: str) -> str | None:
    if not context.cuda and check in ("host-copy", "peer-copy"):
        return "The run uses no GPUs."
    if check == "peer-copy" and context.measurements.gpus_per_node_asked < 2:
        return "There is one GPU on each node."
    return None


def _judge_locals(
    context: JudgingContext, check: str, results: list[Local], findings: list[Finding]
) -> list[Figure]:
    """Judge one kind of figure over all ranks, plus each GPU's and the slowest one's history.

    Appends to ``findings``.
    """
    kind, unit = results[0].what, results[0].unit
    floors = context.thresholds_by_rank(kind)
    # A file system is shared, so one rank's speed says little about its node
    on_gpu = context.cuda and check not in ("storage", "datastore")
    against_peers = _compare_peers(context, results) if on_gpu else {}
    common = _all_below(check, results, floors, findings)
    figures = []
    for index, local in enumerate(results):
        value, name = float(local.value or 0), context.name_of_rank(local.rank)
        comparison = compare(value, floors.get(local.rank), against_peers.get(index))
        figures.append(comparison.figure(kind, value, unit, node=name, rank=local.rank))
        if comparison.level in ("WARN", "FAIL") and floors.get(local.rank) not in common:
            peer = "" if local.peer is None else f" to rank {local.peer}"
            title = f"{kind} of rank {local.rank}{peer} ({name}): {value:.4g} {unit}, {comparison.deficit}."
            code = "peer-copy-slow" if check == "peer-copy" else comparison.code
            findings.append(finding(check, code, comparison.level, title, nodes=[name], ranks=[local.rank]))
    worse = any(figure.verdict in ("WARN", "FAIL") for figure in figures)
    if on_gpu and not worse:
        worse = _below_own_past(context, check, results, findings)
    if on_gpu and not worse and check in GPU_ALONE:
        findings += _uneven(context, check, results)
    figures += _slowest_over_time(context, check, results, findings, blamed=worse)
    return figures


def _compare_peers(context: JudgingContext, results: list[Local]) -> dict[int, tuple[Level, float]]:
    """Return, by index in ``results``, the verdict against the peers and their median."""
    facts = {fact.rank: fact for fact in context.facts}
    groups: dict[tuple[str | None, str | None], list[int]] = defaultdict(list)
    for index, local in enumerate(results):
        model, domain = peers_of(facts[local.rank]) if local.rank in facts else (None, None)
        groups[model, domain].append(index)
    by_model: dict[str | None, list[int]] = defaultdict(list)
    for (model, _), indexes in groups.items():
        by_model[model] += indexes
    against_peers: dict[int, tuple[Level, float]] = {}
    for (model, _), indexes in groups.items():
        # GPUs of a domain with too few peers are compared with all GPUs of the model
        wide = by_model[model] if len(indexes) < PEERS else indexes
        values = [float(results[member].value or 0) for member in wide]
        verdicts = peers(values)
        if verdicts is not None:
            levels, median = dict(zip(wide, verdicts, strict=True)), statistics.median(values)
            against_peers |= {member: (levels[member], median) for member in indexes}
    return against_peers


def _all_below(
    check: str, results: list[Local], floors: dict[int, Threshold], findings: list[Finding]
) -> list[Threshold]:
    """Return floors that all ranks of a kind miss, which no single node causes."""
    by_floor: dict[Threshold, list[float]] = defaultdict(list)
    for local in results:
        if local.rank in floors:
            by_floor[floors[local.rank]].append(float(local.value or 0))
    common = []
    for threshold, values in by_floor.items():
        if len(values) > 1 and max(values) < threshold.floor:
            floor = f"the floor {threshold.floor:g} {results[0].unit} ({threshold.kind})"
            suffix = "" if len(by_floor) == 1 else f" of {threshold.system}"
            title = (
                f"{results[0].what} of all {len(values)} ranks{suffix} is below {floor}; "
                f"the fastest reaches {max(values):.4g}."
            )
            code = "peer-copy-slow" if check == "peer-copy" else "below-floor"
            findings.append(finding(check, code, "FAIL", title))
            common.append(threshold)
    return common


def _by_gpu(context: JudgingContext, results: list[Local]) -> dict[str, float]:
    """Return each GPU's figure by its name in the history; for copies, the slowest peer's."""
    names = {fact.rank: _gpu(context, fact) for fact in context.facts}
    figures: dict[str, float] = {}
    for local in results:
        if local.rank in names:
            name, value = names[local.rank], float(local.value or 0)
            figures[name] = min(value, figures.get(name, value))
    return figures


def _gpu(context: JudgingContext, fact: Facts) -> str:
    """Name a GPU in the history; a replacement GPU starts a new history."""
    uuids = fact.gpu_uuids[fact.local_rank :][:1]
    return f"{context.name(fact.node)} {uuids[0][:_UUID_LETTERS] if uuids else f'GPU{fact.local_rank}'}"


def _below_own_past(
    context: JudgingContext, check: str, results: list[Local], findings: list[Finding]
) -> bool:
    """Report GPUs slower than their own history in ``findings``; return whether there are any."""
    kind, unit = results[0].what, results[0].unit
    figures = _by_gpu(context, results)
    worse = context.worse_parts(kind, None, figures)
    holders = {_gpu(context, fact): fact for fact in context.facts} if worse else {}
    for name, past in worse.items():
        fact = holders[name]
        title = f"{kind} of rank {fact.rank} ({name}): {figures[name]:.4g} {unit}, "
        title += f"{-past.change:.0%} worse than in earlier runs, {past.median:.4g}."
        level: Gravity = "FAIL" if past.verdict == "FAIL" else "WARN"
        nodes = [context.name(fact.node)]
        findings.append(finding(check, "below-history", level, title, nodes=nodes, ranks=[fact.rank]))
    return bool(worse)


def _uneven(context: JudgingContext, check: str, results: list[Local]) -> list[Finding]:
    """Report GPUs of one model and machine type that differ too much without any outlier."""
    types = {fact.rank: (peers_of(fact)[0], fact.instance_type) for fact in context.facts}
    groups: dict[tuple[str | None, ...], list[Local]] = defaultdict(list)
    for local in results:
        groups[types.get(local.rank, (None, None))].append(local)
    findings = []
    for (model, _), ranks in groups.items():
        values = sorted(float(local.value or 0) for local in ranks)
        excluded = len(values) // EXTREMES
        low, high = values[excluded], values[-1 - excluded]
        if high <= UNEVEN * low:
            continue
        slow = [local.rank for local in ranks if float(local.value or 0) * UNEVEN < high]
        title = f"{results[0].what} of {len(ranks)} ranks ({model}) is uneven: from {low:.4g} to {high:.4g} "
        title += f"{results[0].unit}; {len(slow)} of them may be slow."
        suspects = dict.fromkeys(context.name_of_rank(rank) for rank in slow)
        findings.append(finding(check, "uneven", "WARN", title, suspects=suspects, ranks=slow))
    return findings


def _slowest_over_time(
    context: JudgingContext, check: str, results: list[Local], findings: list[Finding], *, blamed: bool
) -> list[Figure]:
    """Compare the slowest rank with its history; adds a finding only if no rank was reported yet."""
    kind, unit = results[0].what, results[0].unit
    slowest = min(results, key=lambda local: float(local.value or 0))
    minimum = float(slowest.value or 0)
    past = compare_with_history(context.past(kind, None, minimum) if context.cuda else None)
    if past.level is None:
        return []
    if past.level != "PASS" and not blamed:
        title = f"The slowest {kind}, {minimum:.4g} {unit}, is {past.deficit}."
        name = context.name_of_rank(slowest.rank)
        findings.append(finding(check, past.code, past.level, title, suspects=[name], ranks=[slowest.rank]))
    return [past.figure(f"{kind}, slowest", minimum, unit)]
