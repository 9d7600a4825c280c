"""Memory on the card: each counter next to its prediction."""

from __future__ import annotations

from typing import Any

from decorators.card import charts
from decorators.card.blocks import UNKNOWN, size
from decorators.card.charts import MeasuredPart, MemoryPoint
from decorators.card.state import CardState
from decorators.profile.measured import Measured
from estimator.plan import RUNTIME, Counter, MemoryEstimate

MAX_LINES = 8  # lines per chart; of more ranks or GPUs only the maximum is drawn


def memory_rows(
    memory: MemoryEstimate | None, measured: Measured, *, on_gpu: bool
) -> list[tuple[str, str, str]]:
    """Return one row per memory counter: predicted and measured."""
    peak, ranks = measured.memory_peak, measured.ranks
    if not on_gpu:
        resident = peak.size_bytes if peak and peak.counter == "resident" else None
        rows = [("memory of a process", _counted(memory, "resident"), size(resident))]
    else:
        device = peak.size_bytes if peak and peak.counter == "device" else None
        reserved = max((rank.reserved_peak_bytes or 0 for rank in ranks), default=0)
        rows = [
            ("memory of a GPU, by NVML", _counted(memory, "device"), size(device)),
            ("reserved by torch", _counted(memory, "reserved"), size(reserved or None)),
        ]
    if memory is not None and on_gpu:
        allocated = max((rank.allocated_peak_bytes or 0 for rank in ranks), default=0)
        required = f"{size(memory.needs_bytes)}, at most {size(memory.needs_range[1])}"
        rows += [
            ("allocated by torch (tensors)", _counted(memory, "allocated"), size(allocated or None)),
            ("needed to run", required, ""),
        ]
    if measured.gpus:
        fullest = max(gpu.peak_used_bytes for gpu in measured.gpus)
        capacity = f"{size(memory.capacity_bytes)} capacity" if memory else UNKNOWN
        rows.append(("a GPU, including use before the step", capacity, size(fullest)))
    return rows


def memory_bars(state: CardState) -> dict[str, Any]:
    """Return the chart of predicted and measured memory."""
    on_gpu = state.plan.layout.device == "cuda" if state.plan else bool(state.measured.gpus)
    estimate, peak = state.plan.prediction.memory if state.plan else None, state.measured.memory_peak
    unit = "GPU" if on_gpu else "process"
    if peak is not None and peak.counter == "reserved":
        unit = "GPU, reserved by torch"
    predicted = estimate.counted(peak.counter if peak else "device") if estimate else None
    capacity = estimate.capacity_bytes if estimate else None
    return charts.memory_bars(predicted, measured_parts(state), unit, capacity)


def memory_over_time(state: CardState) -> dict[str, Any] | None:
    """Return the chart of memory over time with the predicted range; None without samples."""
    points = memory_points(state)
    if not points:
        return None
    estimate = state.plan.prediction.memory if state.plan else None
    predicted = estimate.counted(_counter_over_time(state)) if estimate else None
    return charts.memory_over_time(points, predicted, estimate.capacity_bytes if estimate else None)


def measured_parts(state: CardState) -> list[MeasuredPart]:
    """Return the measured parts: on GPUs of the fullest rank (torch, the rest), on a CPU resident memory."""
    ranks, peak = state.measured.ranks, state.measured.memory_peak
    on_gpu = [r for r in ranks if r.reserved_peak_bytes is not None]
    if on_gpu:
        fullest = max(on_gpu, key=lambda rank: rank.reserved_peak_bytes or 0)
        allocated, reserved = fullest.allocated_peak_bytes or 0, fullest.reserved_peak_bytes or 0
        parts = [
            MeasuredPart(name="allocated", size_bytes=allocated),
            MeasuredPart(name="reserved, not allocated", size_bytes=max(reserved - allocated, 0)),
        ]
        if peak is not None and peak.counter == "device":
            parts.append(MeasuredPart(name=RUNTIME, size_bytes=peak.size_bytes - reserved))
        return parts
    resident = [r.rss_peak_bytes for r in ranks if r.rss_peak_bytes is not None]
    if resident:
        return [MeasuredPart(name="resident", size_bytes=max(resident))]
    if state.plan is None and state.measured.host_rss_peak_bytes:
        return [MeasuredPart(name="resident", size_bytes=state.measured.host_rss_peak_bytes)]
    return []


def memory_points(state: CardState) -> list[MemoryPoint]:
    """Return memory over time: of each GPU by NVML minus what was in use before the step; else of each
    rank by torch or resident; of the step's processes without a plan or ranks.
    """
    if state.gpu_samples:
        used_at_start = [gpu.used_bytes for gpu in state.gpu_samples[0].gpus]
        count_of = len(used_at_start)
        per_time = [
            (s.at, [max(g.used_bytes - b, 0) for g, b in zip(s.gpus, used_at_start, strict=False)])
            for s in state.gpu_samples
        ]
        if count_of > MAX_LINES:
            return [_point(state, at, f"maximum of {count_of} GPUs", max(used)) for at, used in per_time]
        return [_point(state, at, f"GPU {i}", value) for at, used in per_time for i, value in enumerate(used)]
    reserved = [(m, m.reserved_peak) for m in state.run.memory if m.reserved_peak is not None]
    if reserved:
        several = len({m.rank for m, _ in reserved}) > MAX_LINES
        return [_point(state, m.at, "a rank" if several else f"rank {m.rank}", used) for m, used in reserved]
    several = len({memory.rank for memory in state.run.memory}) > MAX_LINES
    ranks = [_point(state, m.at, "a rank" if several else f"rank {m.rank}", m.rss) for m in state.run.memory]
    if ranks and state.plan is not None:
        return ranks  # the prediction is of one process
    return ranks + [_point(state, s.at, "the step's processes", s.rss_bytes) for s in state.host_samples]


def _counter_over_time(state: CardState) -> Counter:
    """Return the counter of :func:`memory_points`."""
    if state.gpu_samples:
        return "device"
    return "reserved" if any(m.reserved_peak is not None for m in state.run.memory) else "resident"


def _counted(memory: MemoryEstimate | None, counter: Counter) -> str:
    """Return the prediction for a counter."""
    predicted = memory.counted(counter) if memory else None
    if predicted is None:
        return UNKNOWN
    upper = predicted.upper_bytes
    return size(predicted.likely_bytes) + (f", at most {size(upper)}" if upper is not None else "")


def _point(state: CardState, at: float, source: str, used: int) -> MemoryPoint:
    return MemoryPoint(minutes=max(at - state.started, 0.0) / 60, source=source, used_bytes=used)
