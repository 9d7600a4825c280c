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
    """Return memory over time, from the first of these sources that has samples.

    1. Each GPU by NVML, minus its use before the step.
    2. Each rank's memory reserved by torch.
    3. Each rank's resident memory; without a plan, also the resident memory of all processes of the step.
    """
    if state.gpu_samples:
        baseline = [gpu.used_bytes for gpu in state.gpu_samples[0].gpus]
        samples = [
            (
                sample.at,
                [max(gpu.used_bytes - used, 0) for gpu, used in zip(sample.gpus, baseline, strict=False)],
            )
            for sample in state.gpu_samples
        ]
        if len(baseline) > MAX_LINES:
            label = f"maximum of {len(baseline)} GPUs"
            return [_point(state, at, label, max(used)) for at, used in samples]
        return [_point(state, at, f"GPU {i}", value) for at, used in samples for i, value in enumerate(used)]
    events = state.run.memory
    reserved = [event for event in events if event.reserved_peak is not None]
    one_label = len({event.rank for event in reserved or events}) > MAX_LINES
    points = [
        _point(
            state,
            event.at,
            "a rank" if one_label else f"rank {event.rank}",
            event.rss if event.reserved_peak is None else event.reserved_peak,
        )
        for event in reserved or events
    ]
    if reserved or (points and state.plan is not None):
        return points  # the prediction is of one process
    return points + [_point(state, s.at, "the step's processes", s.rss_bytes) for s in state.host_samples]


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
