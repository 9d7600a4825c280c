"""NVIDIA's library for management, NVML: asked for what it may not offer. Nothing without GPUs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from estimator.hardware.visible_gpus import VARIABLE, whole_gpus

T = TypeVar("T")
Field = int | tuple[int, int]  # a field's number; with the number of the link that is meant
THROTTLES = {  # nvml.h, nvmlClocksEventReason*; idle (0x1) and application clocks (0x2) are nobody's fault
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
    """The library, begun and ended again; None where there is none, or it doesn't answer."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 - no driver, or one that doesn't answer: then there are no GPUs for us
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def visible(nvml: Any) -> list[Any]:
    """Handles in the order that CUDA gives them in this process."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    uuids = [text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    return [handles[place] for place in whole_gpus(os.environ.get(VARIABLE), uuids)]


def optional(ask: Callable[[], T], nvml: Any) -> T | None:
    """What is asked for, or None where this GPU, driver or library doesn't offer it."""
    try:
        return ask()
    except (nvml.NVMLError, AttributeError):
        return None


def fields(nvml: Any, handle: Any, wanted: Sequence[Field]) -> list[int | None]:
    """Field values, all in one call; None for what this GPU or driver doesn't have."""
    answers = optional(lambda: nvml.nvmlDeviceGetFieldValues(handle, list(wanted)), nvml)
    if answers is None:
        return [None] * len(wanted)
    return [
        int(getattr(answer.value, _KINDS[answer.valueType]))
        if answer.nvmlReturn == nvml.NVML_SUCCESS
        else None
        for answer in answers
    ]


def throttle_reasons(nvml: Any, handle: Any) -> tuple[str, ...] | None:
    """Why its clocks are held down, by the names of ``THROTTLES``; None: it doesn't say."""
    reasons = optional(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle), nvml)
    if reasons is None:  # its name before driver 535
        reasons = optional(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle), nvml)
    return None if reasons is None else tuple(name for bit, name in THROTTLES.items() if reasons & bit)


def text(value: Any) -> str:
    """A string of NVML's, which some versions of its binding give as bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)
