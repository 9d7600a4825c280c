"""GPUs that a process may use: the only parser of ``CUDA_VISIBLE_DEVICES``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(chosen: str | None, uuids: Sequence[str]) -> list[int | str]:
    """Return the visible GPUs in CUDA's order, by index in NVML's order.

    ``chosen``: value of the variable, None if it is not set; ``uuids``: those of all GPUs. Entries may be
    indices, UUIDs or prefixes of one. A slice of a GPU (``MIG-...``) remains a name. As in CUDA, the first
    entry that matches no GPU, or several, ends the list.
    """
    if chosen is None:
        return list(range(len(uuids)))
    visible: list[int | str] = []
    for name in (part.strip() for part in chosen.split(",")):
        if name.isdigit() and int(name) < len(uuids):
            visible.append(int(name))
        elif name.startswith("MIG-"):
            visible.append(name)
        else:
            places = [place for place, uuid in enumerate(uuids) if name and uuid.startswith(name)]
            if len(places) != 1:
                break
            visible += places
    return visible


def visible_handles(nvml: Any, *, slices: bool = False) -> list[Any]:
    """Return the visible GPUs' handles in CUDA's order, up to the first MIG slice unless ``slices``.

    ``nvml``: the module pynvml, initialized.
    """
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    uuids = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
    visible = []
    for name in visible_gpus(os.environ.get(VARIABLE), uuids):
        if isinstance(name, str) and not slices:
            break
        visible.append(handles[name] if isinstance(name, int) else nvml.nvmlDeviceGetHandleByUUID(name))
    return visible
