"""Launch of a step with ``@gpu_profile``: plan or size it, request its part, carry the decision to its tasks.

Imported where a run is launched and in the process that waits for a remote step, never in a task.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from decorators import _metaflow, usage
from decorators._metaflow import Backend, StepView
from decorators.arguments import Role
from decorators.backends import cluster_name, resubmitting
from decorators.backends.destination import planning_for
from decorators.backends.interface import MinimumRequest, StepRequest
from decorators.backends.job_labels import note_team
from decorators.backends.kubernetes import pod_shape
from decorators.backends.options import Options
from decorators.backends.overrides import GPUS_PARAMETER, request_for, with_user_values
from decorators.backends.placing import note_lowered_sizes, place
from decorators.backends.retrying import Retrying
from decorators.declared import DeclaredPlan, summarize
from decorators.launch import (
    LaunchMixin,
    Once,
    build_destination,
    build_step_request,
    check_nodes,
    first_step,
    user_errors_for_metaflow,
    user_values_of,
)
from decorators.packed_plan import STAGED_VARIABLE, pack
from decorators.sizing import InferenceArguments, SizeArguments, StepSizing
from estimator.errors import UserError
from estimator.plan import MIB, Plan, Request
from estimator.terminal import print

Resolver = Callable[[dict[str, Any], Backend], Plan]
_plan_once = Once()


class Decorator(Protocol):
    """Interface of ``@gpu_profile`` that the launch uses."""

    options: dict[str, Any]
    planner: Resolver | None
    sizes: dict[str, Any] | None
    rightsize: bool
    role: Role
    variable: str

    @property
    def planned(self) -> bool:
        """Whether the step has a plan."""


class StepLaunch(LaunchMixin):
    """Launch of one decorated step."""

    def __init__(self, decorator: Decorator) -> None:
        self._decorator = decorator
        self.variable = decorator.variable
        # Sizes are carried by the decorator itself, separately for each step
        self.carried = () if decorator.sizes is not None else (self.variable, STAGED_VARIABLE)

    def launch(self, step: StepView) -> None:
        """Plan the step when the run is launched; apply that plan in the process that waits for its job."""
        if self.decide_or_apply(step) and step.backend() == "kubernetes":
            pod_shape.install()

    def is_launched(self) -> bool:
        """Whether this run has a plan for the step."""
        return self.variable in os.environ

    def at_launch(self, step: StepView) -> None:
        """Plan or size the step, and request its part. Raises FinetuneError."""
        sizes = self._decorator.sizes
        if sizes is None:
            self._plan(step)
            usage.set_sizes(step.name, usage.sizes_of_step(step))
            return
        with user_errors_for_metaflow():
            inference = self._decorator.role == "inference"
            arguments = InferenceArguments(**sizes) if inference else SizeArguments(**sizes)
            StepSizing(arguments=arguments, rightsize=self._decorator.rightsize).at_launch(step)

    def _plan(self, step: StepView) -> None:
        """Plan the step, once for all steps that share a planning function, and request its part."""
        decorator = self._decorator
        lead = step
        if not decorator.options:
            lead = first_step(step, type(decorator), lambda other: other.planned and other.role == "train")
        resolver = decorator.planner or DeclaredPlan(decorator.options)
        with user_errors_for_metaflow():
            options = Options.from_values(step.flow_values())
            note_team(options.team)
            # What was measured on this cluster is looked up by its name
            cluster_name.decide_cluster_name(lead, options.queue if lead.backend() != "local" else None)
            with planning_for(build_destination(lead, options)):
                plan = _plan_with_user_values(resolver, lead, options)
            check_nodes(step, plan.request)
            largest = build_step_request(lead, plan.request, options, minimum_of(plan))
            plan = note_lowered_sizes(plan, largest)
            os.environ[self.variable] = pack(plan)
            if decorator.options:
                print(f"{step.name}: {summarize(plan)}", file=sys.stderr)
            os.environ[resubmitting.MAX_DISRUPTIONS_VARIABLE] = str(options.max_disruptions)
            if decorator.role != "none":
                self._request(step, plan, largest)

    def _request(self, step: StepView, plan: Plan, largest: StepRequest) -> None:
        role = self._decorator.role
        request = request_for(plan, role)
        minimum = largest.minimum if role == "train" else minimum_of_other_step(request)
        step_request = build_step_request(step, request, largest.options, minimum)
        step_request = replace(step_request, on_fabric=role == "train")
        place(step, step_request, largest)
        if role == "train" and step_request.backend != "local" and _metaflow.command() != "deploy":
            Retrying(
                step=step,
                step_request=step_request,
                minimum=minimum_of,
                carry=lambda other: {self.variable: pack(other)},
            ).install()


def _plan_with_user_values(resolver: Resolver, lead: StepView, options: Options) -> Plan:
    """Return the plan, with the user's own values for the training step in it."""
    backend, values = lead.backend(), lead.flow_values()
    if isinstance(resolver, DeclaredPlan):
        declared: dict[str, Any] = {GPUS_PARAMETER: resolver.gpus(values)}

        def resolve(parameters: dict[str, Any]) -> Plan:
            return _plan_once(resolver, values, backend, parameters[GPUS_PARAMETER])

    else:
        declared = values

        def resolve(parameters: dict[str, Any]) -> Plan:
            plan: Any = _plan_once(resolver, parameters, backend)  # the user's function may return anything
            if not isinstance(plan, Plan):
                name = getattr(resolver, "__name__", repr(resolver))
                raise UserError(
                    f"@gpu_profile(plan={name}) returned {type(plan).__name__}, which is not a Plan.",
                    "Return what estimator.plan(...) returns.",
                )
            result: Plan = plan
            return result

    return with_user_values(resolve, declared, user_values_of(lead), backend, options)


def minimum_of(plan: Plan) -> MinimumRequest:
    """Return the minimum request of one training node: one core per process, and the processes' memory."""
    layout = plan.layout
    return MinimumRequest(cpu=layout.processes_per_node, memory_bytes=plan.prediction.memory.host_bytes)


def minimum_of_other_step(request: Request) -> MinimumRequest:
    """Return the minimum request of another step: one core, and the memory that it requests."""
    return MinimumRequest(cpu=1, memory_bytes=request.memory_mib * MIB)
