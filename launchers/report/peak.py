"""The peak memory of a run's largest process, and what was predicted for the counter that it is from."""

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
    """A figure that stands beside a prediction for the same counter alone (``MemoryEstimate.counted``)."""

    size_bytes: int
    counter: Counter

    @property
    def name(self) -> str:
        """What it is, in words."""
        return NAMES[self.counter]


def largest_process(
    reserved: Iterable[int | None], resident: Iterable[int | None], device_bytes: int = 0
) -> MemoryPeak | None:
    """The largest of some training processes; None where none has reported any memory.

    Parameters
    ----------
    reserved, resident:
        Torch's peak and the kernel's of each; torch's are None on a CPU.
    device_bytes:
        What NVML saw of the fullest GPU beyond what was in use before, where it was asked. Less than torch
        has reserved means that it saw another GPU, or looked too rarely: then torch's figure counts.
    """
    most = max((each for each in reserved if each), default=None)
    if most is None:
        of_process = max((each for each in resident if each), default=None)
        return None if of_process is None else MemoryPeak(size_bytes=of_process, counter="resident")
    if device_bytes >= most:
        return MemoryPeak(size_bytes=device_bytes, counter="device")
    return MemoryPeak(size_bytes=most, counter="reserved")
