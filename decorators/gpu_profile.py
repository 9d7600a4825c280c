"""``@gpu_profile``: plan a step, request the planned hardware, measure the step, and show both on a card.

In a flow::

    @gpu_profile(model="llama-8b", method="lora")            # options of `finetune plan`
    @gpu_profile(plan=plan_from_parameters)                  # a planning function, shared by the flow's steps
    @gpu_profile(plan=plan_from_parameters, request="none")  # pass on the plan, request no GPUs
    @gpu_profile(memory="40GiB", gpus=2)                     # the cheapest machine that has these
    @gpu_profile(rightsize=True)                             # what earlier runs of the step used

or, for any flow, ``run --with gpu_profile``: only measure.

Plans are made once, at launch, from the values of the flow's parameters. They are passed on in environment
variables (``FINETUNE_PLAN``, or ``FINETUNE_PLAN_<STEP>`` for a step with separate options): local tasks
inherit them, containers get them through ``@environment``. A resource that the user sets in the flow or with
``--with`` takes precedence, and the plan records it.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, get_args

from metaflow import StepMutator, UserStepDecorator, current

from decorators import _metaflow, usage
from decorators._metaflow import FinetuneError, StepView, TrainingFailed
from decorators.arguments import INFERENCE_ARGUMENTS, OWN_ARGUMENTS, SIZE_ARGUMENTS, Role
from decorators.own_checkpoints import foreach_index
from decorators.packed_plan import PLAN_VARIABLE, unpack, variable_of
from decorators.profiler import NO_PROFILE, Profile, RankProfile
from decorators.storage import remember_origin
from estimator.errors import USER_ERROR_STATUS, UserError
from estimator.masking import mask_secrets
from estimator.plan import Plan
from estimator.terminal import print
from launchers.cluster.processes import die_with_parent
from launchers.gang.failures import GangFailed
from launchers.report.telemetry import TELEMETRY_VARIABLE

CARD_REFRESH_SECONDS = 2
_WITH_CARD = ("train", "evaluate", "generate", "score", "compare", "inference")

_active: Profile | None = None


def current_plan() -> Plan | None:
    """Return the plan of the running step, or the one that the flow's steps share; None without a plan."""
    packed = os.environ.get(variable_of(current.step_name)) if current.is_running_flow else None
    text = packed or os.environ.get(PLAN_VARIABLE)
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


