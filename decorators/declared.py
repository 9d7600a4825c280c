"""Planning by arguments: ``@gpu_profile(model="llama-8b", method="lora")``, options of ``finetune plan``.

Metaflow loads the decorator in every process of a run; the options are checked where the run is launched, so
that the planner is imported only there.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args, get_type_hints

from decorators._metaflow import Backend
from decorators.arguments import OWN_ARGUMENTS, SIZE_ARGUMENTS, Role
from decorators.backends.destination import find_cluster
from estimator import hardware
from estimator.errors import UserError
from estimator.hardware import local_machine
from estimator.names import did_you_mean
from estimator.terminal import print

if TYPE_CHECKING:
    from estimator.cli.plan_options import GoalOptions, JobOptions
    from estimator.hardware.cluster import Cluster
    from estimator.job import Job, Target
    from estimator.plan import Plan

_OPTION = re.compile(r"^--([a-z-]+) (\S+)")  # of `finetune plan`, at the start of a message
_REFERENCE = re.compile(r"\{(\w+)\}")  # to a parameter of the flow
_COMMAND_LINE_ONLY = ("here", "from_cluster", "context", "namespace")  # the run's backend decides these


class DeclaredPlan:
    """Plan a step from the arguments of its decorator.

    Parameters
    ----------
    options:
        Options of ``finetune plan`` by name, dashes as underscores. A text may refer to parameters of the
        flow: ``model="{model}"``. A text that is one reference takes the parameter's value as it is.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = dict(options)

    def gpus(self, parameters: Mapping[str, Any]) -> Any:
        """Return the number of GPUs per node that the arguments ask for, or None."""
        return fill(self.options.get("gpus"), parameters, f"@gpu_profile(gpus={self.options.get('gpus')!r})")

    def __call__(self, parameters: Mapping[str, Any], backend: Backend, gpus: int | None = None) -> Plan:
        """Return the best plan for the step on this backend. ``gpus`` replaces the arguments' own number.

        Raises UserError for an unknown option, a value of the wrong type,
        a reference to a parameter that the flow does not have, and a job that fits nowhere.
        """
        try:
            return self._planned(parameters, backend, gpus)
        except UserError as error:
            error.problem = _OPTION.sub(self._as_argument, error.problem)
            raise

    def _as_argument(self, option: re.Match[str]) -> str:
        """Return an option at the start of a message as the decorator's argument that set it."""
        name, value = option[1].replace("-", "_"), option[2]
        return f"@gpu_profile({name}={value})" if name in self.options else option[0]

    def _planned(self, parameters: Mapping[str, Any], backend: Backend, gpus: int | None) -> Plan:
        from estimator import calibration
        from estimator.cli import plan as command
        from estimator.cli.options import bandwidth_of

        job_options, goal_options = self._resolve(parameters)
        device = self._device(parameters)
        if gpus is not None:
            goal_options = dataclasses.replace(goal_options, gpus=gpus)
        with hardware.using(hardware.catalogue(goal_options.hardware)):
            records, problems = calibration.load(own_loops=True) if goal_options.calibration else (None, ())
            for problem in problems:
                print(problem, file=sys.stderr)
            cluster = find_cluster(backend, goal_options.gpu) if device != "cpu" else None
            goals = dataclasses.replace(
                command.goals_from(goal_options), cluster=cluster.usable if cluster is not None else None
            )
            target = dataclasses.replace(
                command.target_from(goal_options),
                kind=backend,
                machine=local_machine.detect() if backend == "local" else None,
                device=device,
            )
            job = command.job_from(job_options)
            bandwidth = bandwidth_of(goal_options.busbw_intra, goal_options.busbw_inter)
            return _plan(job, target, goals, cluster, records, bandwidth)

    def _device(self, parameters: Mapping[str, Any]) -> Any:
        """Return where to train, unchecked: "cuda", "cpu", or "auto" for GPUs if there are any."""
        device = self.options.get("device", "auto")
        return fill(device, parameters, f"@gpu_profile(device={device!r})")

    def _resolve(self, parameters: Mapping[str, Any]) -> tuple[JobOptions, GoalOptions]:
        """Return the options with the parameters' values in them, converted to their types."""
        from pydantic import TypeAdapter, ValidationError

        from estimator.cli.plan_options import GoalOptions, JobOptions

        kinds = (JobOptions, GoalOptions)
        hints = {name: hint for kind in kinds for name, hint in get_type_hints(kind).items()}
        hints = {name: hint for name, hint in hints.items() if name not in _COMMAND_LINE_ONLY}
        check_names(self.options, [*OWN_ARGUMENTS, *hints, "device"])
        if "model" not in self.options:
            raise UserError(
                f"@gpu_profile({', '.join(f'{name}=' for name in self.options)}) names no model.",
                'Add model="llama-8b", or another name of `finetune models`. '
                f"Without a model it takes {', '.join(SIZE_ARGUMENTS)}.",
            )
        values: dict[str, Any] = {}
        for name, argument in self.options.items():
            if name == "device":
                continue
            value = fill(argument, parameters, f"@gpu_profile({name}={argument!r})")
            if isinstance(value, str) and list[str] in get_args(hints[name]):
                value = [value]
            try:
                values[name] = TypeAdapter(hints[name]).validate_python(value)
            except ValidationError as error:
                reason = error.errors()[0]["msg"]
                raise UserError(
                    f"@gpu_profile({name}={value!r}): {reason[:1].lower()}{reason[1:]}.",
                    f"`finetune plan --help` explains --{name.replace('_', '-')}.",
                ) from None
        return tuple(  # type: ignore[return-value]
            kind(
                **{
                    field.name: values[field.name]
                    for field in dataclasses.fields(kind)
                    if field.name in values
                }
            )
            for kind in kinds
        )


