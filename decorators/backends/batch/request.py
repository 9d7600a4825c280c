"""A plan's request -> every value of ``@batch``, ``@resources`` and the environment. Pure functions.

Batch chooses the machine by its queue: a queue's compute environments say which types it may start.
Metaflow's job definitions hold no ulimits, so EFA's locked memory comes from the compute environment's
launch template (docs/backends.md).

Units: ``memory``, ``shared_memory`` in MiB.
"""

from __future__ import annotations

from decorators.backends import tables
from decorators.backends.interface import StepRequest, StepValues
from decorators.backends.kubernetes.request import environment, machine_of
from estimator.plan import Request


def values_for(asked: StepRequest) -> StepValues:
    """All values for one step. What the user has written is left out of what would replace it."""
    interfaces = efa_interfaces(asked.request) if "efa" not in asked.given else 0
    queue = asked.options.queue_for(asked.request.gpu) if "queue" not in asked.given else None
    return StepValues(
        # Batch has no request for a disk: the launch template's volume decides
        resources=asked.sizes_in_mib(),
        compute={**({"queue": queue} if queue else {}), **({"efa": interfaces} if interfaces else {})},
        environment=environment(asked.request, "batch", interfaces),
    )


def efa_interfaces(request: Request) -> int:
    """EFA interfaces to hand to each container: all of a whole machine's, for a step on several nodes."""
    instance = machine_of(request)
    if request.nodes < 2 or instance is None or request.gpus_per_node != instance.gpu_count:
        return 0
    return tables.efa_interfaces(instance)
