"""``@gpu_profile``: plan a step, request the planned hardware, measure the step, and show both on a card.

In a flow::

    @gpu_profile(model="llama-8b", method="lora")            # options of `finetune plan`
    @gpu_profile(plan=plan_from_parameters)                  # a planning function, shared by the flow's steps
    @gpu_profile(plan=plan_from_parameters, request="none")  # carry the plan, request no GPUs
    @gpu_profile(memory="40GiB", gpus=2)                     # the cheapest machine that has these
    @gpu_profile(rightsize=True)                             # what earlier runs of the step used

or, for any flow, ``run --with gpu_profile``: only measure.

Plans are made once, at launch, from the values of the flow's parameters. They are passed on in environment
variables (``FINETUNE_PLAN``, or ``FINETUNE_PLAN_<STEP>`` for a step with separate options): local tasks
inherit them, containers get them through ``@environment``. A resource that the user sets in the flow or with
``--with`` takes precedence, and the plan records it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any, get_args

from metaflow import StepMutator, UserStepDecorator, current

from decorators import _metaflow, usage
from decorators._metaflow import Backend, FinetuneError, StepView, TrainingFailed
from decorators.backends import cluster_name, resubmitting
from decorators.backends.destination import planning_for
from decorators.backends.interface import MinimumRequest, StepRequest
from decorators.backends.job_labels import note_team
from decorators.backends.kubernetes import pod_shape
from decorators.backends.options import Options
from decorators.backends.overrides import GPUS_PARAMETER, Role, request_for, with_user_values
from decorators.backends.placing import note_lowered_sizes, place
from decorators.backends.retrying import Retrying
from decorators.declared import OWN_ARGUMENTS, SIZE_ARGUMENTS, DeclaredPlan, summarize
from decorators.launch import (
    LaunchMixin,
    Once,
    build_destination,
    build_step_request,
    check_deployable,
    check_nodes,
    first_step,
    user_errors_for_metaflow,
    user_values_of,
)
from decorators.own_checkpoints import foreach_index
from decorators.profile import calibration
from decorators.profiler import NO_PROFILE, Profile, RankProfile
from decorators.storage import remember_origin
from estimator import untrusted
from estimator.errors import MISTAKE, UserError
from estimator.plan import MIB, Plan, Request
from launchers.cluster.processes import die_with_parent
from launchers.gang.failures import GangFailed
from launchers.report.telemetry import TELEMETRY_VARIABLE

PLAN_VARIABLE = "FINETUNE_PLAN"
STAGED_VARIABLE = "FINETUNE_STAGED"  # JSON: where a resolver has uploaded local files that the run needs
CARD_REFRESH_SECONDS = 2
Resolver = Callable[[dict[str, Any], Backend], Plan]
_WITH_CARD = ("train", "evaluate", "generate", "score", "compare")

_plan_once = Once()
_active: Profile | None = None


def current_plan() -> Plan | None:
    """Return the plan of the running step, or the plan shared by the flow's steps; None without a plan."""
    own = os.environ.get(_variable_of(current.step_name)) if current.is_running_flow else None
    text = own or os.environ.get(PLAN_VARIABLE)
    return unpack(text) if text else None


def current_profile() -> Profile:
    """Return the running step's profile; in a rank of ``torchrun`` one that reports to it; outside of a step
    a profile that does nothing.
    """
    global _active
    folder = os.environ.get(TELEMETRY_VARIABLE)
    if _active is None and folder:
        _active = RankProfile(Path(folder))
    return _active or NO_PROFILE


def _variable_of(step: str) -> str:
    """Return the name of the environment variable for the plan of a step with separate options."""
    return f"{PLAN_VARIABLE}_{step.upper()}"


def pack(plan: Plan) -> str:
    """Serialize a plan to a short string."""
    return untrusted.pack(plan.to_json())


def unpack(text: str) -> Plan:
    """Deserialize a plan from the output of :func:`pack`; raises UserError if it is damaged."""
    try:
        return Plan.from_json(untrusted.unpack(text))
    except ValueError as error:
        raise UserError(
            f"The plan in {PLAN_VARIABLE} can't be read: {error}.",
            "Launch the run again, or deploy the flow anew.",
        ) from None


