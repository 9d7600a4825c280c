"""``@gpu_profile``: give a step the plan, ask for the planned hardware, measure the step, show both.

In a flow::

    @gpu_profile(plan=plan_from_parameters)                  # the whole request
    @gpu_profile(plan=plan_from_parameters, request="none")  # the plan, but no GPUs

or, for any flow at all, ``run --with gpu_profile``: no plan, only measurement.

The plan is made once, where the run is launched, from the values that the flow's parameters have there.
From there it travels in the environment variable ``FINETUNE_PLAN``: local tasks inherit it, containers
get it through ``@environment``. Where the user has written a resource into the flow or behind ``--with``,
that value stands, and the plan records it.
"""

from __future__ import annotations

import base64
import os
import signal
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

from metaflow import StepMutator, UserStepDecorator, current

from decorators import _metaflow
from decorators._metaflow import Backend, FinetuneError, StepView, TrainingFailed
from decorators.backends import cluster_name, resubmitting
from decorators.backends.destination import going_to
from decorators.backends.interface import MinimumRequest, StepRequest
from decorators.backends.job_labels import note_team
from decorators.backends.kubernetes import pod_shape
from decorators.backends.options import Options
from decorators.backends.overrides import Role, request_for, with_given
from decorators.backends.placing import note_room, place
from decorators.backends.retrying import Retrying
from decorators.launch import (
    LaunchMixin,
    Once,
    build_destination,
    build_step_request,
    check_deployable,
    check_nodes,
    first_step,
    given_values,
    refused_in_words,
)
from decorators.profile import calibration
from decorators.profiler import NO_PROFILE, Profile
from decorators.storage import remember_origin
from estimator.errors import UserError
from estimator.plan import MIB, Plan, Request
from launchers.cluster.processes import die_with_parent
from launchers.gang.failures import GangFailed

PLAN_VARIABLE = "FINETUNE_PLAN"
STAGED_VARIABLE = "FINETUNE_STAGED"  # JSON: where a resolver has put local files that the run needs
CARD_REFRESH_SECONDS = 2
Resolver = Callable[[dict[str, Any], Backend], Plan]
_WITH_CARD = ("train", "evaluate", "generate", "score", "compare")

_plan_once = Once()
_active: Profile | None = None


def current_plan() -> Plan | None:
    """The plan that this run was launched with; None where no step of the flow has one."""
    text = os.environ.get(PLAN_VARIABLE)
    return unpack(text) if text else None


def current_profile() -> Profile:
    """The profile of the step that is running; one that ignores everything outside of a profiled step."""
    return _active or NO_PROFILE


def pack(plan: Plan) -> str:
    """A plan as one short word of text: AWS Batch allows 8192 characters for all variables together."""
    return base64.b64encode(zlib.compress(plan.to_json().encode(), 9)).decode()


def unpack(text: str) -> Plan:
    """The plan that :func:`pack` has made text of."""
    return Plan.from_json(zlib.decompress(base64.b64decode(text)).decode())