class gpu_profile(StepMutator, UserStepDecorator):  # type: ignore[misc]  # noqa: N801
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
        ``"train"``: request the planned hardware; the card shows predicted and measured values.
        ``"encode"``: request one of the planned nodes, with all of its GPUs; no card.
        ``"evaluate"``: request the fewest of the planned GPUs that hold the model; the card shows measured
        values only, because the plan predicts training.
        ``"generate"``, ``"score"``, ``"compare"``: the stages of rejection sampling.
        ``"inference"``, with ``model=`` and ``seq_len=``: request the cheapest GPUs that hold the model to
        generate answers.
        ``"data"``: request the disk for weights and data, without GPUs; no card.
        ``"none"``: pass on the plan, request nothing; no card.
    cpu, memory, gpus, gpu, gpu_memory:
        Without a model: sizes of each node, such as ``memory="40GiB"``. The step runs on the cheapest machine
        or node that has them.
    rightsize:
        Request the resources that earlier tasks of the same step with comparable parameters used, instead of
        those in the flow; more after a task that ran out of memory. ``--with`` takes precedence.
    interval:
        Seconds between two samples of the profiler; longer if sampling uses too much CPU time.
    """

    variable = PLAN_VARIABLE  # environment variable with the step's plan or sizes

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
        self.planner: Callable[..., Plan] | None = kwargs.get("plan")
        if options and self.planner is not None:
            raise FinetuneError(
                f"@gpu_profile takes either plan= or {', '.join(f'{name}=' for name in options)}.",
                "Give a planning function, or options of `finetune plan`.",
            )
        if self.planner is not None and not callable(self.planner):
            raise FinetuneError(
                f"@gpu_profile(plan={self.planner!r}): must be a function.",
                "Give a function plan(parameters, backend) that returns a Plan.",
            )
        allowed = INFERENCE_ARGUMENTS if kwargs.get("request") == "inference" else SIZE_ARGUMENTS
        sizes = {} if set(options) - set(allowed) else options
        self.options: dict[str, Any] = {} if sizes else options
        self.rightsize = _switch("rightsize", kwargs.get("rightsize", False))
        self.sizes: dict[str, Any] | None = sizes if sizes or self.rightsize else None
        if self.rightsize and self.planned:
            raise FinetuneError(
                "@gpu_profile(rightsize=True) has no plan: the step's history decides.",
                "Leave out either rightsize= or the plan's arguments.",
            )
        self.role: Role = kwargs.get("request", "train")
        self.interval = _seconds("interval", kwargs.get("interval", 1.0))
        if self.role not in get_args(Role):
            roles = ", ".join(f'"{role}"' for role in get_args(Role))
            raise FinetuneError(f'@gpu_profile(request="{self.role}"): must be one of {roles}.')

    def mutate(self, mutable_step: Any) -> None:
        """Called by Metaflow in every process that loads the flow; plans only at launch."""
        self.external_init()  # Metaflow does not call this for decorators given with --with
        _metaflow.exclude_bytecode()
        _metaflow.mask_errors()
        step = StepView(mutable_step)
        if self.options:
            self.variable = variable_of(step.name)
        if self.sizes is not None:
            self.variable = usage.SIZES_VARIABLE
        if self.role in _WITH_CARD:
            step.add_card(CARD_REFRESH_SECONDS)
        self._parameters = step.parameter_variables()
        kind = _metaflow.command()
        if kind in ("run", "resume", "deploy"):
            usage.set_sizes(step.name, usage.sizes_of_step(step))
        if kind not in ("task", "other") and (self.planned or self.sizes is not None):
            from decorators.step_launch import StepLaunch

            StepLaunch(self).launch(step)
        sizes = usage.sizes_variable(step.name)
        if sizes and step.backend() != "local" and kind in ("deploy", "trampoline"):
            step.add_environment(sizes)

    @property
    def planned(self) -> bool:
        """Whether the step has a plan."""
        return bool(self.options) or self.planner is not None

    def pre_step(self, step_name: str, flow: Any, inputs: Any = None) -> None:  # noqa: ARG002
        """Called by Metaflow in the task, before the step's code."""
        global _active
        if not _metaflow.in_container():
            die_with_parent(os.getppid(), signal.SIGTERM)
            _metaflow.ensure_python()
        remember_origin()
        # The plan predicts training, so its figures are not shown for steps that do something else
        plan = current_plan() if self.planned and self.role == "train" else None
        card = _metaflow.card() if self.role in _WITH_CARD else None
        about = current_plan() if self.planned else None
        _active = Profile(
            plan=plan,
            step=step_name,
            interval_s=self.interval,
            card=card,
            about=about,
            index=foreach_index(flow),
        )
        _metaflow.set_current("gpu_profile", _active)
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
        _active.compare_requests(self._recorder)
        _active.start()
        self._recorder.start(_active.measured)

    def post_step(
        self,
        step_name: str,  # noqa: ARG002
        flow: Any,  # noqa: ARG002
        exception: Exception | None = None,
    ) -> tuple[Exception | None, None]:
        """Called by Metaflow in the task, after the step's code has succeeded or failed."""
        if _active is not None:
            _active.stop(failed=_headline(exception), ending=usage.ending_of(exception))
            self._recorder.stop(_active.measured(), exception)
            if exception is None:
                _store_measurements(_active)
        return _displayed_error(exception), None


def _store_measurements(profile: Profile) -> None:
    """Store the measurements, which correct later estimates; not those of a loop that trained no model."""
    plan = profile.predicted
    if plan is None or profile.loop_without_torch:
        return
    from decorators.profile import calibration

    problem = calibration.store(
        plan, profile.measured(), run=current.pathspec, in_container=_metaflow.in_container()
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
        return mask_secrets(exception.problem)
    return mask_secrets(f"{type(exception).__name__}: {exception}")


def _switch(name: str, value: Any) -> bool:
    """Return a switch, which ``--with gpu_profile:rightsize=true`` gives as text."""
    values = {"true": True, "false": False}
    if str(value).lower() not in values:
        raise FinetuneError(f"@gpu_profile({name}={value!r}): must be true or false.")
    return values[str(value).lower()]


def _seconds(name: str, value: Any) -> float:
    """Return a positive, finite number of seconds, which ``--with gpu_profile:interval=2`` gives as text."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise FinetuneError(f"@gpu_profile({name}={value!r}): must be a number of seconds above 0.")
    return seconds


def _check_above_step(*decorated: Any) -> None:
    """Exit with one line if the decorator is below ``@step``, where Metaflow would ignore it."""
    function = decorated[0] if decorated else None
    if isinstance(function, FunctionType) and not hasattr(function, "is_step"):
        print(f"@gpu_profile must be above @step of {function.__name__}.", file=sys.stderr)
        raise SystemExit(USER_ERROR_STATUS)
