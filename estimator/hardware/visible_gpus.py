"""GPUs that a process may use: the only parser of ``CUDA_VISIBLE_DEVICES``."""

from __future__ import annotations

from collections.abc import Sequence

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


def complete_gpus(chosen: str | None, uuids: Sequence[str]) -> list[int]:
    """Return the visible GPUs up to the first MIG slice."""
    places: list[int] = []
    for place in visible_gpus(chosen, uuids):
        if isinstance(place, str):
            break
        places.append(place)
    return places