class gpu_profile(LaunchMixin, StepMutator, UserStepDecorator):  # type: ignore[misc]  # noqa: N801
    """Plan, request and measure a step.

    Parameters
    ----------
    plan:
        ``plan(parameters, backend) -> Plan``, called where the run is launched. ``parameters`` holds the
        flow's parameters and configs by name (dashes as underscores), ``backend`` is ``"local"``,
        ``"kubernetes"`` or ``"batch"``. All steps of a flow share one function. Without it the step is
        only measured.
    request:
        ``"train"``: ask for the planned hardware, show predicted beside measured. ``"encode"``: ask for one
        of its nodes, with all of its GPUs; no card. ``"evaluate"``: ask for the fewest of its GPUs that hold
        the model; the plan predicts training only, so the card shows what was measured. ``"data"``: the disk
        of weights and data, and no GPUs; no card. ``"none"``: carry the plan, ask for nothing, make no card.
    interval:
        Seconds between two samples of the profiler; it takes fewer when sampling is dear.
    """

    carried = (PLAN_VARIABLE, STAGED_VARIABLE)

    def init(self, *args: Any, **kwargs: Any) -> None:
        unknown = set(kwargs) - {"plan", "request", "interval"}
        if args or unknown:
            raise FinetuneError(
                f"@gpu_profile doesn't know {', '.join(sorted(unknown)) or repr(args[0])}.",
                "It takes plan=, request= and interval=.",
            )
        self.resolver: Resolver | None = kwargs.get("plan")
        self.role: Role = kwargs.get("request", "train")
        self.interval = float(kwargs.get("interval", 1.0))
        if self.role not in get_args(Role):
            known = ", ".join(f'"{role}"' for role in get_args(Role))
            raise FinetuneError(f'@gpu_profile(request="{self.role}"): it is one of {known}.')
        if self.interval <= 0:
            raise FinetuneError(f"@gpu_profile(interval={self.interval:g}): it must be above 0 seconds.")

    def mutate(self, mutable_step: Any) -> None:
        """Called by Metaflow in every process that loads the flow; plans only where a run is launched."""
        self.external_init()  # Metaflow leaves this out for decorators given after --with
        _metaflow.leave_bytecode_out()
        step = StepView(mutable_step)
        if self.role in _WITH_CARD:
            step.add_card(CARD_REFRESH_SECONDS)
        if self.resolver is not None and self.launch_or_carry(step) and step.backend() == "kubernetes":
            pod_shape.install()

    def is_launched(self) -> bool:
        """Whether this run has a plan."""
        return PLAN_VARIABLE in os.environ

    def at_launch(self, step: StepView) -> None:
        """Make the plan, once for all steps, and ask for what this step needs of it."""
        if self.resolver is None:
            return
        check_deployable(step)
        lead = first_step(step, gpu_profile, lambda each: each.resolver is not None and each.role == "train")
        with refused_in_words():
            options = Options.from_values(step.flow_values())
            note_team(options.team)
            # What was measured on this cluster is looked up by its name
            cluster_name.settle(lead, options.queue if lead.backend() != "local" else None)
            with going_to(build_destination(lead, options)):
                plan = _plan_with_given(self.resolver, lead, options)
            check_nodes(step, plan.request)
            largest = build_step_request(lead, plan.request, options, _minimum(plan))
            plan = note_room(plan, largest)
            os.environ[PLAN_VARIABLE] = pack(plan)
            os.environ[resubmitting.MOST_VARIABLE] = str(options.max_disruptions)
            if self.role != "none":
                self._request(step, plan, largest)

    def _request(self, step: StepView, plan: Plan, largest: StepRequest) -> None:
        request = request_for(plan, self.role)
        minimum = largest.minimum if self.role == "train" else _minimum_beside(request)
        step_request = build_step_request(step, request, largest.options, minimum)
        step_request = replace(step_request, on_fabric=self.role == "train")
        place(step, step_request, largest)
        if self.role == "train" and step_request.backend != "local" and _metaflow.command() != "deploy":
            Retrying(
                step=step,
                step_request=step_request,
                minimum=_minimum,
                carry=lambda other: {PLAN_VARIABLE: pack(other)},
            ).install()

    def pre_step(self, step_name: str, flow: Any, inputs: Any = None) -> None:  # noqa: ARG002
        """Called by Metaflow in the task, before the step's code."""
        global _active
        if not _metaflow.in_container():
            die_with_parent(os.getppid(), signal.SIGTERM)
            _metaflow.ensure_python()
        remember_origin()
        # The plan predicts training: beside anything else its figures would mislead.
        plan = current_plan() if self.resolver is not None and self.role == "train" else None
        card = _metaflow.card() if self.role in _WITH_CARD else None
        about = current_plan() if self.resolver is not None else None
        _active = Profile(plan=plan, step=step_name, interval_s=self.interval, card=card, about=about)
        _active.start()

    def post_step(
        self,
        step_name: str,  # noqa: ARG002
        flow: Any,  # noqa: ARG002
        exception: Exception | None = None,
    ) -> tuple[Exception | None, None]:
        """Called by Metaflow in the task, after the step's code, whether it has failed or not."""
        if _active is not None:
            _active.stop(failed=_headline(exception))
            if exception is None:
                _keep(_active)
        return _clean(exception), None


def _keep(profile: Profile) -> None:
    """What was measured corrects later estimates."""
    problem = calibration.keep(
        profile.plan, profile.measured(), run=current.pathspec, in_container=_metaflow.in_container()
    )
    if problem:
        print(problem, file=sys.stderr, flush=True)


def _clean(exception: Exception | None) -> Exception | None:
    """What the terminal shows: no traceback of the flow's where it says nothing about the cause."""
    if isinstance(exception, UserError):
        return _metaflow.final(exception)
    if isinstance(exception, GangFailed):
        return TrainingFailed(str(exception))
    if type(exception) is Exception and str(exception).startswith("Subprocess failed, return code"):
        return FinetuneError("Another node of this step has failed.", "Its own message is above.")
    return exception


def _headline(exception: Exception | None) -> str | None:
    if exception is None:
        return None
    if isinstance(exception, (UserError, FinetuneError)):
        return exception.problem
    return f"{type(exception).__name__}: {exception}"


def _plan_with_given(resolver: Resolver, lead: StepView, options: Options) -> Plan:
    """The run's plan, with the user's own values for the training step in it."""
    backend = lead.backend()
    return with_given(
        lambda parameters: _plan_once(resolver, parameters, backend),
        lead.flow_values(),
        given_values(lead),
        backend,
        options,
    )


def _minimum(plan: Plan) -> MinimumRequest:
    """What one node of a plan can't do without: a core for each process, and what they hold in memory."""
    layout = plan.layout
    return MinimumRequest(cpu=layout.processes_per_node, memory_bytes=plan.prediction.memory.host_bytes)


def _minimum_beside(request: Request) -> MinimumRequest:
    """What a step beside training can't do without: a core, and its share of what it asks for."""
    return MinimumRequest(cpu=1, memory_bytes=request.memory_mib * MIB)
