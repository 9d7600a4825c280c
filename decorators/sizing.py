"""Requests of steps without a plan: sizes declared by the user, or measured in earlier tasks of the step.

``@gpu_profile(memory="40GiB", gpus=2)`` requests the cheapest machine or node with these sizes.
``@gpu_profile(rightsize=True)`` replaces the sizes in the flow by those of its history.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from decorators import _metaflow, usage
from decorators._metaflow import StepView, before_retry
from decorators.backends.destination import find_cluster, planning_for
from decorators.backends.interface import MinimumRequest, StepRequest
from decorators.backends.job_labels import note_team
from decorators.backends.options import Options
from decorators.backends.overrides import apply_user_values
from decorators.backends.placing import place
from decorators.backends.retrying import place_again
from decorators.declared import fill
from decorators.launch import build_destination, build_step_request
from estimator import hardware, models
from estimator.errors import UserError
from estimator.hardware import local_machine
from estimator.hardware.cluster.quantities import quantity
from estimator.inference import serving
from estimator.job import Target
from estimator.memory.evaluation import inference_bytes, inference_host_bytes
from estimator.plan import MIB, Request
from estimator.planning.goals import Goals
from estimator.rightsizing import machines
from estimator.rightsizing.machines import Needs, choose_machine, needs_of
from estimator.rightsizing.recommend import Recommendation, recommend
from estimator.rightsizing.usage import Sizes
from estimator.terminal import print

INFERENCE_GPUS = (1, 2, 4, 8)  # GPU counts over which one copy of a model is split, layer by layer
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)B?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeArguments:
    """Sizes of each node from the decorator's arguments. A text may refer to the flow's parameters."""

    cpu: Any = None
    memory: Any = None  # host memory: "40GiB"
    gpus: Any = None
    gpu: Any = None
    gpu_memory: Any = None  # memory per GPU: "24GiB"

    def choices(self, parameters: Mapping[str, Any], *, on_cpu: bool) -> tuple[list[Needs], str | None]:  # noqa: ARG002
        """Return the needs, if there are any, and the GPU's name. Raises UserError for what is no size."""
        needs, gpu = self.needs(parameters)
        return ([] if needs == Needs() else [needs]), gpu

    def needs(self, parameters: Mapping[str, Any]) -> tuple[Needs, str | None]:
        """Return the needs and the GPU's name. Raises UserError for a value that is not a size."""
        values = {
            item.name: fill(getattr(self, item.name), parameters, f"@gpu_profile({item.name}=)")
            for item in fields(self)
        }
        memory, gpu_memory = (_bytes(name, values[name]) for name in ("memory", "gpu_memory"))
        needs_gpu = values["gpu"] is not None or gpu_memory is not None
        gpus = _count("gpus", values["gpus"]) if values["gpus"] is not None else int(needs_gpu)
        cpu = None if values["cpu"] is None else _count("cpu", values["cpu"])
        gpu = None if values["gpu"] is None else str(values["gpu"])
        needs = Needs(
            cpu=cpu,
            memory_mib=None if memory is None else -(-memory // MIB),
            gpus=gpus,
            gpu_memory_bytes=gpu_memory,
        )
        return needs, gpu


@dataclass(frozen=True, kw_only=True, slots=True)
class InferenceArguments:
    """Model that a step generates answers with: ``@gpu_profile(model=..., request="inference")``."""

    model: Any = None
    seq_len: Any = None  # tokens of a prompt with its answer
    gpus: Any = None
    gpu: Any = None

    def choices(self, parameters: Mapping[str, Any], *, on_cpu: bool) -> tuple[list[Needs], str | None]:
        """Return the needs for each number of GPUs that may hold the model, and the GPU's name.

        Raises UserError for an unknown model.
        """
        values = {
            item.name: fill(getattr(self, item.name), parameters, f"@gpu_profile({item.name}=)")
            for item in fields(self)
        }
        if values["model"] is None:
            return [], None
        model = models.resolve(str(values["model"])).spec
        length = serving.context_of(model, None if values["seq_len"] is None else int(values["seq_len"]))
        gpu = None if values["gpu"] is None else str(values["gpu"])
        if on_cpu and values["gpus"] is None and gpu is None:
            memory = serving.serving_memory(model, device="cpu", gpus=1, context=length, requests=1)
            return [Needs(memory_mib=-(-sum(memory.values()) // MIB))], None
        counts = INFERENCE_GPUS if values["gpus"] is None else (_count("gpus", values["gpus"]),)
        return [
            Needs(
                gpus=count,
                gpu_memory_bytes=inference_bytes(model, count, length),
                memory_mib=-(-inference_host_bytes(model, count, 2**63, length) // MIB),
            )
            for count in counts
        ], gpu


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSizing:
    """Sizing of a step without a plan: by the declared arguments, or by its history if there is one."""

    arguments: SizeArguments | InferenceArguments
    rightsize: bool

    def at_launch(self, step: StepView) -> None:
        """Request the step's sizes, and print one line with the request and its reason. Raises UserError."""
        options = Options.from_values(step.flow_values())
        note_team(options.team)
        current_sizes = usage.sizes_of_step(step)
        recommendation = self._recommend(step) if self.rightsize else None
        request = self._request(step, options, recommendation)
        if request is None:
            print(
                f"{step.name}: no comparable earlier task; sizes in the flow are unchanged.", file=sys.stderr
            )
            return
        step_request = self._step_request(step, request, options)
        place(step, step_request)
        # A larger value in the flow's @kubernetes or @batch would take precedence over @resources
        compute = step.user_values(step_request.backend) if step_request.backend != "local" else {}
        resources = step.values("resources")
        lowered = {name: resources[name] for name in compute if name in ("cpu", "memory", "gpu")}
        if lowered and self.rightsize:
            step.set_values(step_request.backend, lowered)
        sizes = _sizes_of(step_request.request)
        usage.set_sizes(step.name, sizes)
        if recommendation is not None:
            previous = (
                f" instead of {current_sizes.describe()}"
                if current_sizes.cpu or current_sizes.memory_mib
                else ""
            )
            print(f"{step.name}: {sizes.describe()}{previous} ({recommendation.reason})", file=sys.stderr)
        else:
            machine = f" ({request.instance_type})" if request.instance_type else ""
            print(f"{step.name}: {sizes.describe()}{machine}", file=sys.stderr)
        if self.rightsize and step_request.backend != "local" and _metaflow.command() != "deploy":
            before_retry(step, step_request.backend, NextAttempt(step, step_request).prepare)

    def _recommend(self, step: StepView) -> Recommendation | None:
        values = step.parameter_values()
        parameters = usage.digest_parameters({name: values[name] for name in step.parameter_variables()})
        os.environ[usage.PARAMETERS_VARIABLE] = json.dumps(parameters)
        return recommend(_history(step.name), parameters)

    def _request(
        self, step: StepView, options: Options, recommendation: Recommendation | None
    ) -> Request | None:
        """Return the request; None if there is neither a history nor an argument."""
        backend = step.backend()
        if recommendation is not None:
            return _request_of(recommendation, step, options)
        local = backend == "local"
        choices, gpu = self.arguments.choices(
            step.flow_values(), on_cpu=local and not local_machine.has_gpus()
        )
        requests = []
        for number, needs in enumerate(choices):
            try:
                requests.append(_cheapest_request(needs, gpu, step, options, local=local))
            except UserError:  # noqa: PERF203 - a few
                if number == len(choices) - 1 and not requests:
                    raise  # none of them fits
        return min(requests, key=_price, default=None)

    def _step_request(self, step: StepView, request: Request, options: Options) -> StepRequest:
        """Build the request to the backend; user values take precedence except where right-sized."""
        minimum = MinimumRequest(cpu=1, memory_bytes=request.memory_mib * MIB)
        built = build_step_request(step, request, options, minimum)
        if not self.rightsize:
            return built
        user_values = {
            name: value for name, value in built.user_values.items() if not value.by.endswith("in the flow")
        }
        return replace(
            built, request=apply_user_values(request, user_values, built.backend)[0], user_values=user_values
        )


@dataclass(frozen=True, slots=True)
class NextAttempt:
    """Raises the request of the attempt after one that ran out of memory."""

    step: StepView
    step_request: StepRequest

    def prepare(self, run_id: str, attempt: int) -> dict[str, str]:  # noqa: ARG002
        """Return the variables of the next attempt. Called before each attempt except the first."""
        history = _history(self.step.name)
        out_of_memory = [item for item in history if item.run == run_id and item.ending.startswith("out of")]
        recommendation = recommend(history, dict(out_of_memory[-1].parameters)) if out_of_memory else None
        if recommendation is None:
            return {}
        request = _request_of(recommendation, self.step, self.step_request.options)
        memory = max(request.memory_mib, self.step_request.request.memory_mib)
        raised = replace(self.step_request, request=replace(request, memory_mib=memory))
        variables = place_again(self.step, raised)
        if variables is None:
            return {}
        usage.set_sizes(self.step.name, _sizes_of(raised.request))
        return variables | {usage.SIZES_VARIABLE: os.environ[usage.SIZES_VARIABLE]}


def _history(step: str) -> list[Any]:
    records = usage.read_history(usage.usage_storage(), _metaflow.flow_name(), step)
    return usage.with_killed(records, time.time())


def _request_of(recommendation: Recommendation, step: StepView, options: Options) -> Request:
    """Return the request for a recommendation, with the cheapest GPU of at least the same speed."""
    current_sizes, sizes = usage.sizes_of_step(step), recommendation.sizes
    memory = sizes.memory_mib or current_sizes.memory_mib
    needs = needs_of(recommendation, replace(sizes, memory_mib=memory))
    if needs is not None and step.backend() != "local":
        return _cheapest_request(needs, None, step, options, local=False)
    return Request(
        nodes=1,
        gpus_per_node=sizes.gpus or 0,
        gpu_type=None,
        cpu=round(sizes.cpu or current_sizes.cpu or machines.USUAL_CPU),
        memory_mib=memory or machines.USUAL_MEMORY_MIB,
        shared_memory_mib=0,
        disk_mib=machines.USUAL_DISK_MIB,
    )


def _cheapest_request(
    needs: Needs, gpu: str | None, step: StepView, options: Options, *, local: bool
) -> Request:
    """Choose the cheapest machine of the step's backend."""
    target = Target(
        kind=step.backend(),
        gpu=gpu,
        gpus=needs.gpus or None,
        machine=local_machine.detect() if local else None,
    )
    if not needs.gpus or local:
        return choose_machine(needs, target, Goals())
    with planning_for(build_destination(step, options)):
        cluster = find_cluster(step.backend(), gpu)
    return choose_machine(needs, target, Goals(cluster=cluster.usable if cluster is not None else None))


def _price(request: Request) -> tuple[bool, float, int]:
    """Return a sort key: the machine's price on demand, unknown ones last, then the number of GPUs."""
    machine = hardware.current().find_instance(request.instance_type)
    usd = machine.usd_per_hour if machine is not None else None
    return usd is None, usd or 0.0, request.gpus_per_node


def _sizes_of(request: Request) -> Sizes:
    return Sizes(
        cpu=request.cpu, memory_mib=request.memory_mib, gpus=request.gpus_per_node, gpu_type=request.gpu_type
    )


def _bytes(name: str, value: Any) -> int | None:
    """Return a size in bytes: "40GiB", "40Gi", "40 GB", or a number of bytes. Raises UserError."""
    if value is None:
        return None
    match = _SIZE.fullmatch(str(value).strip())
    text = f"{match[1]}{match[2][0].upper()}{'i' * (len(match[2]) > 1)}" if match else str(value)
    try:
        size = int(quantity(text))
    except UserError:
        size = 0
    if size < MIB:
        raise UserError(
            f"@gpu_profile({name}={value!r}) is not a size of memory.", f'Write {name}="40GiB", for example.'
        )
    return size


def _count(name: str, value: Any) -> int:
    try:
        count = int(value)
        if count != float(value) or count < 1:
            raise ValueError
    except (TypeError, ValueError):
        raise UserError(
            f"@gpu_profile({name}={value!r}) is not a whole number above 0.", f"Write {name}=2, for example."
        ) from None
    return count