def signature() -> inspect.Signature:
    """Return the signature of ``@gpu_profile``: arguments, sizes and the options of ``finetune plan``."""
    from estimator.cli.plan_options import GoalOptions, JobOptions

    arguments: dict[str, tuple[Any, Any]] = {
        "plan": (Callable[..., Any] | None, None),
        "request": (Role, "train"),
        "interval": (float, 1.0),
        "rightsize": (bool, False),
        "device": (Literal["auto", "cuda", "cpu"], "auto"),
        **dict.fromkeys(SIZE_ARGUMENTS, (int | str | None, None)),
    }
    options = {
        field.name: (hints[field.name], None if field.default is dataclasses.MISSING else field.default)
        for kind, hints in ((kind, get_type_hints(kind)) for kind in (JobOptions, GoalOptions))
        for field in dataclasses.fields(kind)
        if field.name not in _COMMAND_LINE_ONLY
    }
    return inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, (annotation, default) in (arguments | options).items()
        ]
    )


def check_names(arguments: Iterable[str], names: Iterable[str]) -> None:
    """Raise UserError for the first argument of the decorator that it does not have."""
    for name in arguments:
        if name not in names:
            raise UserError(
                f"@gpu_profile has no argument {name}.",
                did_you_mean(name, names) or f"It takes {', '.join(names)}.",
            )


def fill(value: Any, parameters: Mapping[str, Any], where: str) -> Any:
    """Replace references to parameters in a text: ``"{model}"`` by the value of the parameter ``model``."""
    if not isinstance(value, str):
        return value
    for name in _REFERENCE.findall(value):
        if name not in parameters:
            known_parameters = ", ".join(parameters) or "none"
            raise UserError(
                f"{where} refers to a parameter {name} that this flow does not have.",
                f"{did_you_mean(name, parameters, 1)} Its parameters: {known_parameters}.".strip(),
            )
    single_reference = _REFERENCE.fullmatch(value)
    if single_reference:
        return parameters[single_reference[1]]
    return _REFERENCE.sub(lambda reference: str(parameters[reference[1]]), value)


def _plan(job: Job, target: Target, goals: Any, cluster: Cluster | None, prices: Any, bandwidth: Any) -> Plan:
    from estimator.planning import obstacles, planner

    try:
        return planner.plan(job, target, goals, calibration=prices, bandwidth=bandwidth)
    except UserError as error:
        raise error if cluster is None else obstacles.explain(error, job, target, cluster) from None


def summarize(plan: Plan) -> str:
    """Return two lines about a plan: the job and its hardware; memory, speed and price.

    A third line lists the user's own values.
    """
    from estimator.formatting import format_bytes, format_usd

    request, memory, prediction = plan.request, plan.prediction.memory, plan.prediction
    hardware_text = f"{request.gpus_per_node}x {request.gpu_type}" if request.gpus_per_node else "CPUs"
    nodes = f"{request.nodes} nodes of " if request.nodes > 1 else ""
    machine = f" ({request.instance_type})" if request.instance_type else ""
    capacity = f" of {format_bytes(memory.capacity_bytes)}" if memory.capacity_bytes is not None else ""
    unit = "GPU" if plan.layout.device == "cuda" else "process"
    facts = [f"{format_bytes(memory.needs_bytes)}{capacity} memory needed per {unit}"]
    if prediction.tokens_per_second is not None:
        facts.append(f"{prediction.tokens_per_second:,.0f} tokens/s")
    if prediction.usd_per_hour is not None:
        facts.append(f"{format_usd(prediction.usd_per_hour)} per hour")
    job = f"{plan.model}, {plan.method} with {plan.engine}"
    overrides = "; ".join(
        f"{item.name} {item.used} instead of {item.planned} ({item.given_by})" for item in plan.overrides
    )
    lines = [f"{job}, on {nodes}{hardware_text}{machine}", f"  {', '.join(facts)}"]
    return "\n".join([*lines, f"  Overridden: {overrides}"] if overrides else lines)