class gpu_profile(LaunchMixin, StepMutator, UserStepDecorator):  # type: ignore[misc]  # noqa: N801
    """Plan, request and measure a step.

    Parameters
    ----------
    model, method, seq_len, global_batch_size, gpu, gpus, nodes, ...:
        Options of ``finetune plan``, with the same names and types (dashes as underscores): the training job
        that the step is planned for. A text may refer to the flow's parameters: ``model="{model}"``.
    plan:
        ``plan(parameters, backend) -> Plan``, called where the run is launched. ``parameters`` holds the
        flow's parameters and configs by name (dashes as underscores), ``backend`` is ``"local"``,
        ``"kubernetes"`` or ``"batch"``. All steps of a flow share one function. Without it the step is
        only measured.
    request:
        ``"train"``: request the planned hardware, show predicted and measured values. ``"encode"``: request
        one of its nodes with all GPUs; no card. ``"evaluate"``: request the fewest of its GPUs that hold the
        model; the plan predicts training only, so the card shows measured values. ``"data"``: request disk
        for weights and data, no GPUs; no card. ``"none"``: pass on the plan, request nothing; no card.
    cpu, memory, gpus, gpu, gpu_memory:
        Without a model: sizes of each node, such as ``memory="40GiB"``. The step runs on the cheapest machine
        or node that has them.
    rightsize:
        Request the resources that earlier tasks of the same step with comparable parameters used, instead of
        those in the flow; more after a task that ran out of memory. ``--with`` takes precedence.
    interval:
        Seconds between two samples of the profiler; longer if sampling uses too much CPU time.
    """

    carried: tuple[str, ...] = (PLAN_VARIABLE, STAGED_VARIABLE)
    variable = PLAN_VARIABLE  # variable that holds the plan

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _check_above_step(*args[:1])
        super().__init__(*args, **kwargs)

    def __call__(self, step: Any = None, **kwargs: Any) -> Any:
        """Called by Python with the decorated step."""
        _check_above_step(*([] if step is None else [step]))
        return super().__call__(step, **kwargs)

    def init(self, *args: Any, **kwargs: Any) -> None:
        if args:
            raise FinetuneError(
                f"@gpu_profile({args[0]!r}): arguments must be named.",
                'Write @gpu_profile(model="llama-8b"), above @step.',
            )
        options = {name: value for name, value in kwargs.items() if name not in OWN_ARGUMENTS}
        planner = kwargs.get("plan")
        if options and planner is not None:
            raise FinetuneError(
                f"@gpu_profile takes either plan= or {', '.join(f'{name}=' for name in options)}.",
                "Give a planning function, or options of `finetune plan`.",
            )
        sizes = {} if set(options) - set(SIZE_ARGUMENTS) else options
        self.resolver: Resolver | None = DeclaredPlan(options) if options and not sizes else planner
        self.rightsize = _switch("rightsize", kwargs.get("rightsize", False))
        self.sizes: dict[str, Any] | None = sizes if sizes or self.rightsize else None
        if self.rightsize and self.resolver is not None:
            raise FinetuneError(
                "@gpu_profile(rightsize=True) has no plan: the step's history decides.",
                "Leave out either rightsize= or the plan's arguments.",
            )
        self.role: Role = kwargs.get("request", "train")
        self.interval = float(kwargs.get("interval", 1.0))
        if self.role not in get_args(Role):
            roles = ", ".join(f'"{role}"' for role in get_args(Role))
            raise FinetuneError(f'@gpu_profile(request="{self.role}"): must be one of {roles}.')
        if self.interval <= 0:
            raise FinetuneError(f"@gpu_profile(interval={self.interval:g}): must be above 0 seconds.")

    def mutate(self, mutable_step: Any) -> None:
        """Called by Metaflow in every process that loads the flow; plans only at launch."""
        self.external_init()  # Metaflow does not call this for decorators given with --with
        _metaflow.exclude_bytecode()
        step = StepView(mutable_step)
        if isinstance(self.resolver, DeclaredPlan):
            self.variable = _variable_of(step.name)
            self.carried = (self.variable, STAGED_VARIABLE)
        if self.sizes is not None:
            self.variable = usage.SIZES_VARIABLE
            self.carried = ()  # each step's own sizes alone
        if self.role in _WITH_CARD:
            step.add_card(CARD_REFRESH_SECONDS)
        self._parameters = step.parameter_variables()
        kind = _metaflow.command()
        launches = kind in ("run", "resume", "deploy")
        if launches:
            usage.set_sizes(step.name, usage.sizes_of_step(step))
        planned = self.resolver is not None or self.sizes is not None
        if planned and self.decide_or_apply(step) and step.backend() == "kubernetes":
            pod_shape.install()
        if launches and self.resolver is not None:
            usage.set_sizes(step.name, usage.sizes_of_step(step))
        if step.backend() != "local" and kind in ("deploy", "trampoline"):
            variables = usage.sizes_variable(step.name)
            if variables:
                step.add_environment(variables)

    def is_launched(self) -> bool:
        """Whether this run has a plan for the step."""
        return self.variable in os.environ

    def at_launch(self, step: StepView) -> None:
        """Plan the step, once for all steps that share a planning function, and request its hardware."""
        if self.sizes is not None:
            from decorators.sizing import SizeArguments, StepSizing

            with user_errors_for_metaflow():
                sizing = StepSizing(arguments=SizeArguments(**self.sizes), rightsize=self.rightsize)
                sizing.at_launch(step)
        if self.resolver is None:
            return
        check_deployable(step)
        lead = (
            step
            if isinstance(self.resolver, DeclaredPlan)
            else first_step(step, gpu_profile, _plans_training)
        )
        with user_errors_for_metaflow():
            options = Options.from_values(step.flow_values())
            note_team(options.team)
            # Measurements of this cluster are found by its name
            cluster_name.decide_cluster_name(lead, options.queue if lead.backend() != "local" else None)
            with planning_for(build_destination(lead, options)):
                plan = _plan_with_user_values(self.resolver, lead, options)
            check_nodes(step, plan.request)
            largest = build_step_request(lead, plan.request, options, _minimum(plan))
            plan = note_lowered_sizes(plan, largest)
            os.environ[self.variable] = pack(plan)
            if isinstance(self.resolver, DeclaredPlan):
                print(f"{step.name}: {summarize(plan)}", file=sys.stderr)
            os.environ[resubmitting.MAX_DISRUPTIONS_VARIABLE] = str(options.max_disruptions)
            if self.role != "none":
                self._request(step, plan, largest)

    def _request(self, step: StepView, plan: Plan, largest: StepRequest) -> None:
        request = request_for(plan, self.role)
        minimum = largest.minimum if self.role == "train" else _minimum_of_step(request)
        step_request = build_step_request(step, request, largest.options, minimum)
        step_request = replace(step_request, on_fabric=self.role == "train")
        place(step, step_request, largest)
        if self.role == "train" and step_request.backend != "local" and _metaflow.command() != "deploy":
            Retrying(
                step=step,
                step_request=step_request,
                minimum=_minimum,
                carry=lambda other: {self.variable: pack(other)},
            ).install()

    def pre_step(self, step_name: str, flow: Any, inputs: Any = None) -> None:  # noqa: ARG002
        """Called by Metaflow in the task, before the step's code."""
        global _active
        if not _metaflow.in_container():
            die_with_parent(os.getppid(), signal.SIGTERM)
            _metaflow.ensure_python()
        remember_origin()
        # The plan predicts training, so for other steps its figures would be misleading.
        plan = current_plan() if self.resolver is not None and self.role == "train" else None
        card = _metaflow.card() if self.role in _WITH_CARD else None
        about = current_plan() if self.resolver is not None else None
        _active = Profile(
            plan=plan,
            step=step_name,
            interval_s=self.interval,
            card=card,
            about=about,
            index=foreach_index(flow),
        )
        _metaflow.set_current("gpu_profile", _active)
        _active.start()
        self._recorder = usage.UsageRecorder(
            {
                "flow": current.flow_name,
                "step": step_name,
                "run": str(current.run_id),
                "task": str(current.task_id),
                "attempt": int(current.retry_count),
            },
            usage.digest_parameters({name: getattr(flow, own) for name, own in self._parameters.items()}),
        )
        self._recorder.start(_active.measured)

    def post_step(
        self,
        step_name: str,  # noqa: ARG002
        flow: Any,  # noqa: ARG002
        exception: Exception | None = None,
    ) -> tuple[Exception | None, None]:
        """Called by Metaflow in the task, after the step's code has succeeded or failed."""
        if _active is not None:
            _active.stop(failed=_headline(exception))
            self._recorder.stop(_active.measured(), exception)
            if exception is None:
                _store_measurements(_active)
        return _displayed_error(exception), None


