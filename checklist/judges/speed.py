"""Whether figures are as they should be: an absolute floor first, then the peers, then their own past."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from checklist.analysis.baseline import Past
from checklist.checks import LOCALS
from checklist.judges.advice import finding
from checklist.judges.context import Judgement, JudgingContext, Records, answer, no_verdict, skipped
from checklist.judges.thresholds import Threshold
from checklist.measurements import NO_FOLDER, Local
from checklist.result import Figure, Finding

PEERS = 4  # fewer values have no outlier
OUTLIER = (
    -3.5
)  # modified z-score (Iglewicz and Hoaglin); alone it flags 8 to 12 % of healthy fleets of 4 to 8
_Z_OF_MAD = 0.6745
PEERS_WARN, PEERS_FAIL = 0.95, 0.90  # of the median, as with history
Level = Literal["PASS", "WARN", "FAIL"]
Basis = Literal["floor", "peers", "history", "none"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A figure held against what it should be."""

    level: Level | None = None
    """None: there was nothing to compare it against."""
    expected: float | None = None
    basis: Basis = "none"
    source: str | None = None
    words: str = ""
    """What is wrong, to follow the figure in a sentence."""

    @property
    def code(self) -> str:
        """The code of the advice for such a figure (checklist/data/advice.yaml)."""
        return {"floor": "below-floor", "peers": "straggler"}.get(self.basis, "below-history")

    def figure(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        size_bytes: int | None = None,
        node: str | None = None,
        rank: int | None = None,
    ) -> Figure:
        return Figure(
            name=name,
            value=value,
            unit=unit,
            verdict=self.level or "NO-VERDICT",
            bytes=size_bytes,
            node=node,
            rank=rank,
            expected=self.expected,
            basis=self.basis,
            source=self.source,
        )


def compare(
    value: float,
    threshold: Threshold | None = None,
    beside: tuple[Level, float] | None = None,
    past: Past | None = None,
) -> Comparison:
    """The first of floor, peers (verdict and median) and past that finds fault, else the first there is."""
    comparisons = [
        each
        for each in (
            _compare_with_floor(value, threshold),
            _compare_with_peers(value, beside),
            compare_with_history(past),
        )
        if each.level is not None
    ]
    at_fault = (each for each in comparisons if each.level != "PASS")
    return next(at_fault, comparisons[0] if comparisons else Comparison())


def _compare_with_floor(value: float, threshold: Threshold | None) -> Comparison:
    if threshold is None:
        return Comparison()
    level: Level = "PASS"
    words = ""
    if value < threshold.floor:
        level, words = "FAIL", f"below the floor {threshold.floor:g} ({threshold.kind})"
    elif threshold.warn is not None and value < threshold.warn:
        level, words = "WARN", f"below what is usual, {threshold.warn:g}"
    return Comparison(level, threshold.floor, "floor", threshold.origin, words)


def _compare_with_peers(value: float, beside: tuple[Level, float] | None) -> Comparison:
    if beside is None:
        return Comparison()
    level, median = beside
    return Comparison(
        level, median, "peers", None, f"{1 - value / median:.0%} below its peers" if median else ""
    )


def compare_with_history(past: Past | None) -> Comparison:
    """A figure held against its own past alone."""
    if past is None:
        return Comparison()
    words = f"{-past.change:.0%} worse than its past, {past.median:.4g}"
    return Comparison(past.verdict, past.median, "history", None, words)


