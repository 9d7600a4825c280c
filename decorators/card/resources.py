"""Resources on the card: requested next to used and to the next request, utilization over time, idle GPUs."""

from __future__ import annotations

from typing import Any

from decorators.card import charts
from decorators.card.blocks import UNKNOWN, size
from decorators.card.charts import TimePoint
from decorators.card.memory import MAX_LINES
from decorators.card.state import CardState
from estimator.formatting import MIB
from estimator.rightsizing.usage import Sizes

IDLE_SHARE = 0.3  # of the time without a kernel, from which a GPU is named
LOADING_SHARE = 0.1  # of a step, from which loading data is named as the cause
SHORTEST_S = 30.0  # a younger step may still be starting


def resource_rows(state: CardState) -> list[tuple[str, str, str, str]]:
    """Return rows of (resource, requested, used, next request) of one node; none if nothing was requested."""
    requested, found, measured = state.requested or Sizes(), state.next_request, state.measured
    following = found.sizes if found is not None else Sizes()
    if requested == Sizes() and found is None:
        return []
    used_gpus = [gpu for gpu in measured.gpu_usage if gpu.in_use]
    rows = [
        ("CPU cores", _number(requested.cpu), _number(measured.busy_cpu_cores), _number(following.cpu)),
        (
            "host memory",
            _memory(requested.memory_mib),
            size(measured.host_peak_bytes),
            _memory(following.memory_mib),
        ),
    ]
    if measured.gpus or requested.gpus:
        rows.append(("GPUs", _gpus(requested), str(len(used_gpus)), _gpus(following)))
        peak = max((gpu.peak_bytes for gpu in used_gpus), default=None)
        capacity = min((gpu.total_bytes for gpu in measured.gpus), default=None)
        needed = size(found.gpu_memory_bytes) if found is not None else UNKNOWN
        rows.append(("memory of a GPU", size(capacity), size(peak), needed))
    return [row for row in rows if set(row[1:]) != {UNKNOWN}]


def idle_lines(state: CardState) -> list[str]:
    """Return one line per group of equally idle GPUs, with the time that loading data took if it is known."""
    measured, waits = state.measured, state.run.data_waits
    if measured.duration_seconds < SHORTEST_S:
        return []
    same: dict[str, list[int]] = {}
    for number, (gpu, usage) in enumerate(zip(measured.gpus, measured.gpu_usage, strict=True)):
        if not usage.in_use:
            same.setdefault("not used. Request fewer GPUs", []).append(gpu.index)
        elif usage.utilization is not None and 1 - usage.utilization >= IDLE_SHARE:
            text = f"idle {1 - usage.utilization:.0%} of the time"
            # Ranks of a node are its GPUs in order; with another number of ranks the slowest one counts
            ranks = sorted(waits)
            one_each = len(ranks) == len(measured.gpus)
            wait = waits[ranks[number]] if one_each else max(waits.values(), default=None)
            if wait is not None and wait[0] >= LOADING_SHARE * wait[1]:
                text += f": data loading takes {wait[0]:.2g} s of a {wait[1]:.2g} s step"
            same.setdefault(text, []).append(gpu.index)
    return [
        f"GPU{'s' if len(gpus) > 1 else ''} {', '.join(map(str, gpus))} {text}."
        for text, gpus in list(same.items())[:MAX_LINES]
    ]


def utilization_over_time(state: CardState) -> dict[str, Any] | None:
    """Return the chart of the GPUs' utilization, else of the cores in use; None without samples."""
    points = [
        _point(state, sample.at, f"GPU {index}", gpu.utilization)
        for sample in state.gpu_samples
        for index, gpu in enumerate(sample.gpus)
        if gpu.utilization is not None
    ]
    if points and len({point.source for point in points}) > MAX_LINES:
        points = [
            _point(state, sample.at, f"mean of {len(known)} GPUs", sum(known) / len(known))
            for sample in state.gpu_samples
            if (known := [gpu.utilization for gpu in sample.gpus if gpu.utilization is not None])
        ]
    if points:
        return charts.over_time(points, "GPU utilization over time", number_format="%")
    cores = [
        _point(state, sample.at, "the step's processes", sample.cpu_cores)
        for sample in state.host_samples
        if sample.cpu_cores is not None
    ]
    return charts.over_time(cores, "CPU cores in use over time") if cores else None


def _point(state: CardState, at: float, source: str, value: float) -> TimePoint:
    return TimePoint(minutes=max(at - state.started, 0.0) / 60, source=source, value=value)


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3g}"


def _memory(mib: int | None) -> str:
    return size(None if mib is None else mib * MIB)


def _gpus(sizes: Sizes) -> str:
    if sizes.gpus is None:
        return UNKNOWN
    name = (sizes.gpu_type or "").removeprefix("NVIDIA ")
    return f"{sizes.gpus} x {name}" if sizes.gpus and name else str(sizes.gpus)
