"""Scores of the estimator against a table of published measurements.

An error is predicted / measured - 1. Memory is predicted for the counter that was measured (active, allocated
or reserved of torch.cuda, or nvidia-smi), throughput as tokens/s of one GPU.

Throughput depends on the network, which tables omit: a row whose notes state it ("interconnect 400Gbps") uses
that, any other row the usual server of its GPU in ``estimator/data/instances.csv`` (:func:`usual_network`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.published import rows
from benchmarks.published.rows import PublishedRow
from benchmarks.published.verdict import Judged, judge, verdict
from estimator import hardware, memory, throughput
from estimator.errors import UserError
from estimator.hardware import Gpu
from estimator.plan import GIB

ROUNDED = 0.005  # of a measurement: half of its third digit
UNDER = 0.03  # a prediction this much below the measurement counts as under
_RDMA = re.compile(r"EFA|IB|InfiniBand|RoCE|RDMA|TCPX", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """One row's measurement and prediction: GiB of one GPU, or tokens/s of one GPU."""

    row: PublishedRow
    measured: float
    predicted: float
    lower: float | None  # ends of the range of memory or speed; None if unknown
    upper: float | None
    basis: str

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted / self.measured - 1

    @property
    def covered(self) -> bool | None:
        """Whether the range holds the measurement, as tables round it; None without a range."""
        if self.lower is None or self.upper is None:
            return None
        rounding = ROUNDED * self.measured
        return self.lower - rounding <= self.measured <= self.upper + rounding


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Errors of a group of rows, as fractions; None without rows."""

    rows: int
    median_abs_error: float | None
    p95_abs_error: float | None  # linear between the two nearest rows
    bias: float | None  # median of the signed errors
    under_by_3pct: float | None  # share of rows predicted at more than 3 % below the measurement
    covered: float | None  # share of rows whose range holds the measurement
    sources: int
    sources_covered: float | None  # mean over sources of that share within each source


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A table of measurements, scored."""

    rows: tuple[PublishedRow, ...]
    judged: tuple[Judged, ...]
    memory: tuple[Scored, ...]
    throughput: tuple[Scored, ...]
    verdict_skipped: Mapping[str, str]  # reason by id: rows without a verdict on whether they fit
    memory_skipped: Mapping[str, str]  # reason by id: rows with a peak that isn't scored
    throughput_skipped: Mapping[str, str]

    @property
    def skipped(self) -> dict[str, str]:
        """Reason by id for rows without any score."""
        return {row.id: _why(self, row) for row in self.rows if row.id not in self.scored}

    @property
    def scored(self) -> set[str]:
        """Ids of rows whose memory, speed or verdict is scored."""
        judged = {item.row.id for item in self.judged}
        return judged | {item.row.id for item in (*self.memory, *self.throughput)}


# Name of each grouping -> group of a row.
GROUPS: dict[str, Callable[[PublishedRow], str]] = {
    "source": lambda row: row.source,
    "framework": lambda row: row.framework,
    "method": lambda row: row.method,
    "quality": lambda row: row.quality,
    "kind": lambda row: row.kind or "",
    "quality_kind": lambda row: f"{row.quality} {row.kind or ''}".strip(),
    "lengths_kind": lambda row: f"{'varying' if row.varies else 'fixed'} {row.kind or ''}".strip(),
}
SPEED_GROUPS = {name: by for name, by in GROUPS.items() if "kind" not in name}


def compare(path: str | Path) -> Comparison:
    """Score every row of the table at ``path`` that can be predicted; raises UserError for a bad table."""
    return compare_rows(rows.read(path))