def peers(values: Sequence[float]) -> list[Literal["PASS", "WARN", "FAIL"]] | None:
    """Each value beside the others; more is better. None: too few to say anything.

    An outlier by the median absolute deviation that is also more than 5 % below the median; more than 10 %
    fails.
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


def gemm(context: JudgingContext) -> Judgement:
    """FAIL for a GPU whose matrix products are below the floor, its peers or the past; WARN for near it.

    If all GPUs are below the floor, that is no single node's fault.

    Limits: the rows ``gemm_bf16``, ``gemm_fp8`` and ``gemm_fp32`` of thresholds.csv (TFLOPS); beside at least
    ``PEERS`` others an ``OUTLIER`` below ``PEERS_WARN`` or ``PEERS_FAIL`` of their median; for the slowest
    ``WARN_SHARE`` and ``FAIL_SHARE`` of checklist/analysis/baseline.py.

    Can't tell: why. On CPUs it depends on what else runs: NO-VERDICT.
    """
    return _judge_node(context, "gemm")


def hbm(context: JudgingContext) -> Judgement:
    """FAIL for a GPU whose memory copies are below the floor, its peers or the past; WARN for near it.

    On CPUs host memory is measured instead (``memory_copy``), and not judged.

    Limits: the row ``hbm_copy`` of thresholds.csv (GB/s, read plus write); beside ``PEERS`` or more an
    ``OUTLIER`` below ``PEERS_WARN`` or ``PEERS_FAIL`` of their median; for the slowest ``WARN_SHARE`` and
    ``FAIL_SHARE`` of checklist/analysis/baseline.py.

    Can't tell: memory errors; check gpu-health asks the GPU for those.
    """
    return _judge_node(context, "hbm")


def host_copy(context: JudgingContext) -> Judgement:
    """FAIL for a GPU whose copies to or from pinned host memory are too slow; WARN for near it.

    Limits: the rows ``h2d`` and ``d2h`` of thresholds.csv (GB/s); beside at least ``PEERS`` others an
    ``OUTLIER`` below ``PEERS_WARN`` or ``PEERS_FAIL`` of their median; for the slowest ``WARN_SHARE`` and
    ``FAIL_SHARE`` of checklist/analysis/baseline.py.

    Can't tell: a narrow PCIe link from host memory that is far away (NUMA); check gpu-health counts lanes.
    """
    return _judge_node(context, "host-copy")


def peer_copy(context: JudgingContext) -> Judgement:
    """FAIL for a GPU whose copies to another of its node are too slow; WARN for near it.

    Limits: the row ``peer_copy`` of thresholds.csv (GB/s); beside at least ``PEERS`` others an ``OUTLIER``
    below ``PEERS_WARN`` or ``PEERS_FAIL`` of their median; for the slowest ``WARN_SHARE`` and ``FAIL_SHARE``
    of checklist/analysis/baseline.py.

    Can't tell: which of the two GPUs is slow; NVLink from PCIe where no row knows the GPU.
    """
    return _judge_node(context, "peer-copy")


def storage(context: JudgingContext) -> Judgement:
    """FAIL where the work directory can't be written and read; that it can is a PASS, however fast.

    Limits: rows ``storage_write`` and ``storage_read`` that a user adds to thresholds.csv (GB/s); the shipped
    table has none, as no source gives one. For the slowest ``WARN_SHARE`` and ``FAIL_SHARE`` of
    checklist/analysis/baseline.py. Ranks are not compared with each other (``PEERS``, ``OUTLIER``,
    ``PEERS_WARN``, ``PEERS_FAIL``): a file system is shared.

    Can't tell: whose fault a failure is, so nodes are suspected only.
    """
    return _judge_node(context, "storage")


def datastore(context: JudgingContext) -> Judgement:
    """FAIL where the datastore can't be written and read; that it can is a PASS, however fast.

    Limits: rows ``datastore_write`` and ``datastore_read`` that a user adds to thresholds.csv (GB/s); the
    shipped table has none, as no source gives one. For the slowest ``WARN_SHARE`` and ``FAIL_SHARE`` of
    checklist/analysis/baseline.py. Ranks are not compared with each other (``PEERS``, ``OUTLIER``,
    ``PEERS_WARN``, ``PEERS_FAIL``): a store is shared.

    Can't tell: anything without a datastore to measure (NO-VERDICT); whose fault a failure is.
    """
    return _judge_node(context, "datastore")


def _judge_node(context: JudgingContext, check: str) -> Judgement:
    """One of the checks of single nodes: every figure of it, of every rank."""
    kinds = [kind for kind in LOCALS.values() if kind.check == check]
    locals_ = [local for local in context.measurements.locals if local.what in {kind.name for kind in kinds}]
    if not locals_:
        why = _does_not_apply(context, check)
        if check == "datastore" and context.ran("node"):
            return no_verdict(check, "Not measured: no folder or S3 was given as the datastore.")
        return skipped(check, why) if why else context.unmeasured(check, "node")
    stores = check in ("storage", "datastore")
    findings = _failed(context, check, [local for local in locals_ if local.value is None], stores=stores)
    figures: list[Figure] = []
    records: Records = []
    for kind in kinds:
        same = [local for local in locals_ if local.what == kind.name and local.value is not None]
        if same:
            figures += _judge_locals(context, check, same, findings)
            # The slowest: what a job over all of them feels, and what a single bad one moves
            records.append((kind.name, None, min(float(local.value or 0) for local in same), kind.unit))
    nodes = context.names(
        node for local in locals_ if (node := context.measurements.node_of(local.rank)) is not None
    )
    # That storage could be written and read is an answer by itself, however fast it was
    if findings or stores or any(figure.basis != "none" for figure in figures):
        names = ", ".join(dict.fromkeys(figure.name for figure in figures if "," not in figure.name))
        good = f"{names}: {'done without error' if stores else 'as expected'}."
        good += "".join(
            f" Note: {note}." for note in dict.fromkeys(local.note for local in locals_ if local.note)
        )
        return answer(check, good, findings, nodes=nodes, figures=figures, records=records)
    why = (
        "on CPUs it depends on what else runs"
        if not context.cuda
        else "no threshold, fewer than 4 peers, no history"
    )
    return no_verdict(
        check,
        f"Measured, with nothing to compare with: {why}.",
        measured=True,
        nodes=nodes,
        figures=figures,
        records=records,
    )


def _failed(context: JudgingContext, check: str, failed: list[Local], *, stores: bool) -> list[Finding]:
    """What could not be measured. ``stores`` are shared: their failure may be nobody's own."""
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
        code, blamed, suspects = ("storage-failed", [], [name]) if stores else ("local-failed", [name], [])
        findings.append(
            finding(check, code, "FAIL", title, nodes=blamed, suspects=suspects, ranks=[local.rank])
        )
    for folder, without in missing.items():
        names = list(dict.fromkeys(context.name_of_rank(local.rank) for local in without))
        title = f"The folder {folder} ({check}) is not there on {', '.join(names)}."
        ranks = [local.rank for local in without]
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
    context: JudgingContext, check: str, same: list[Local], findings: list[Finding]
) -> list[Figure]:
    """One kind of figure over all ranks, and its slowest over time. Findings are added to ``found``."""
    values = [float(local.value or 0) for local in same]
    what, unit = same[0].what, same[0].unit
    threshold = context.threshold(what, None)
    # A file system is shared, so that one rank's speed says little of its node
    beside = peers(values) if context.cuda and check not in ("storage", "datastore") else None
    median = statistics.median(values)
    figures = []
    # If all are too slow, that is no single node's fault
    common = threshold is not None and len(values) > 1 and max(values) < threshold.floor
    if common and threshold is not None:
        floor = f"the floor {threshold.floor:g} {unit} ({threshold.kind})"
        title = f"{what} of all {len(same)} ranks is below {floor}; the fastest reaches {max(values):.4g}."
        code = "peer-copy-slow" if check == "peer-copy" else "below-floor"
        findings.append(finding(check, code, "FAIL", title))
    for index, local in enumerate(same):
        value, name = values[index], context.name_of_rank(local.rank)
        comparison = compare(value, threshold, None if beside is None else (beside[index], median))
        figures.append(comparison.figure(what, value, unit, node=name, rank=local.rank))
        if comparison.level in ("WARN", "FAIL") and not common:
            peer = "" if local.peer is None else f" to rank {local.peer}"
            title = f"{what} of rank {local.rank}{peer} ({name}): {value:.4g} {unit}, {comparison.words}."
            code = "peer-copy-slow" if check == "peer-copy" else comparison.code
            findings.append(finding(check, code, comparison.level, title, nodes=[name], ranks=[local.rank]))
    least = min(values)
    past = compare_with_history(context.past(what, None, least) if context.cuda else None)
    if past.level is not None:
        figures.append(past.figure(f"{what}, slowest", least, unit))
        blamed = any(figure.verdict in ("WARN", "FAIL") for figure in figures[:-1])
        if past.level != "PASS" and not blamed:
            rank = same[values.index(least)].rank
            title = f"The slowest {what}, {least:.4g} {unit}, is {past.words}."
            name = context.name_of_rank(rank)
            findings.append(finding(check, past.code, past.level, title, suspects=[name], ranks=[rank]))
    return figures