def _store_measurements(profile: Profile) -> None:
    """Store the measurements for the calibration of later estimates."""
    problem = calibration.keep(
        profile.plan, profile.measured(), run=current.pathspec, in_container=_metaflow.in_container()
    )
    if problem:
        print(problem, file=sys.stderr, flush=True)


def _displayed_error(exception: Exception | None) -> Exception | None:
    """Convert an exception for the terminal: without a traceback if that would not show the cause."""
    if isinstance(exception, UserError):
        return _metaflow.without_retry(exception)
    if isinstance(exception, GangFailed):
        return TrainingFailed(str(exception))
    if type(exception) is Exception and str(exception).startswith("Subprocess failed, return code"):
        return FinetuneError("Another node of this step failed.", "See its message above.")
    return exception


def _headline(exception: Exception | None) -> str | None:
    if exception is None:
        return None
    if isinstance(exception, (UserError, FinetuneError)):
        return exception.problem
    return f"{type(exception).__name__}: {exception}"


def _switch(name: str, value: Any) -> bool:
    """Return a switch, which ``--with gpu_profile:rightsize=true`` gives as text."""
    known = {"true": True, "false": False}
    if str(value).lower() not in known:
        raise FinetuneError(f"@gpu_profile({name}={value!r}): it is true or false.")
    return known[str(value).lower()]


