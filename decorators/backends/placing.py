"""Placement at launch: check that the target can take the step, then fill in the step's decorators.

For ``@gpu_profile`` and any other mutator: :func:`place` at the launch, :func:`carry_on` in the process that
waits for the step. What was decided at the launch travels in environment variables.
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
# Of @kubernetes and @batch; what the user writes there replaces what would be asked for
PLACED = ("tolerations", "extended_resources", "labels", "queue", "efa")


def place(step: StepView, step_request: StepRequest, largest: StepRequest | None = None) -> None:
    """Give a step's decorators every value of its request; the user's own stand.

    The cluster or queue is asked first, once for each process, for ``largest``: the request of the run's
    largest step there (default: this one). Raises UserError where that can never be had.
    """
    if largest is None or largest.backend != step_request.backend:
        largest = step_request
    backend = BACKENDS.get(step_request.backend)
    if backend is not None:
        step_request = replace(step_request, facts=backend.preflight(largest))
        if step_request.request != largest.request:
            backend.preflight(replace(step_request, beside=True))
    fill_in(step, step_request)


def fill_in(step: StepView, step_request: StepRequest) -> None:
    """Write a request into a step's decorators, and what its containers and the wait for them need."""
    values = values_for(step_request)
    step.set_values("resources", values.resources)
    if step_request.backend == "local":
        return
    os.environ[pending.TIMEOUT_VARIABLE] = f"{step_request.options.pending_timeout:g}"
    os.environ[pod_shape.PRIORITY_VARIABLE] = step_request.options.priority_class or ""
    if step.has(step_request.backend):
        step.set_values(step_request.backend, values.compute)
    os.environ |= pod_shape.remembered_with(step.name, values.pod_patches)
    os.environ |= remembered_with(step, values.environment)
    add_variables(step, _remembered().get(step.name, {}) | _metaflow.datastore_variables())


def note_room(plan: Plan, step_request: StepRequest) -> Plan:
    """The plan with a note for each size that is lowered to what its nodes leave for pods.

    The plan's request stays as it is: it says what the job wants. Raises UserError, as :func:`place` does.
    """
    backend = BACKENDS.get(step_request.backend)
    if backend is None:
        return plan
    notes = backend.values_for(replace(step_request, facts=backend.preflight(step_request))).lowered
    return replace(plan, overrides=(*plan.overrides, *notes)) if notes else plan


def carry_on(step: StepView, ended: Callable[[list[str]], None] = lambda _: None) -> None:
    """In the process that waits for a remote step: its container's variables, and the watch on the wait.

    ``ended`` gets a line for each pod of a step that has failed, or why the wait for them was given up.
    """
    add_variables(step, _remembered().get(step.name, {}) | _metaflow.datastore_variables())
    pending.install(lambda why: ended([f"No room for the nodes of step {step.name}: {why}"]))
    resubmitting.install()
    for backend in BACKENDS.values():
        backend.install(ended)


def values_for(step_request: StepRequest) -> StepValues:
    """Return the values of a step's decorators; sizes of local steps are informative only. Raises
    UserError.
    """
    backend = BACKENDS.get(step_request.backend)
    if backend is not None:
        return backend.values_for(step_request)
    return StepValues(resources=step_request.sizes_in_mib())


def note_replaced(plan: Plan, step_request: StepRequest) -> Plan:
    """The plan with a note for each value of the user's that replaces one of a cluster's own kind."""
    backend = BACKENDS.get(step_request.backend)
    if backend is None:
        return plan
    planned = backend.values_for(replace(step_request, request=plan.request, given={}, configured={})).compute
    for name in PLACED:
        ours, own = planned.get(name), step_request.given.get(name)
        if not ours or own is None:
            continue
        used = own.value
        if name == "labels" and isinstance(used, dict):  # others of the user's stand beside ours
            used = {**ours, **used}
            used = {key: used[key] for key in ours}
        if used != ours:
            note = Override(name=name, planned=_text(ours), used=_text(used), given_by=own.by)
            plan = replace(plan, overrides=(*plan.overrides, note))
    return plan


def add_variables(step: StepView, variables: Mapping[str, str]) -> None:
    """Variables for a step's container, but for those that the user has set in ``@environment`` himself."""
    own = step.values("environment").get("vars") or {}
    if missing := {name: value for name, value in variables.items() if name not in own}:
        step.add_environment(missing)


def remembered_with(step: StepView, variables: dict[str, str]) -> dict[str, str]:
    """The variable that carries all steps' own, with other ones for this step.

    A step that isn't ``@parallel`` has none, whatever the plan: nothing of it crosses a network, and a
    container by itself may have the host's interfaces, with other names.
    """
    known = {**_remembered(), step.name: variables if step.has("parallel") else {}}
    return {ENVIRONMENT_VARIABLE: json.dumps({k: v for k, v in known.items() if v}, sort_keys=True)}


def _remembered() -> dict[str, dict[str, str]]:
    variables: dict[str, dict[str, str]] = json.loads(os.environ.get(ENVIRONMENT_VARIABLE) or "{}")
    return variables


def _text(value: Any) -> str:
    return "none" if not value else value if isinstance(value, str) else json.dumps(value, sort_keys=True)
