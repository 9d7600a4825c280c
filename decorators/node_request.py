"""``@node_request``: request nodes for a flow without a plan, such as the checklist.

The request is decided once, at launch, by a function of the flow's parameters, which also validates them.
Values that the user sets in the flow or with ``--with`` take precedence. Data for the tasks is passed on in
environment variables: local tasks inherit them, containers get them through ``@environment``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from metaflow import StepMutator

from decorators import _metaflow
from decorators._metaflow import Backend, FinetuneError, StepView
from decorators.backends import cluster_name
from decorators.backends.interface import number_of
from decorators.backends.kubernetes import pod_shape
from decorators.backends.kubernetes.request import GPU_TOLERATION
from decorators.backends.options import Options
from decorators.backends.placing import fill_in
from decorators.backends.registry import BACKENDS
from decorators.launch import (
    LaunchMixin,
    Once,
    build_step_request,
    first_step,
    user_errors_for_metaflow,
    user_values_of,
)
from decorators.storage import datastore
from estimator.hardware.cluster.taints import Toleration
from estimator.plan import Request

LAUNCH_VARIABLE = "CHECKLIST_LAUNCH"  # data of the flow for its tasks
Role = Literal["node", "small"]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRequest:
    """A run's request for its nodes, decided once at launch."""

    request: Request
    """Request of each node."""
    launch: str
    """Data for the tasks as text; at most about 4,000 characters, since AWS Batch allows 8,192 for all
    variables.
    """
    options: Options | None = None
    """Queue, zone, priority and similar options."""
    tolerations: tuple[Toleration, ...] = ()
    """Tolerations in addition to those of any GPU job."""
    longest_s: float | None = None
    """Time limit in seconds for an attempt of a deployed flow, without the wait for nodes."""


RequestFunction = Callable[[Mapping[str, Any], Backend, int | None], NodeRequest]
_decide_once = Once()


class node_request(LaunchMixin, StepMutator):  # type: ignore[misc]  # noqa: N801
    """Request a step's nodes.

    Parameters
    ----------
    decide:
        ``decide(parameters, backend, gpus) -> NodeRequest``, called at launch. ``parameters`` holds the
        flow's parameters and configs by name, ``gpus`` the GPUs per node that the user set in the flow or
        with ``--with``. Raises UserError. All steps of a flow share one function.
    role:
        ``"node"``: the step runs on the requested nodes. ``"small"``: it only receives the launch data.
    """

    carried = (LAUNCH_VARIABLE, cluster_name.CLUSTER_VARIABLE)

    def init(self, *, decide: RequestFunction, role: Role = "node") -> None:
        if role not in get_args(Role):
            raise FinetuneError(f'@node_request(role="{role}"): must be "node" or "small".')
        self.decide, self.role = decide, role

    def mutate(self, mutable_step: Any) -> None:
        """Called by Metaflow in every process that loads the flow; requests nodes only at launch."""
        step = StepView(mutable_step)
        launched = self.decide_or_apply(step)
        if launched and self.role == "node" and step.backend() == "kubernetes":
            pod_shape.install()

    def at_launch(self, step: StepView) -> None:
        """Decide the request, once for all steps, and request the nodes."""
        lead = first_step(step, node_request, lambda each: each.role == "node")
        backend = lead.backend()
        with user_errors_for_metaflow():
            gpus_value = user_values_of(lead).get("gpu")
            gpus = int(number_of("gpu", gpus_value)) if gpus_value is not None else None
            request = _decide_once(self.decide, step.flow_values(), backend, gpus)
            options = request.options or Options()
            cluster_name.decide_cluster_name(lead, options.queue)
            os.environ[LAUNCH_VARIABLE] = request.launch
            if self.role == "node" and backend != "local":
                step_request = build_step_request(step, request.request, options)
                facts = BACKENDS[backend].offered(step_request)
                tolerations = (*(facts.tolerations or (GPU_TOLERATION,)), *request.tolerations)
                facts = replace(facts, tolerations=tolerations)
                fill_in(step, replace(step_request, on_fabric=True, facts=facts))
                if request.longest_s is not None and _metaflow.command() == "deploy":
                    step.set_values("timeout", {"seconds": math.ceil(request.longest_s)})

    def store_pod_failures(self, lines: list[str]) -> None:
        """Store how the pods of a step failed, for later steps of the flow."""
        if lines:
            store_pod_failures(_metaflow.waited_attempt()[0], lines)


def store_pod_failures(run: str, lines: list[str]) -> None:
    """Store how the pods of a step failed, for a later step of the run."""
    try:
        datastore().put_bytes(_pod_failures_key(run), "\n".join(lines).encode())
    except Exception as error:  # noqa: BLE001 - whatever a datastore may answer with; the lines are shown too
        _metaflow.print_line(f"Storing the pods' failures failed: {type(error).__name__}: {error}")


def pod_failures(run: str) -> tuple[str, ...]:
    """Return the stored pod failures of a run's last failed step, one line per pod; may be empty."""
    try:
        return tuple(datastore().get_bytes(_pod_failures_key(run)).decode().splitlines())
    except FileNotFoundError:
        return ()


def _pod_failures_key(run: str) -> str:
    return f"runs/{run}/endings.txt"
