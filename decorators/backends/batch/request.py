"""A plan's request -> every value of ``@batch``, ``@resources`` and the environment. Pure functions.

Batch chooses the machine by its queue: a queue's compute environments say which types it may start.
Metaflow's job definitions hold no ulimits, so EFA's locked memory comes from the compute environment's
launch template (docs/backends.md).

Units: ``memory``, ``shared_memory`` in MiB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from decorators._metaflow import Given
from decorators.backends import tables
from decorators.backends.kubernetes import request as kubernetes
from decorators.backends.options import Options
from estimator.plan import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Values:
    """What goes into a step's decorators."""

    resources: dict[str, Any]
    batch: dict[str, Any]
    environment: dict[str, str]


def values(
    request: Request, *, given: Mapping[str, Given] | None = None, options: Options | None = None
) -> Values:
    """All values for one step. What the user has written (``given``) is left out of what would replace it."""
    own, chosen = given or {}, options or Options()
    asked = efa(request) if "efa" not in own else 0
    queue = chosen.queue_for(request.gpu) if "queue" not in own else None
    return Values(
        resources={
            "cpu": request.cpu,
            "memory": request.memory_mib,
            "disk": request.disk_mib,  # Batch has no such request: the launch template's volume decides
            "shared_memory": request.shared_memory_mib or None,
            "gpu": request.gpus_per_node or None,
        },
        batch={**({"queue": queue} if queue else {}), **({"efa": asked} if asked else {})},
        environment=kubernetes.environment(request, "batch", asked),
    )


def efa(request: Request) -> int:
    """EFA interfaces to hand to each container: all of a whole machine's, for a step on several nodes."""
    instance = kubernetes.machine_of(request)
    if request.nodes < 2 or instance is None or request.gpus_per_node != instance.gpu_count:
        return 0
    return tables.efa_interfaces(instance)
