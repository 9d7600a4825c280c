"""Preflight checks of the queues of Volcano and KAI: whether they could ever admit the run."""

from __future__ import annotations

from collections.abc import Mapping

from decorators.backends.kubernetes.nodes import Preflight
from decorators.backends.kubernetes.schedulers import APIS, KAI, NAMES
from estimator.hardware.cluster.api import Json
from estimator.hardware.cluster.nodes import GPUS
from estimator.hardware.cluster.quantities import format_amount, quantities

# Units of KAI's queues: millicores and megabytes (10^6 bytes)
_KAI_RESOURCES = {"cpu": ("cpu", 1e-3), "memory": ("memory", 1e6), "gpu": (GPUS, 1.0)}
_MOST_PARENTS = 8


def find(preflight: Preflight, system: str, name: str) -> Json | None:
    """Return a queue of Volcano or KAI; None if there is none."""
    return preflight.find(f"/apis/{APIS[system]}/queues/{name}")


def check(preflight: Preflight, system: str, queue: Json, pod: Mapping[str, float]) -> None:
    """Check that a queue of Volcano or KAI accepts jobs, and that its limits hold all pods at once."""
    name, owner = str(queue["metadata"]["name"]), NAMES[system]
    requested = {what: amount * preflight.request.nodes for what, amount in pod.items() if amount}
    problems = (
        _volcano_problems(queue, requested)
        if system == "volcano"
        else _kai_problems(preflight, queue, requested)
    )
    for problem in problems:
        fix = f"kubectl edit queues.{APIS[system].partition('/')[0]} {name}"
        preflight.findings.no("queue", f"{owner}'s queue {name} {problem}", fix)
    if not problems:
        alone = system == "volcano" and preflight.request.nodes > 1
        note = "; it places each node by itself, so nodes may wait for others" if alone else ""
        preflight.findings.ok("queue", f"{name}, of {owner}{note}")


def _volcano_problems(queue: Json, requested: Mapping[str, float]) -> list[str]:
    state = str((queue.get("status") or {}).get("state") or "Open")
    problems = [] if state in ("Open", "Unknown") else [f"is {state.lower()}"]
    return problems + _exceeded(quantities((queue.get("spec") or {}).get("capability")), requested)


def _kai_problems(preflight: Preflight, queue: Json, requested: Mapping[str, float]) -> list[str]:
    children = (queue.get("status") or {}).get("childQueues") or []
    problems = [f"runs no jobs, its child queues do: {', '.join(map(str, children[:4]))}"] if children else []
    for _ in range(_MOST_PARENTS):
        spec = queue.get("spec") or {}
        problems += _exceeded(_kai_limits(spec.get("resources") or {}), requested)
        name = spec.get("parentQueue")
        parent = preflight.find(f"/apis/{KAI}/queues/{name}") if name else None
        if parent is None:
            break
        queue = parent
    return list(dict.fromkeys(problems))


def _kai_limits(resources: Json) -> dict[str, float]:
    """Return the limits of a KAI queue in cores, bytes and GPUs; -1 is no limit."""
    limits = {name: (resources.get(name) or {}).get("limit") for name in _KAI_RESOURCES}
    return {
        _KAI_RESOURCES[name][0]: float(limit) * _KAI_RESOURCES[name][1]
        for name, limit in limits.items()
        if limit is not None and float(limit) >= 0
    }


def _exceeded(limits: Mapping[str, float], requested: Mapping[str, float]) -> list[str]:
    return [
        f"allows {format_amount(what, limits[what])} of {format_amount(what, amount)} {what}"
        for what, amount in requested.items()
        if what in limits and limits[what] < amount
    ]
