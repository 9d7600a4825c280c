"""Queries to NVIDIA's management library (NVML) that tolerate missing features, drivers and GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
Field = int | tuple[int, int]  # field number, optionally with a link number
THROTTLES = {  # nvml.h, nvmlClocksEventReason*; idle (0x1) and application clocks (0x2) are harmless
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
_KINDS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # nvml.h, nvmlValueType_t


@contextlib.contextmanager
def session() -> Iterator[Any]:
    """Initialize NVML for the block; yield None if it is missing or does not respond."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - no driver or no response is treated as no GPUs
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def optional(query: Callable[[], T], nvml: Any) -> T | None:
    """Return the result of a query; None if the GPU, driver or library does not support it."""
    try:
        return query()
    except (nvml.NVMLError, AttributeError):
        return None


def queries(nvml: Any, handle: Any) -> Callable[..., Any]:
    """Return a function that queries the GPU by name and arguments; its result is None if unsupported."""
    return lambda name, *arguments: optional(lambda: getattr(nvml, name)(handle, *arguments), nvml)


def fields(nvml: Any, handle: Any, requested: Sequence[Field]) -> list[int | None]:
    """Read field values in one call; None for fields unsupported by the GPU or driver."""
    replies = optional(lambda: nvml.nvmlDeviceGetFieldValues(handle, list(requested)), nvml)
    if replies is None:
        return [None] * len(requested)
    return [
        int(getattr(reply.value, _KINDS[reply.valueType])) if reply.nvmlReturn == nvml.NVML_SUCCESS else None
        for reply in replies
    ]


def throttle_reasons(nvml: Any, handle: Any) -> tuple[str, ...] | None:
    """Return the throttling reasons, as names of ``THROTTLES``; None if not reported."""
    reasons = optional(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle), nvml)
    if reasons is None:  # name of the function before driver 535
        reasons = optional(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle), nvml)
    return None if reasons is None else tuple(name for bit, name in THROTTLES.items() if reasons & bit)
