"""Where a run is launched: ask whether its target could ever take it, then fill in a step's decorators.

For ``@gpu_profile`` and any other mutator: :func:`place` at the launch, :func:`carry_on` in the process that
waits for the step. What was decided at the launch travels in environment variables.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from decorators import _metaflow
from decorators._metaflow import Backend, Given, StepView, compiles_only, deployer
from decorators.backends import pending
from decorators.backends.batch import preflight as preflight_batch
from decorators.backends.batch import request as batch
from decorators.backends.batch import workarounds
from decorators.backends.batch.preflight import BatchStep
from decorators.backends.kubernetes import errors as refusals
from decorators.backends.kubernetes import preflight as preflight_kubernetes
from decorators.backends.kubernetes import request as kubernetes
from decorators.backends.kubernetes.fit import Least, is_of_table
from decorators.backends.kubernetes.nodes import Step
from decorators.backends.kubernetes.request import ClusterFacts, Toleration
from decorators.backends.options import Options
from estimator.plan import MIB, Override, Plan, Request

ENVIRONMENT_VARIABLE = "FINETUNE_STEP_ENVIRONMENT"  # JSON: step -> variables for its container
# Of @kubernetes and @batch; what the user writes there replaces what would be asked for
PLACED = ("tolerations", "extended_resources", "labels", "queue", "efa")


def place(
    step: StepView,
    request: Request,
    options: Options,
    given: Mapping[str, Given],
    *,
    lead: StepView | None = None,
    least: Least | None = None,
    main: Request | None = None,
) -> None:
    """Give a step's decorators every value of the request; the user's own (``given``) stand.

    The first call of a process looks at the cluster or queue first: for ``main``, what the run's largest
    step asks (default: this request), with the values of its step ``lead``. Raises UserError where that can
    never be had; ``least`` is what one of its nodes can't do without.
    """
    backend, largest = step.backend(), main or request
    workarounds.check(backend, largest.nodes)
    if backend != "local":
        add_variables(step, _metaflow.datastore_variables())
        os.environ[pending.TIMEOUT_VARIABLE] = f"{options.pending_timeout:g}"
    facts = facts_of(backend, largest, options, lead or step, least)
    asked = values_of(step, request, backend, options, given, facts)
    if request != largest and backend == "kubernetes" and _looks(options):
        _look_beside(step.name, _as_asked(request, asked["resources"]), options, _step_of(step, request))
    for decorator, values in asked.items():
        if decorator == "environment":
            _remember(step, values)
        elif decorator == "resources" or step.has(decorator):
            step.set_values(decorator, values)


def facts_of(
    backend: Backend, request: Request, options: Options, lead: StepView, least: Least | None
) -> ClusterFacts:
    """What the target has told of itself; nothing where it is not to be asked. Raises UserError."""
    if backend == "local" or not _looks(options):
        return ClusterFacts()
    return look(backend, request, options, lead, least)


def with_room(
    plan: Plan,
    options: Options,
    given: Mapping[str, Given],
    *,
    lead: StepView,
    least: Least | None = None,
) -> Plan:
    """The plan with a note for each size that is lowered to what its nodes leave for pods.

    The plan's request stays as it is: it says what the job wants. Raises UserError, as :func:`place` does.
    """
    if lead.backend() != "kubernetes":
        return plan
    facts = facts_of("kubernetes", plan.request, options, lead, least)
    own = {"cpu": "cpu", "memory_mib": "memory"}  # what the user has written is asked for as it is
    notes = [note for note in kubernetes.lowered(plan.request, facts) if own[note.name] not in given]
    return replace(plan, overrides=(*plan.overrides, *notes)) if notes else plan


def carry_on(step: StepView) -> None:
    """In the process that waits for a remote step: its container's variables, and the watch on the wait."""
    add_variables(step, _remembered().get(step.name, {}) | _metaflow.datastore_variables())
    pending.install()
    refusals.install()
    workarounds.install()


def values_of(
    step: StepView,
    request: Request,
    backend: Backend,
    options: Options,
    given: Mapping[str, Given],
    facts: ClusterFacts | None = None,
) -> dict[str, dict[str, Any]]:
    """Values by decorator; under "environment" the variables."""
    return merged(request, backend, options, given, step.values(backend) if backend != "local" else {}, facts)


