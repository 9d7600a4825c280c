"""Recommendation: the next request of a step from the usage of its earlier tasks.

- Memory, CPU and GPU memory: a high quantile of the successful tasks, and headroom that shrinks as tasks
  accumulate.
- Never below the peak of a task that ran out of memory. Until a later task succeeds, 1.5 times the memory
  that the failed task requested.
- Only from tasks with the same parameters, unless the memory of the step did not depend on them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from estimator.formatting import MIB
from estimator.rightsizing.usage import Sizes, Usage

QUANTILE = 0.95
HEADROOM = 0.2  # above the quantile, with many tasks
UNCERTAINTY = 0.3  # more, divided by the number of tasks
CPU_HEADROOM = 0.2
STEP_UP = 1.5  # of the request of a task that ran out of memory
ENOUGH_TASKS = 3  # with the same parameters; with fewer, others may count, too
SIMILAR_RATIO = 1.2  # largest memory over smallest, below which parameters made no difference
# In the container next to the task's processes: Metaflow's shell, its log sidecars, page cache in use
OUTSIDE_TASK_MIB = 256
MEMORY_UNIT_MIB = 128
SATURATED = 0.95  # of the requested CPU: the task may have been held up


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """Next request of a step. ``sizes`` has None where nothing is known."""

    sizes: Sizes
    gpu_memory_bytes: int | None  # required memory of each GPU, including headroom
    gpu_utilization: float | None  # 0 to 1, the highest mean of a GPU in use
    tasks: int  # number of tasks that it is based on
    reason: str


def recommend(history: Sequence[Usage], parameters: Mapping[str, str] | None = None) -> Recommendation | None:
    """Return the next request of a step; None without a comparable task.

    ``parameters``: those of the next run, as :attr:`Usage.parameters`; None: any.
    """
    tasks = [usage for usage in comparable(history, parameters) if usage.memory_bytes]
    succeeded = [usage for usage in tasks if usage.ending == "succeeded"]
    out_of_memory = [usage for usage in tasks if usage.ending == "out of memory"]
    out_of_gpu_memory = [usage for usage in tasks if usage.ending == "out of GPU memory"]
    if not succeeded and not out_of_memory and not out_of_gpu_memory:
        return None
    memory = _memory_mib(succeeded, out_of_memory)
    gpus, utilization = _gpus(succeeded or tasks)
    newest = max(tasks, key=lambda usage: usage.at)
    sizes = Sizes(
        cpu=_cpu(succeeded or tasks),
        memory_mib=memory,
        gpus=gpus,
        gpu_type=next((gpu.name for gpu in newest.gpus), newest.requested.gpu_type) if gpus else None,
    )
    counted = f"{len(succeeded)} earlier task{'s' * (len(succeeded) != 1)}"
    reasons = [f"used in {counted}"] if succeeded else []
    if ended := [*out_of_memory, *out_of_gpu_memory]:
        last = max(ended, key=lambda usage: usage.at)
        reasons.append(f"task {last.run}/{last.step}/{last.task} ran {last.ending}")
    return Recommendation(
        sizes=sizes,
        gpu_memory_bytes=_gpu_memory_bytes(succeeded, out_of_gpu_memory),
        gpu_utilization=utilization,
        tasks=len(succeeded),
        reason="; ".join(reasons),
    )


def comparable(history: Sequence[Usage], parameters: Mapping[str, str] | None) -> list[Usage]:
    """Return the tasks whose parameters are those of the next run, or all if they made no difference."""
    if parameters is None:
        return list(history)
    same_parameters = [usage for usage in history if dict(usage.parameters) == dict(parameters)]
    peaks = [usage.memory_bytes for usage in history if usage.ending == "succeeded" and usage.memory_bytes]
    is_enough = sum(usage.ending == "succeeded" for usage in same_parameters) >= ENOUGH_TASKS
    if not is_enough and len(peaks) >= ENOUGH_TASKS and max(peaks) <= SIMILAR_RATIO * min(peaks):
        return list(history)
    return same_parameters


def quantile(values: Sequence[float]) -> float:
    """Return the quantile ``QUANTILE`` by linear interpolation; ``values`` must not be empty."""
    ordered = sorted(values)
    place = QUANTILE * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def with_headroom(values: Sequence[float]) -> float:
    """Return the quantile with headroom, never below the largest value."""
    factor = 1 + HEADROOM + UNCERTAINTY / len(values)
    return max(quantile(values) * factor, max(values))


def _memory_mib(succeeded: Sequence[Usage], out_of_memory: Sequence[Usage]) -> int | None:
    needs = []
    if succeeded:
        needs.append(with_headroom([usage.memory_bytes or 0 for usage in succeeded]) / MIB + OUTSIDE_TASK_MIB)
    for usage in out_of_memory:
        peak = (usage.memory_bytes or 0) / MIB
        needs.append(peak * (1 + HEADROOM) + OUTSIDE_TASK_MIB)
        if not any(later.at > usage.at for later in succeeded):
            needs.append(STEP_UP * max(usage.requested.memory_mib or 0, peak))
    if not needs:
        return None  # only GPU memory was short
    return math.ceil(max(needs) / MEMORY_UNIT_MIB) * MEMORY_UNIT_MIB


def _cpu(tasks: Sequence[Usage]) -> float | None:
    measured = [usage for usage in tasks if usage.cpu is not None]
    if not measured:
        return None
    needs = quantile([usage.cpu or 0.0 for usage in measured]) * (1 + CPU_HEADROOM)
    for usage in measured:
        requested = usage.requested.cpu
        if requested is not None and (usage.cpu or 0.0) >= SATURATED * requested:
            needs = max(needs, requested)
    return float(max(math.ceil(needs), 1))


def _gpus(tasks: Sequence[Usage]) -> tuple[int | None, float | None]:
    """Return the GPUs that were in use, and the highest mean utilization of one."""
    measured = [usage for usage in tasks if usage.gpus]
    if not measured:
        requested = [usage.requested.gpus for usage in tasks if usage.requested.gpus]
        return (max(requested) if requested else 0), None  # requested, and not measured: they stay
    busy = [[gpu for gpu in usage.gpus if gpu.in_use] for usage in measured]
    shares = [gpu.utilization for gpus in busy for gpu in gpus if gpu.utilization is not None]
    return max(len(gpus) for gpus in busy), max(shares, default=None)


def _gpu_memory_bytes(succeeded: Sequence[Usage], out_of_memory: Sequence[Usage]) -> int | None:
    peaks = [float(max(gpu.peak_bytes for gpu in usage.gpus)) for usage in succeeded if usage.gpus]
    needs = [with_headroom(peaks)] if peaks else []
    needs += [STEP_UP * max(gpu.total_bytes for gpu in usage.gpus) for usage in out_of_memory if usage.gpus]
    return int(max(needs)) if needs else None
