"""Values of @batch, @resources and the environment for a plan."""

from __future__ import annotations

from typing import Any

import pytest

from decorators._metaflow import UserValue
from decorators.backends.batch.request import values_for
from decorators.backends.interface import StepRequest, StepValues
from decorators.backends.options import Options
from estimator import hardware
from estimator.plan import Request
from tests.decorators.backends.kubernetes.test_request import EFA
from tests.decorators.backends.plans import CASES, EFA_VARIABLES, planned

# Of any containers of several nodes: NCCL would take the interface to the host, which ECS gives each of them
NETWORK = {"NCCL_SOCKET_IFNAME": "^lo,docker,ecs-eth0", "GLOO_SOCKET_IFNAME": "eth0"}


def _values(request: Request, **fields: Any) -> StepValues:
    return values_for(StepRequest(backend="batch", request=request, **fields))


@pytest.mark.parametrize(("model", "method", "gpu", "nodes"), CASES)
def test_every_field_of_a_plan_is_requested(model: str, method: str, gpu: str, nodes: int) -> None:
    planned_run = planned(model, method, gpu, nodes, kind="batch")
    request = planned_run.request
    values = _values(request, options=Options(queues=((gpu, f"queue-of-{gpu}"),)))
    machine = hardware.instance(request.instance_type or "")
    assert values.resources == {
        "cpu": request.cpu,
        "memory": request.memory_mib,
        "disk": request.disk_mib,
        "shared_memory": request.shared_memory_mib,
        "gpu": request.gpus_per_node,
    }
    # ECS offers less than a machine's memory; a request of all of it is never placed
    assert planned_run.prediction.memory.host_bytes <= request.memory_mib * 2**20 < 0.925 * machine.ram_bytes
    interfaces = EFA.get(machine.name, 0) if nodes > 1 else 0
    expected = {"queue": f"queue-of-{gpu}", **({"efa": interfaces} if interfaces else {})}
    assert values.compute == expected
    assert values.environment == {**(EFA_VARIABLES if interfaces else {}), **(NETWORK if nodes > 1 else {})}


def test_the_queue_and_efa_settings_of_the_user_are_kept() -> None:
    user_values = {
        name: UserValue(value=value, by="--with batch:") for name, value in (("queue", "mine"), ("efa", 1))
    }
    request = planned("llama-70b", "full", "H100", 4, kind="batch").request
    values = _values(request, user_values=user_values, options=Options(queues=(("H100", "other"),)))
    assert (values.compute, values.environment) == ({}, NETWORK)


def test_the_configured_queue_is_unchanged_without_a_queue_mapping() -> None:
    request = planned("llama-8b", "lora", "L40S", 1, kind="batch").request
    assert _values(request, options=Options(queues=(("H100", "other"),))).compute == {}