def compare_rows(table: Iterable[PublishedRow]) -> Comparison:
    """Score every row that can be predicted; keep a reason for each other row."""
    table = tuple(table)
    peaks: list[Scored] = []
    speeds: list[Scored] = []
    judged: list[Judged] = []
    no_peak: dict[str, str] = {}
    no_speed: dict[str, str] = {}
    no_verdict: dict[str, str] = {}
    for row in table:
        judgement = judge(row)
        if isinstance(judgement, Judged):
            judged.append(judgement)
        else:
            no_verdict[row.id] = judgement
        peak = _memory(row)
        if isinstance(peak, Scored):
            peaks.append(peak)
        elif row.gib is not None:
            no_peak[row.id] = peak
        speed = _throughput(row)
        if isinstance(speed, Scored):
            speeds.append(speed)
        elif row.tps_per_gpu:
            no_speed[row.id] = speed
    return Comparison(
        rows=table,
        judged=tuple(judged),
        memory=tuple(peaks),
        throughput=tuple(speeds),
        verdict_skipped=no_verdict,
        memory_skipped=no_peak,
        throughput_skipped=no_speed,
    )


def _memory(row: PublishedRow) -> Scored | str:
    """Score the memory of one row, or return the reason why it isn't scored."""
    if row.memory_skip or row.setup is None or row.kind is None or row.gib is None:
        return row.memory_skip or "no memory was measured"
    try:
        estimate = memory.range_of(row.setup, row.kind, capacity_bytes=row.capacity_bytes)
    except UserError as error:
        return error.problem
    return Scored(
        row=row,
        measured=row.gib,
        predicted=estimate.likely_bytes / GIB,
        lower=estimate.lower_bytes / GIB,
        upper=estimate.upper_bytes / GIB,
        basis=estimate.basis,
    )


def _throughput(row: PublishedRow) -> Scored | str:
    if row.throughput_skip or row.setup is None or row.gpu is None or not row.tps_per_gpu:
        return row.throughput_skip or "no throughput was measured"
    gbps, rdma = usual_network(row.gpu, row.setup.processes_per_node)
    if row.network_gbps is not None:
        gbps, rdma = row.network_gbps, True
    try:
        speed = throughput.speed(row.setup, row.gpu, network_gbps=gbps, rdma=rdma)
    except UserError as error:
        return error.problem
    if speed.tokens_per_second is None:
        return speed.basis
    per_gpu = speed.tokens_per_second / row.setup.world_size
    span = speed.tokens_per_second_range
    return Scored(
        row=row,
        measured=row.tps_per_gpu,
        predicted=per_gpu,
        lower=span[0] / row.setup.world_size if span else None,
        upper=span[1] / row.setup.world_size if span else None,
        basis=speed.basis,
    )


@lru_cache
def usual_network(gpu: Gpu, processes_per_node: int) -> tuple[float | None, bool]:
    """Return Gbit/s out of a node with that GPU, and whether the network has RDMA.

    The values are those of the cloud machine with the GPU that has the fastest network, or of a machine with
    the same architecture if none has the GPU (GB200). The bandwidth is scaled if an NVLink domain has more
    GPUs than that machine (NVL72).
    """
    connected = [item for item in hardware.instances() if item.network_gbps and item.gpu_count]
    machines = [item for item in connected if item.gpu == gpu.name]
    if not machines and gpu.architecture is not None and "NVLink" in gpu.interconnect:
        architectures = {other.name: other.architecture for other in hardware.gpus()}
        machines = [item for item in connected if architectures.get(item.gpu) == gpu.architecture]
    if not machines:
        return None, False
    best = max(machines, key=lambda item: (item.network_gbps or 0, item.gpu_count))
    scale = max(processes_per_node / best.gpu_count, 1)
    return (best.network_gbps or 0) * scale, bool(_RDMA.search(best.fabric))


# ---------------------------------------------------------------------------------------------------------
# Scores of groups


