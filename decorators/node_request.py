"""``@node_request``: request nodes for a flow that has no plan, such as the checklist.

What is asked for is decided once, where the run is launched, by a function of the flow's parameters, which
also refuses what cannot be. The user's own values, in the flow or behind ``--with``, stand. What tasks must
know of the launch travels in environment variables: local tasks inherit them, containers get them through
``@environment``.
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
from decorators.backends.kubernetes.request import USUAL
from decorators.backends.options import Options
from decorators.backends.placing import fill_in
from decorators.backends.registry import BACKENDS
from decorators.launch import (
    LaunchMixin,
    Once,
    build_step_request,
    first_step,
    given_values,
    refused_in_words,
)
from decorators.storage import datastore
from estimator.hardware.cluster.taints import Toleration
from estimator.plan import Request

LAUNCH_VARIABLE = "CHECKLIST_LAUNCH"  # what the flow itself wants its tasks to know
Role = Literal["node", "small"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """Request of a run for each of its nodes, decided once at launch."""

    request: Request
    """For each of its nodes."""
    launch: str
    """For its tasks, as text; at most some 4,000 characters, as AWS Batch takes 8192 for all variables."""
    options: Options | None = None
    """Queue, zone, priority and the like."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints of GPU nodes that these nodes may have, beside those that any GPU job tolerates."""
    longest_s: float | None = None
    """Seconds after which an attempt of a deployed flow is ended, without the wait for nodes."""


Asks = Callable[[Mapping[str, Any], Backend, int | None], Asked]
_ask_once = Once()


class node_request(LaunchMixin, StepMutator):  # type: ignore[misc]  # noqa: N801
    """Request a step's nodes.

    Parameters
    ----------
    asks:
        ``asks(parameters, backend, gpus) -> Asked``, called where the run is launched. ``parameters`` holds
        the flow's parameters and configs by name, ``gpus`` the number for each node that the user has written
        behind ``--with`` or into the flow. Raises UserError. All steps of a flow share one function.
    role:
        ``"node"``: the step runs on the nodes that are asked for. ``"small"``: it only knows of the launch.
    """

    carried = (LAUNCH_VARIABLE, cluster_name.CLUSTER_VARIABLE)

    def init(self, *, asks: Asks, role: Role = "node") -> None:
        if role not in get_args(Role):
            raise FinetuneError(f'@node_request(role="{role}"): it is "node" or "small".')
        self.asks, self.role = asks, role

    def mutate(self, mutable_step: Any) -> None:
        """Called by Metaflow in every process that loads the flow; requests only where a run is launched."""
        step = StepView(mutable_step)
        launched = self.launch_or_carry(step)
        if launched and self.role == "node" and step.backend() == "kubernetes":
            pod_shape.install()

    def at_launch(self, step: StepView) -> None:
        """Let the flow decide, once for all steps, what its nodes are to be, and request them."""
        lead = first_step(step, node_request, lambda each: each.role == "node")
        backend = lead.backend()
        with refused_in_words():
            given = given_values(lead).get("gpu")
            gpus = int(number_of("gpu", given)) if given is not None else None
            asked = _ask_once(self.asks, step.flow_values(), backend, gpus)
            options = asked.options or Options()
            cluster_name.settle(lead, options.queue)
            os.environ[LAUNCH_VARIABLE] = asked.launch
            if self.role == "node" and backend != "local":
                step_request = build_step_request(step, asked.request, options)
                facts = BACKENDS[backend].offered(step_request)
                tolerations = (*(facts.tolerations or (USUAL,)), *asked.tolerations)
                facts = replace(facts, tolerations=tolerations)
                fill_in(step, replace(step_request, on_fabric=True, facts=facts))
                if asked.longest_s is not None and _metaflow.command() == "deploy":
                    step.set_values("timeout", {"seconds": math.ceil(asked.longest_s)})

    def keep_endings(self, lines: list[str]) -> None:
        """Store how the pods of a step failed, for the flow's later steps."""
        if lines:
            keep_endings(_metaflow.waited_attempt()[0], lines)


def keep_endings(run: str, lines: list[str]) -> None:
    """Store how the pods of a step failed, for a later step of the run."""
    try:
        datastore().put_bytes(_endings_key(run), "\n".join(lines).encode())
    except Exception as error:  # noqa: BLE001 - whatever a datastore may answer with; the lines are shown too
        _metaflow.say(f"How the pods have failed can't be kept: {type(error).__name__}: {error}")


def endings(run: str) -> tuple[str, ...]:
    """Return the lines of :func:`keep_endings` of that run's last failed step; empty if there are none."""
    try:
        return tuple(datastore().get_bytes(_endings_key(run)).decode().splitlines())
    except FileNotFoundError:
        return ()


def _endings_key(run: str) -> str:
    return f"runs/{run}/endings.txt"
