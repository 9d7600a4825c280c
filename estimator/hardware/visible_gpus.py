"""GPUs that a process may use: the only parser of ``CUDA_VISIBLE_DEVICES``."""

from __future__ import annotations

from collections.abc import Sequence

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(chosen: str | None, uuids: Sequence[str]) -> list[int | str]:
    """The GPUs that are left, in CUDA's order, by their place among all of the machine (NVML's order).

    ``chosen`` is the variable's value, None where it isn't set; ``uuids`` are those of all GPUs. Names may be
    places, UUIDs or beginnings of one. A slice of a GPU (``MIG-...``) is no place: it stays a name. As CUDA
    does, the first name that means no GPU, or more than one, ends the list.
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


def whole_gpus(chosen: str | None, uuids: Sequence[str]) -> list[int]:
    """The whole GPUs that :func:`visible_gpus` finds, up to the first slice of one."""
    places: list[int] = []
    for place in visible_gpus(chosen, uuids):
        if isinstance(place, str):
            break
        places.append(place)
    return places
