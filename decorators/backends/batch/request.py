"""Convert a plan's request to the values of ``@batch``, ``@resources`` and the environment. Pure functions.

Batch chooses the machine by its queue, whose compute environments list the allowed types.
Metaflow's job definitions hold no ulimits, so EFA's locked memory comes from the compute environment's
launch template (docs/backends.md).

Units: ``memory``, ``shared_memory`` in MiB.
"""

from __future__ import annotations

from decorators.backends import tables
from decorators.backends.interface import StepRequest, StepValues
from decorators.backends.kubernetes.request import environment
from estimator import hardware
from estimator.plan import Request


def values_for(step_request: StepRequest) -> StepValues:
    """Return all values for one step, without those that the user has set."""
    interfaces = efa_interfaces(step_request.request) if "efa" not in step_request.user_values else 0
    queue = (
        step_request.options.queue_for(step_request.request.gpu_type)
        if "queue" not in step_request.user_values
        else None
    )
    return StepValues(
        # Batch cannot request disk space: the volume of the launch template decides
        resources=step_request.sizes_in_mib(),
        compute={**({"queue": queue} if queue else {}), **({"efa": interfaces} if interfaces else {})},
        environment=environment(step_request.request, "batch", interfaces),
    )


def efa_interfaces(request: Request) -> int:
    """Return the EFA interfaces per container: all interfaces of a whole machine, for a multi-node step."""
    instance = hardware.current().find_instance(request.instance_type)
    if request.nodes < 2 or instance is None or request.gpus_per_node != instance.gpu_count:
        return 0
    return tables.efa_interfaces(instance)