def merged(
    request: Request,
    backend: Backend,
    options: Options,
    given: Mapping[str, Given],
    configured: Mapping[str, Any],
    facts: ClusterFacts | None = None,
) -> dict[str, dict[str, Any]]:
    """The same from plain values. Where the user has written a size, it goes into both decorators."""
    environment: dict[str, str] = {}
    values: dict[str, dict[str, Any]] = {}
    if backend == "kubernetes":
        found = kubernetes.values(request, given=given, configured=configured, options=options, facts=facts)
        resources, environment = found.resources, found.environment
        values["kubernetes"] = found.kubernetes
    else:
        asked = batch.values(request, given=given, options=options)
        resources = asked.resources
        if backend == "batch":
            environment = asked.environment
            values["batch"] = asked.batch
    own = {name: _whole(given[name].value) for name in resources if name in given}
    values["resources"] = {**resources, **own}
    if backend == "kubernetes":
        values["kubernetes"] |= {name: values["resources"][name] for name in ("cpu", "memory", "disk")}
    return {**{name: value for name, value in values.items() if value}, "environment": environment}


def noted(plan: Plan, given: Mapping[str, Given], backend: Backend, options: Options) -> Plan:
    """The plan with a note for each value of the user's that replaces one of a cluster's own kind."""
    if backend == "local":
        return plan
    planned = merged(plan.request, backend, options, {}, {}).get(backend, {})
    for name in PLACED:
        wanted, own = planned.get(name), given.get(name)
        if not wanted or own is None:
            continue
        used = own.value
        if name == "labels" and isinstance(used, dict):  # others of the user's stand beside ours
            used = {**wanted, **used}
            used = {key: used[key] for key in wanted}
        if used != wanted:
            note = Override(name=name, planned=_text(wanted), used=_text(used), given_by=own.by)
            plan = replace(plan, overrides=(*plan.overrides, note))
    return plan


def _looks(options: Options) -> bool:
    return options.preflight and not compiles_only()


def look(
    backend: Backend, request: Request, options: Options, lead: StepView, least: Least | None
) -> ClusterFacts:
    """What the target's nodes or queue tell. Raises UserError where it could never take the request."""
    values = lead.values(backend)
    if backend == "kubernetes":
        return _look_at_kubernetes(request, options, _step_of(lead, request), least)
    queue = values.get("queue") if "queue" in lead.given("batch") else options.queue_for(request.gpu)
    _look_at_batch(request, BatchStep.from_values({**values, "queue": queue or values.get("queue")}), least)
    return ClusterFacts()


def _step_of(step: StepView, request: Request) -> Step:
    """The step as it is before it is placed, also where it has been."""
    given, values = step.given("kubernetes"), step.values("kubernetes")
    own, own_tolerations = given.get("node_selector"), "tolerations" in given
    tolerations = tuple(Toleration.of(item) for item in values.get("tolerations") or ())
    if request.gpus_per_node and not own_tolerations:  # of what the table knows some may be ours
        tolerations = tuple(item for item in tolerations if not is_of_table(item))
    return Step.from_values(
        values,
        own.value if own is not None and isinstance(own.value, dict) else {},
        tolerations=tolerations,
        own_tolerations=own_tolerations,
        submits=deployer() is None,
    )


@lru_cache(maxsize=4)  # one look for each process, however many steps ask
def _look_at_kubernetes(request: Request, options: Options, step: Step, least: Least | None) -> ClusterFacts:
    findings, facts = preflight_kubernetes.look(request, options=options, step=step, least=least)
    findings.settle()
    return facts


def _as_asked(request: Request, resources: Mapping[str, Any]) -> Request:
    """The request with the sizes that Metaflow is given, which may be the user's own."""
    mib = {name: math.ceil(resources[name] * kubernetes.MB / MIB) for name in ("memory", "disk")}
    return replace(request, cpu=math.ceil(resources["cpu"]), memory_mib=mib["memory"], disk_mib=mib["disk"])


@lru_cache(maxsize=4)
def _look_beside(name: str, request: Request, options: Options, step: Step) -> None:
    """A smaller step's nodes, asked for where the run's largest step has passed; quiet where they may do."""
    findings = preflight_kubernetes.look_beside(name, request, options=options, step=step)
    if findings.impossible:
        findings.settle()


@lru_cache(maxsize=4)
def _look_at_batch(request: Request, step: BatchStep, least: Least | None) -> None:
    preflight_batch.look(request, step=step, least=least).settle()


def _remember(step: StepView, variables: dict[str, str]) -> None:
    os.environ |= remembered_with(step, variables)
    add_variables(step, _remembered().get(step.name, {}))


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
    read: dict[str, dict[str, str]] = json.loads(os.environ.get(ENVIRONMENT_VARIABLE) or "{}")
    return read


def _text(value: Any) -> str:
    return "none" if not value else value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _whole(value: Any) -> int | float:
    number = float(value)
    return int(number) if number.is_integer() else number