def _check_above_step(*decorated: Any) -> None:
    """Exit with one line if the decorator is below ``@step``, where Metaflow would ignore it."""
    function = decorated[0] if decorated else None
    if isinstance(function, FunctionType) and not hasattr(function, "is_step"):
        print(f"@gpu_profile must be above @step of {function.__name__}.", file=sys.stderr)
        raise SystemExit(MISTAKE)


def _plans_training(decorator: gpu_profile) -> bool:
    return decorator.resolver is not None and decorator.role == "train"


def _plan_with_user_values(resolver: Resolver, lead: StepView, options: Options) -> Plan:
    """Return the plan with the user's values for the training step."""
    backend, values = lead.backend(), lead.flow_values()
    if isinstance(resolver, DeclaredPlan):
        declared = {GPUS_PARAMETER: resolver.gpus(values)}

        def resolve(parameters: dict[str, Any]) -> Plan:
            return _plan_once(resolver, values, backend, parameters[GPUS_PARAMETER])

    else:
        declared = values

        def resolve(parameters: dict[str, Any]) -> Plan:
            return _plan_once(resolver, parameters, backend)

    return with_user_values(resolve, declared, user_values_of(lead), backend, options)


def _minimum(plan: Plan) -> MinimumRequest:
    """Return the minimum request of one training node: one core per process, and the processes' memory."""
    layout = plan.layout
    return MinimumRequest(cpu=layout.processes_per_node, memory_bytes=plan.prediction.memory.host_bytes)


def _minimum_of_step(request: Request) -> MinimumRequest:
    """Return the minimum request of a step other than training: one core, and the requested memory."""
    return MinimumRequest(cpu=1, memory_bytes=request.memory_mib * MIB)
