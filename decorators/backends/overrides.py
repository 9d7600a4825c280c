"""A step's request to the cluster: the plan's request, overridden by the user's values.

Metaflow merges ``@resources`` with ``@kubernetes`` or ``@batch`` (2.19.39: the larger of the two, but on
Kubernetes ``@resources`` decides on ``gpu`` and ``shared_memory``). A value that the user set in one of them
is written to both, so that it takes effect.

Units: ``memory`` and ``disk`` are in MB (10**6 bytes) on Kubernetes, ``memory`` is in MiB on Batch, and
``shared_memory`` is always in MiB.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from decorators._metaflow import Backend, UserValue
from decorators.arguments import Role
from decorators.backends.interface import StepRequest, number_of
from decorators.backends.kubernetes.request import PLACEMENT
from decorators.backends.options import Options
from decorators.backends.placing import PLACED, note_replaced
from estimator.errors import UserError
from estimator.hardware.cluster.nodes import INSTANCE_TYPE
from estimator.plan import MIB, Override, Plan, Request
from estimator.planning.step_requests import PREPARE_CPU, PREPARE_MEMORY

GPUS_PARAMETER = "gpus"
_MB = 10**6
_FIELDS = {  # attribute of a decorator -> field of the request
    "gpu": "gpus_per_node",
    "cpu": "cpu",
    "memory": "memory_mib",
    "shared_memory": "shared_memory_mib",
    "disk": "disk_mib",
}
_RESOURCES_DECIDE = ("gpu", "shared_memory")


def merge_user_values(
    resources: Mapping[str, UserValue], compute: Mapping[str, UserValue], backend: Backend
) -> dict[str, UserValue]:
    """Merge the user's values of ``@resources`` and of the compute decorator like Metaflow."""
    names = (*_FIELDS, *PLACEMENT, *PLACED)
    merged = {name: value for name, value in compute.items() if name in names}
    for name, value in resources.items():
        compute_value = merged.get(name)
        decides = backend == "kubernetes" and name in _RESOURCES_DECIDE
        if compute_value is None or decides or number_of(name, value) > number_of(name, compute_value):
            merged[name] = value
    return merged


def with_user_values(
    resolve: Callable[[dict[str, Any]], Plan],
    parameters: dict[str, Any],
    user_values: Mapping[str, UserValue],
    backend: Backend,
    options: Options | None = None,
) -> Plan:
    """Make a plan and apply the user's values to it; each one is recorded as an override.

    A different number of GPUs also changes the layout: if the flow has a parameter ``gpus``, the plan is made
    with it. Raises UserError if two of the user's values contradict each other.
    """
    plan = (
        _with_gpus(resolve, parameters, user_values["gpu"]) if "gpu" in user_values else resolve(parameters)
    )
    request, notes = apply_user_values(plan.request, user_values, backend)
    plan = dataclasses.replace(plan, request=request, overrides=(*plan.overrides, *notes))
    step_request = StepRequest(
        backend=backend, request=plan.request, options=options or Options(), user_values=user_values
    )
    return note_replaced(plan, step_request)


def apply_user_values(
    request: Request, user_values: Mapping[str, UserValue], backend: Backend
) -> tuple[Request, tuple[Override, ...]]:
    """Return a step's request with the user's values, and an override for each replaced planned value.

    Raises UserError for a size that is not a number.
    """
    fields: dict[str, Any] = {}
    notes: list[Override] = []
    for name, field in _FIELDS.items():
        planned = getattr(request, field)
        if name in user_values and (amount := _amount(name, user_values[name], backend)) != planned:
            fields[field] = amount
            notes.append(
                Override(name=field, planned=str(planned), used=str(amount), given_by=user_values[name].by)
            )
    placement = next((user_values[name] for name in PLACEMENT if name in user_values), None)
    if placement is not None and request.instance_type is not None:
        labels = placement.value if isinstance(placement.value, dict) else {}
        machine = fields["instance_type"] = labels.get(INSTANCE_TYPE)
        if machine != request.instance_type:
            matching_nodes = f"any node that matches {_selector_text(placement.value)}"
            notes.append(
                Override(
                    name="instance_type",
                    planned=request.instance_type,
                    used=machine or matching_nodes,
                    given_by=placement.by,
                )
            )
    return dataclasses.replace(request, **fields), tuple(notes)


def request_for(plan: Plan, role: Role) -> Request:
    """Return the request of a step by its role.

    A training step gets the plan's request. Steps that compute data before training get one of its nodes
    with all GPUs.

    Other steps get their own requests from the plan. If a plan made by a flow has none, evaluation steps get
    one training node, steps that only handle files get their disk and no GPUs, and generation steps get the
    request of the evaluation.
    """
    request = plan.request
    stage = plan.generation.stage(role) if plan.generation is not None else None
    if stage is not None and not stage.request.gpus_per_node and request.gpus_per_node:
        return dataclasses.replace(stage.request, node_labels=request.node_labels)
    if role == "encode":
        return dataclasses.replace(request, nodes=1)
    if role in ("evaluate", "generate", "score", "compare", "inference"):
        base = plan.evaluate or dataclasses.replace(request, nodes=1)
        base = base if stage is None else stage.request
        # The user's choice of nodes, and nodes to avoid, apply here too
        return dataclasses.replace(base, instance_type=request.instance_type, node_labels=request.node_labels)
    if role == "data":
        base = plan.prepare or dataclasses.replace(
            request,
            nodes=1,
            gpus_per_node=0,
            gpu_type=None,  # so that the queue of the GPU is not used
            cpu=min(request.cpu, PREPARE_CPU),
            memory_mib=min(request.memory_mib, PREPARE_MEMORY // MIB),
            shared_memory_mib=0,
            instance_type=None,
        )
        return dataclasses.replace(base, node_labels=request.node_labels)
    return request


def _with_gpus(
    resolve: Callable[[dict[str, Any]], Plan], parameters: dict[str, Any], value: UserValue
) -> Plan:
    gpus = int(number_of("gpu", value))
    parameter = parameters.get(GPUS_PARAMETER)
    if parameter and parameter != gpus:
        raise UserError(
            f"--gpus {parameter} and {value.by.rstrip('=')} {gpus} contradict each other.",
            "Give the number of GPUs for each node once.",
        )
    if GPUS_PARAMETER not in parameters or gpus < 1:
        return resolve(parameters)
    note = Override(name="gpus_per_node", planned="not set", used=str(gpus), given_by=value.by)
    return resolve({**parameters, GPUS_PARAMETER: gpus}).with_override(note, gpus_per_node=gpus)


def _selector_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={label}" for name, label in value.items())
    return str(value)


def _amount(name: str, user_value: UserValue, backend: Backend) -> int:
    """Return an amount in the unit of the request's field."""
    value = number_of(name, user_value)
    if backend == "kubernetes" and name in ("memory", "disk"):
        value = value * _MB / MIB
    return math.floor(value)
