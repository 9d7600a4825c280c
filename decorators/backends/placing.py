"""Placement of a step at launch: check that the target can run it, then set its decorators' values.

A step mutator such as ``@gpu_profile`` calls :func:`place` at launch and :func:`apply_launch` in the process
that waits for the step. The decisions of the launch are passed on in environment variables.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from decorators import _metaflow
from decorators._metaflow import StepView
from decorators.backends import pending, resubmitting
from decorators.backends.interface import StepRequest, StepValues
from decorators.backends.kubernetes import pod_shape
from decorators.backends.registry import BACKENDS
from estimator.plan import Override, Plan

ENVIRONMENT_VARIABLE = "FINETUNE_STEP_ENVIRONMENT"  # JSON: step -> variables for its container
# Values of @kubernetes and @batch that the user may set instead of the computed ones
PLACED = ("tolerations", "extended_resources", "labels", "queue", "efa")


def place(step: StepView, step_request: StepRequest, largest: StepRequest | None = None) -> None:
    """Set the values of a step's decorators from its request; values set by the user are kept.

    First checks, once per process, whether the cluster or queue can run ``largest``, the request of the run's
    largest step (default: this one). Raises UserError if it never can.
    """
    if largest is None or largest.backend != step_request.backend:
        largest = step_request
    backend = BACKENDS.get(step_request.backend)
    if backend is not None:
        step_request = replace(step_request, facts=backend.preflight(largest))
        if step_request.request != largest.request:
            backend.preflight(replace(step_request, size_only=True))
    fill_in(step, step_request)


def fill_in(step: StepView, step_request: StepRequest) -> None:
    """Set a step's decorators from a request, and the variables for its containers and for the wait."""
    values = values_for(step_request)
    step.set_values("resources", values.resources)
    if step_request.backend == "local":
        return
    os.environ[pending.TIMEOUT_VARIABLE] = f"{step_request.options.pending_timeout:g}"
    os.environ[pod_shape.PRIORITY_VARIABLE] = step_request.options.priority_class or ""
    if step.has(step_request.backend):
        step.set_values(step_request.backend, values.compute)
    os.environ |= pod_shape.merged_variable(step.name, values.pod_patches)
    os.environ |= merged_variable(step, values.environment)
    add_variables(step, _read_variable().get(step.name, {}) | _metaflow.datastore_variables())


def note_lowered_sizes(plan: Plan, step_request: StepRequest) -> Plan:
    """Return the plan with an override for each size that is lowered to what its nodes can give to pods.

    The plan's request is unchanged. Raises UserError, like :func:`place`.
    """
    backend = BACKENDS.get(step_request.backend)
    if backend is None:
        return plan
    notes = backend.values_for(replace(step_request, facts=backend.preflight(step_request))).lowered
    return replace(plan, overrides=(*plan.overrides, *notes)) if notes else plan


def apply_launch(step: StepView, on_end: Callable[[list[str]], None] = lambda _: None) -> None:
    """Set the container's variables and watch the wait, in the process that waits for a remote step.

    ``on_end`` receives one line per failed pod of a step, or the reason why the wait was given up.
    """
    add_variables(step, _read_variable().get(step.name, {}) | _metaflow.datastore_variables())
    pending.install(lambda reason: on_end([f"The nodes of step {step.name} did not start: {reason}"]))
    resubmitting.install()
    for backend in BACKENDS.values():
        backend.install(on_end)


def values_for(step_request: StepRequest) -> StepValues:
    """Return the values of a step's decorators; for a local step only sizes. Raises UserError."""
    backend = BACKENDS.get(step_request.backend)
    if backend is not None:
        return backend.values_for(step_request)
    return StepValues(resources=step_request.sizes_in_mib())


def note_replaced(plan: Plan, step_request: StepRequest) -> Plan:
    """Return the plan with an override for each user value that replaces a computed placement value."""
    backend = BACKENDS.get(step_request.backend)
    if backend is None:
        return plan
    planned = backend.values_for(
        replace(step_request, request=plan.request, user_values={}, configured={})
    ).compute
    for name in PLACED:
        computed, user_value = planned.get(name), step_request.user_values.get(name)
        if not computed or user_value is None:
            continue
        value = user_value.value
        if name == "labels" and isinstance(value, dict):  # further labels of the user are merged
            value = {**computed, **value}
            value = {key: value[key] for key in computed}
        if value != computed:
            note = Override(name=name, planned=_text(computed), used=_text(value), given_by=user_value.by)
            plan = replace(plan, overrides=(*plan.overrides, note))
    return plan


def add_variables(step: StepView, variables: Mapping[str, str]) -> None:
    """Add variables to a step's container, except those that the user has set in ``@environment``."""
    user_variables = step.values("environment").get("vars") or {}
    if missing := {name: value for name, value in variables.items() if name not in user_variables}:
        step.add_environment(missing)


def merged_variable(step: StepView, variables: dict[str, str]) -> dict[str, str]:
    """Return the variable that holds the container variables of all steps, with this step's replaced.

    A step without ``@parallel`` has none: it uses no network between nodes, and a single container may see
    the host's interfaces under other names.
    """
    all_steps = {**_read_variable(), step.name: variables if step.has("parallel") else {}}
    return {ENVIRONMENT_VARIABLE: json.dumps({k: v for k, v in all_steps.items() if v}, sort_keys=True)}


def _read_variable() -> dict[str, dict[str, str]]:
    variables: dict[str, dict[str, str]] = json.loads(os.environ.get(ENVIRONMENT_VARIABLE) or "{}")
    return variables


def _text(value: Any) -> str:
    return "none" if not value else value if isinstance(value, str) else json.dumps(value, sort_keys=True)
