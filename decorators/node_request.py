"""``@node_request``: ask the cluster for the nodes of a flow that has no plan, such as the checklist's.

What is asked for is decided once, where the run is launched, by a function of the flow's parameters, which
also refuses what can't be. The user's own values, in the flow or behind ``--with``, stand. What tasks must
know of the launch travels in environment variables: local tasks inherit them, containers get them through
``@environment``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from metaflow import StepMutator

from decorators import _metaflow
from decorators._metaflow import Backend, FinetuneError, Given, StepView
from decorators.backends import cluster_name, pending
from decorators.backends.batch import request as batch
from decorators.backends.batch import workarounds
from decorators.backends.kubernetes import errors as refusals
from decorators.backends.kubernetes import request as kubernetes
from decorators.backends.options import Options
from decorators.backends.overrides import merge_given
from decorators.backends.placing import add_variables
from decorators.storage import datastore
from estimator.errors import UserError
from estimator.plan import Request

LAUNCH_VARIABLE = "CHECKLIST_LAUNCH"  # what the flow itself wants its tasks to know
PRIORITY_VARIABLE = "CHECKLIST_PRIORITY_CLASS"  # a Kubernetes PriorityClass; also for users to set
_EXTRA_VARIABLE = "CHECKLIST_NODE_ENVIRONMENT"  # JSON: variables for the fabric that is asked for
_SIZES = ("cpu", "memory", "disk", "shared_memory", "gpu")
Role = Literal["node", "small"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What a run asks for."""

    request: Request
    """For each of its nodes."""
    launch: str
    """For its tasks, as text; at most some 4,000 characters, as AWS Batch takes 8192 for all variables."""
    priority_class: str | None = None
    """Of the nodes' pods on Kubernetes."""
    options: Options | None = None
    """Queue, zone and the like."""


Asks = Callable[[Mapping[str, Any], Backend, int | None], Asked]
_asked: dict[tuple[Asks, Backend, int | None, str], Asked] = {}  # once for each process


class node_request(StepMutator):  # type: ignore[misc]  # noqa: N801
    """Ask for a step's nodes.

    Parameters
    ----------
    asks:
        ``asks(parameters, backend, gpus) -> Asked``, called where the run is launched. ``parameters`` holds
        the flow's parameters and configs by name, ``gpus`` the number for each node that the user has written
        behind ``--with`` or into the flow. Raises UserError. All steps of a flow share one function.
    role:
        ``"node"``: the step runs on the nodes that are asked for. ``"small"``: it only knows of the launch.
    """

    def init(self, *, asks: Asks, role: Role = "node") -> None:
        if role not in get_args(Role):
            raise FinetuneError(f'@node_request(role="{role}"): it is "node" or "small".')
        self.asks, self.role = asks, role

    def mutate(self, mutable_step: Any) -> None:
        """Called by Metaflow in every process that loads the flow; asks only where a run is launched."""
        step = StepView(mutable_step)
        kind = _metaflow.command()
        launching = kind in ("run", "resume", "deploy")
        if launching:
            _metaflow.ensure_python()
            self._ask(step)
        elif kind != "trampoline":
            return
        else:
            pending.install()
            refusals.install(_keep_endings)
            workarounds.install()
        if self.role == "node" and step.backend() == "kubernetes":
            _metaflow.shape_pods(os.environ.get(PRIORITY_VARIABLE) or None)
        if step.backend() != "local":
            carried = (LAUNCH_VARIABLE, cluster_name.CLUSTER_VARIABLE)
            step.add_environment({name: os.environ[name] for name in carried if name in os.environ})
            add_variables(step, _metaflow.datastore_variables())
            if self.role == "node" and step.has("parallel"):
                add_variables(step, json.loads(os.environ.get(_EXTRA_VARIABLE, "{}")))

    def _ask(self, step: StepView) -> None:
        lead = _lead(step)
        backend = lead.backend()
        given = _given(lead, backend)
        try:
            asked = _ask_once(self.asks, step.flow_values(), backend, _gpus(given))
            workarounds.check(backend, asked.request.nodes)
            cluster_name.settle(lead, asked.options.queue if asked.options else None)
        except UserError as error:
            raise FinetuneError(error.problem, error.advice) from None
        os.environ[LAUNCH_VARIABLE] = asked.launch
        if asked.priority_class:
            os.environ[PRIORITY_VARIABLE] = asked.priority_class
        if asked.options is not None and backend != "local":
            os.environ[pending.TIMEOUT_VARIABLE] = f"{asked.options.pending_timeout:g}"
        if self.role == "node" and backend != "local":
            extra = _request(step, asked, backend, given)
            os.environ[_EXTRA_VARIABLE] = json.dumps(extra)


def _keep_endings(lines: list[str]) -> None:
    if lines:
        keep_endings(_metaflow.waited_attempt()[0], lines)


def keep_endings(run: str, lines: list[str]) -> None:
    """How the pods of a step have failed, for a later step of the run."""
    try:
        datastore().put_bytes(_endings_key(run), "\n".join(lines).encode())
    except Exception as error:  # noqa: BLE001 - whatever a datastore may answer with; the lines are shown too
        _metaflow.say(f"How the pods have failed can't be kept: {type(error).__name__}: {error}")


def endings(run: str) -> tuple[str, ...]:
    """What :func:`keep_endings` has kept, of that run's last failed step; none where nobody told."""
    try:
        return tuple(datastore().get_bytes(_endings_key(run)).decode().splitlines())
    except FileNotFoundError:
        return ()


def _endings_key(run: str) -> str:
    return f"runs/{run}/endings.txt"


def _request(step: StepView, asked: Asked, backend: Backend, given: Mapping[str, Given]) -> dict[str, str]:
    """Write the request into the step's decorators; the variables that its nodes need besides."""
    written = {**step.given(backend), **given}
    if backend == "kubernetes":
        configured = step.values(backend)
        pod = kubernetes.values(asked.request, given=written, configured=configured, options=asked.options)
        sizes, compute, extra = pod.resources, pod.kubernetes, pod.environment
    else:
        job = batch.values(asked.request, given=written, options=asked.options)
        sizes, compute, extra = job.resources, job.batch, job.environment
    own = {name: given[name].value for name in _SIZES if name in given}
    step.set_values("resources", {**sizes, **own})
    if step.has(backend):
        step.set_values(backend, {**compute, **{name: own[name] for name in own if name in compute}})
    return extra


def _ask_once(asks: Asks, parameters: dict[str, Any], backend: Backend, gpus: int | None) -> Asked:
    key = (asks, backend, gpus, repr(sorted(parameters.items())))
    if key not in _asked:
        _asked[key] = asks(parameters, backend, gpus)
    return _asked[key]


def _given(step: StepView, backend: Backend) -> dict[str, Given]:
    compute = step.given(backend) if backend != "local" else {}
    return merge_given(step.given("resources"), compute, backend)


def _gpus(given: Mapping[str, Given]) -> int | None:
    if "gpu" not in given:
        return None
    value = str(given["gpu"].value)
    if not value.isdecimal():
        raise UserError(
            f"{given['gpu'].by.rstrip('=')}: gpu {value!r} is not a whole number.",
            "Write gpu=8, for example.",
        )
    return int(value)


def _lead(step: StepView) -> StepView:
    """The first step that runs on the nodes."""
    for other in step.steps():
        for mutator in other.mutators(node_request):
            mutator.external_init()
            if mutator.role == "node":
                return other
    return step
