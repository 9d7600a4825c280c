"""Peak memory of a run's largest process, and the counter that measured it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from estimator.plan import Counter

NAMES: dict[Counter, str] = {
    "device": "peak memory of a GPU, by NVML",
    "reserved": "peak memory reserved by torch",
    "resident": "peak memory of a process",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPeak:
    """Peak memory, comparable only with a prediction for the same counter (``MemoryEstimate.counted``)."""

    size_bytes: int
    counter: Counter

    @property
    def name(self) -> str:
        """Label of the counter."""
        return NAMES[self.counter]


def largest_process(
    reserved: Iterable[int | None], resident: Iterable[int | None], device_bytes: int = 0
) -> MemoryPeak | None:
    """Return the peak of the largest training process; None if no process has reported memory.

    Parameters
    ----------
    reserved, resident:
        Peak memory of each process: reserved by torch (None on a CPU), and resident.
    device_bytes:
        Peak of the fullest GPU by NVML, minus memory in use before the run; 0: not measured. If it is below
        torch's reserved memory, NVML sampled another GPU or too rarely, and torch's peak is used.
    """
    largest_reserved = max((size for size in reserved if size), default=None)
    if largest_reserved is None:
        largest_resident = max((size for size in resident if size), default=None)
        return (
            None if largest_resident is None else MemoryPeak(size_bytes=largest_resident, counter="resident")
        )
    if device_bytes >= largest_reserved:
        return MemoryPeak(size_bytes=device_bytes, counter="device")
    return MemoryPeak(size_bytes=largest_reserved, counter="reserved")
