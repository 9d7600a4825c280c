"""What a step asks of the cluster: the plan's request, and over it what the user wrote down.

Metaflow merges ``@resources`` with ``@kubernetes`` or ``@batch`` by rules of its own (2.19.39: the larger
of the two, but on Kubernetes ``@resources`` decides on ``gpu`` and ``shared_memory``). A user who wrote a
value in one of them means that value, so it is put in both places.

Units: Kubernetes takes ``memory`` and ``disk`` in MB (10**6 bytes), Batch takes ``memory`` in MiB, and
``shared_memory`` is in MiB everywhere.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from decorators._metaflow import Backend, Given
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
_FIELDS = {  # a decorator's attribute: the request's field
    "gpu": "gpus_per_node",
    "cpu": "cpu",
    "memory": "memory_mib",
    "shared_memory": "shared_memory_mib",
    "disk": "disk_mib",
}
_RESOURCES_DECIDE = ("gpu", "shared_memory")


def merge_given(
    resources: Mapping[str, Given], compute: Mapping[str, Given], backend: Backend
) -> dict[str, Given]:
    """The user's values of ``@resources`` and of the compute decorator, merged as Metaflow would."""
    kept = (*_FIELDS, *PLACEMENT, *PLACED)
    merged = {name: given for name, given in compute.items() if name in kept}
    for name, given in resources.items():
        other = merged.get(name)
        decides = backend == "kubernetes" and name in _RESOURCES_DECIDE
        if other is None or decides or number_of(name, given) > number_of(name, other):
            merged[name] = given
    return merged


def with_given(
    resolve: Callable[[dict[str, Any]], Plan],
    parameters: dict[str, Any],
    given: Mapping[str, Given],
    backend: Backend,
    options: Options | None = None,
) -> Plan:
    """The plan with the user's values in it, each noted as an override.

    Another number of GPUs changes the layout too: where the flow has a parameter ``gpus``, the plan is
    made with it. Raises UserError where two of the user's own values contradict each other.
    """
    plan = _with_gpus(resolve, parameters, given["gpu"]) if "gpu" in given else resolve(parameters)
    request, notes = apply_given(plan.request, given, backend)
    plan = dataclasses.replace(plan, request=request, overrides=(*plan.overrides, *notes))
    step_request = StepRequest(
        backend=backend, request=plan.request, options=options or Options(), given=given
    )
    return note_replaced(plan, step_request)


def apply_given(
    request: Request, given: Mapping[str, Given], backend: Backend
) -> tuple[Request, tuple[Override, ...]]:
    """Return a step's request with the user's values in it, and a note for each that replaces a planned one.

    Raises UserError for a size that is no number.
    """
    fields: dict[str, Any] = {}
    notes: list[Override] = []
    for name, field in _FIELDS.items():
        planned = getattr(request, field)
        if name in given and (used := _amount(name, given[name], backend)) != planned:
            fields[field] = used
            notes.append(Override(name=field, planned=str(planned), used=str(used), given_by=given[name].by))
    chosen = next((given[name] for name in PLACEMENT if name in given), None)
    if chosen is not None and request.instance_type is not None:
        labels = chosen.value if isinstance(chosen.value, dict) else {}
        machine = fields["instance_type"] = labels.get(INSTANCE_TYPE)
        if machine != request.instance_type:
            others = f"any that fits {_selector_text(chosen.value)}"
            notes.append(
                Override(
                    name="instance_type",
                    planned=request.instance_type,
                    used=machine or others,
                    given_by=chosen.by,
                )
            )
    return dataclasses.replace(request, **fields), tuple(notes)


def request_for(plan: Plan, role: Role) -> Request:
    """Return the request of a step of that role: the whole request to train, the plan's own requests of other
    steps.

    What is computed before training asks for one of its nodes, with all of its GPUs.

    A plan of a flow's own may say nothing of them: then a step that evaluates asks for one of the training
    nodes, and one that only handles files for their disk and no GPUs. Without a plan for generation its steps
    ask for what the evaluation asks for.
    """
    request = plan.request
    stage = plan.generation.stage(role) if plan.generation is not None else None
    if stage is not None and not stage.request.gpus_per_node and request.gpus_per_node:
        return dataclasses.replace(stage.request, node_labels=request.node_labels)
    if role == "encode":
        return dataclasses.replace(request, nodes=1)
    if role in ("evaluate", "generate", "score", "compare", "inference"):
        own = plan.evaluate or dataclasses.replace(request, nodes=1)
        own = own if stage is None else stage.request
        # Where the user has the nodes chosen another way, or some are avoided, that holds here too
        return dataclasses.replace(own, instance_type=request.instance_type, node_labels=request.node_labels)
    if role == "data":
        own = plan.prepare or dataclasses.replace(
            request,
            nodes=1,
            gpus_per_node=0,
            gpu_type=None,  # its queue is not that of the GPUs
            cpu=min(request.cpu, PREPARE_CPU),
            memory_mib=min(request.memory_mib, PREPARE_MEMORY // MIB),
            shared_memory_mib=0,
            instance_type=None,
        )
        return dataclasses.replace(own, node_labels=request.node_labels)
    return request


def _with_gpus(resolve: Callable[[dict[str, Any]], Plan], parameters: dict[str, Any], given: Given) -> Plan:
    gpus = int(number_of("gpu", given))
    asked = parameters.get(GPUS_PARAMETER)
    if asked and asked != gpus:
        raise UserError(
            f"--gpus {asked} and {given.by.rstrip('=')} {gpus} contradict each other.",
            "Give the number of GPUs for each node once.",
        )
    if GPUS_PARAMETER not in parameters or gpus < 1:
        return resolve(parameters)
    note = Override(name="gpus_per_node", planned="left open", used=str(gpus), given_by=given.by)
    return resolve({**parameters, GPUS_PARAMETER: gpus}).with_override(note, gpus_per_node=gpus)


def _selector_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={label}" for name, label in value.items())
    return str(value)


def _amount(name: str, given: Given, backend: Backend) -> int:
    """An amount in the unit of the request's field."""
    value = number_of(name, given)
    if backend == "kubernetes" and name in ("memory", "disk"):
        value = value * _MB / MIB
    return math.floor(value)