def score(items: Iterable[Scored]) -> Score:
    """Summarize the errors of a group of rows."""
    items = tuple(items)
    errors = [item.error for item in items]
    bounds = [item.covered for item in items if item.covered is not None]
    sizes = sorted(map(abs, errors))
    return Score(
        rows=len(items),
        median_abs_error=percentile(sizes, 0.5),
        p95_abs_error=percentile(sizes, 0.95),
        bias=percentile(sorted(errors), 0.5),
        under_by_3pct=_share([error < -UNDER for error in errors]),
        covered=_share(bounds),
        sources=len({item.row.source for item in items}),
        sources_covered=_sources_covered(items),
    )


def _sources_covered(items: tuple[Scored, ...]) -> float | None:
    by_source: dict[str, list[bool]] = {}
    for item in items:
        if item.covered is not None:
            by_source.setdefault(item.row.source, []).append(item.covered)
    shares = [sum(flags) / len(flags) for flags in by_source.values()]
    return sum(shares) / len(shares) if shares else None


def grouped(items: Iterable[Scored], by: Callable[[PublishedRow], str]) -> dict[str, Score]:
    """Score each group of rows, largest group first; ``by`` returns a row's group."""
    groups: dict[str, list[Scored]] = {}
    for item in items:
        groups.setdefault(by(item.row), []).append(item)
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
    return {name: score(group) for name, group in ordered}


def percentile(ordered: list[float], share: float) -> float | None:
    """Return the quantile ``share`` of ordered values, linear between neighbors; None without values."""
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _share(flags: list[bool]) -> float | None:
    return sum(flags) / len(flags) if flags else None


def _why(comparison: Comparison, row: PublishedRow) -> str:
    """Join the distinct reasons why a row has no score."""
    skips = (comparison.memory_skipped, comparison.throughput_skipped, comparison.verdict_skipped)
    reasons = [skipped.get(row.id) for skipped in skips]
    distinct = list(dict.fromkeys(reason for reason in reasons if reason))
    return "; ".join(distinct) or "neither memory nor throughput was measured"


def as_json(comparison: Comparison, *, each_row: bool = False) -> dict[str, Any]:
    """Return the output of ``compare --json``."""
    result: dict[str, Any] = {
        "verdict": asdict(verdict(comparison.judged))
        | {
            "wrong": [item.row.id for item in comparison.judged if item.wrong],
            "skipped": dict(comparison.verdict_skipped),
        },
        "rows": len(comparison.rows),
        "rows_scored": len(comparison.scored),
        "rows_skipped": comparison.skipped,
        "memory": _block(comparison.memory, comparison.memory_skipped, GROUPS),
        "throughput": _block(comparison.throughput, comparison.throughput_skipped, SPEED_GROUPS),
    }
    if each_row:
        result["each_row"] = [
            *_lines("memory", comparison.memory),
            *_lines("throughput", comparison.throughput),
        ]
    return result


def _block(
    items: tuple[Scored, ...],
    skipped: Mapping[str, str],
    groupings: Mapping[str, Callable[[PublishedRow], str]],
) -> dict[str, Any]:
    groups = {
        name: {key: asdict(value) for key, value in grouped(items, by).items()}
        for name, by in groupings.items()
    }
    return {"all": asdict(score(items)), **groups, "skipped": dict(skipped)}


def _lines(what: str, items: Iterable[Scored]) -> list[dict[str, Any]]:
    return [line(what, item) for item in items]


def line(what: str, item: Scored) -> dict[str, Any]:
    """Return one scored row as a flat record: GiB for memory, tokens/s of one GPU for throughput."""
    return {
        "id": item.row.id,
        "what": what,
        "source": item.row.source,
        "framework": item.row.framework,
        "method": item.row.method,
        "quality": item.row.quality,
        "kind": item.row.kind if what == "memory" else None,
        "measured": round(item.measured, 4),
        "predicted": round(item.predicted, 4),
        "lower": None if item.lower is None else round(item.lower, 4),
        "upper": None if item.upper is None else round(item.upper, 4),
        "error": round(item.error, 5),
        "basis": item.basis,
        "alias": item.row.alias,
    }
