"""What a backend is: what it is asked (:class:`StepRequest`), what it answers, and the functions that do so.

Kubernetes and AWS Batch are a folder each, whose ``backend.py`` fills in a :class:`ComputeBackend`;
:mod:`decorators.backends.registry` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from decorators._metaflow import Backend, Given, WaitedJob
from decorators.backends.options import Options
from estimator.errors import UserError
from estimator.hardware.cluster import Cluster
from estimator.hardware.cluster_tables import Room, SpotLabel
from estimator.hardware.cluster_taints import Toleration
from estimator.plan import Override, Request


@dataclass(frozen=True, kw_only=True, slots=True)
class MinimumRequest:
    """What one node of a run can't do without; what the plan asks for may be lowered to it."""

    cpu: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterFacts:
    """What a cluster's nodes have told of the machine that a plan asks for; as it is made, nothing."""

    labels: tuple[tuple[str, str], ...] | None = None  # by which it is found there; None: not known
    tolerations: tuple[Toleration, ...] = ()
    room: Room | None = None  # for one pod, on the smallest of the nodes that fit
    efa: int | None = None
    hugepages_bytes: int | None = None
    zone: str | None = None  # one that has all the nodes
    spot: SpotLabel | None = None  # how its spot nodes are marked, where the request is for such
    devices: tuple[tuple[str, int], ...] | None = None  # extended resources that each of the nodes offers
    networks: tuple[tuple[str, str], ...] = ()  # Multus' of the namespace: (name, the extended resource)
    near: str | None = (
        None  # the label of a level at which the queue's topology is to keep the nodes together
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Destination:
    """Where a step goes, before it is known what it will ask for."""

    backend: Backend
    options: Options = field(default_factory=Options)
    given: Mapping[str, Given] = field(default_factory=dict)
    """The user's own values, of ``@resources`` and the compute decorator."""
    configured: Mapping[str, Any] = field(default_factory=dict)
    """All values of the compute decorator, the user's and Metaflow's own configuration's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRequest:
    """All that decides on what one step asks of its backend."""

    backend: Backend
    request: Request
    """What the plan asks for, for each node."""
    options: Options = field(default_factory=Options)
    given: Mapping[str, Given] = field(default_factory=dict)
    """The user's own values, of ``@resources`` and the compute decorator: they stand."""
    configured: Mapping[str, Any] = field(default_factory=dict)
    """All values of the compute decorator, the user's and Metaflow's own configuration's."""
    minimum: MinimumRequest | None = None
    """None: what is asked for."""
    facts: ClusterFacts = field(default_factory=ClusterFacts)
    step: str = ""
    """The step's name, for messages."""
    on_fabric: bool = False
    """Whether its pods are those that train, or that measure for those."""

    def with_given_sizes(self, sizes: Mapping[str, Any]) -> dict[str, Any]:
        """Sizes by the names of ``@resources``, with the user's own laid over. Raises UserError."""
        own = {name: _whole(number_of(name, self.given[name])) for name in sizes if name in self.given}
        return {**sizes, **own}

    def sizes_in_mib(self) -> dict[str, Any]:
        """``@resources`` with memory and disk in MiB, as Batch takes them. Raises UserError."""
        request = self.request
        return self.with_given_sizes(
            {
                "cpu": request.cpu,
                "memory": request.memory_mib,
                "disk": request.disk_mib,
                "shared_memory": request.shared_memory_mib or None,
                "gpu": request.gpus_per_node or None,
            }
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepValues:
    """What goes into a step's decorators and into its container's environment."""

    resources: dict[str, Any]
    """Of ``@resources``."""
    compute: dict[str, Any] = field(default_factory=dict)
    """Of ``@kubernetes`` or ``@batch``."""
    environment: dict[str, str] = field(default_factory=dict)
    pod_patches: tuple[dict[str, Any], ...] = ()
    """What is merged into its pods' template, one after the other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hopeless:
    """Why a job can't start, where waiting alone doesn't cure that."""

    kind: str
    grace_s: float  # so long it may last, as it may pass by itself all the same
    advice: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitState:
    """Whether a job still waits for its nodes, and for what; ``reason`` is empty where nobody tells."""

    pending: bool
    reason: str = ""
    running: int = 0  # of its nodes, where that is told
    missing: tuple[str, ...] = ()  # the others' pods, as far as they have been made
    nodes: int = 1
    hopeless: Hopeless | None = None


STARTED = WaitState(pending=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class LastWords:
    """How a step's gang has ended, by a node that could still tell (launchers.gang.failures)."""

    kind: str
    host: str  # of the node that the end began with

    @property
    def is_loss(self) -> bool:
        """Whether it began with a node that was lost or had to go."""
        return self.kind in ("node", "left")


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """What a cluster has taken away of a job."""

    lines: tuple[str, ...]  # one for each pod or machine


def _nothing_to_refuse(request: Request) -> None:
    """A backend that takes a step on any number of nodes."""


def _nothing_lowered(step_request: StepRequest) -> tuple[Override, ...]:  # noqa: ARG001
    return ()


def _ends_as_a_whole(job: WaitedJob, words: LastWords | None) -> bool:  # noqa: ARG001
    return True


def _not_observed(job: WaitedJob) -> None:
    """A backend that tells of a job's end all that there was."""


def _all_alike(step_request: StepRequest) -> None:
    """A backend whose preflight of the largest step says it all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeBackend:
    """One backend, as functions; all of them raise UserError, where they raise."""

    values_for: Callable[[StepRequest], StepValues]
    """What a step's decorators get. Asks nobody."""
    preflight: Callable[[StepRequest], ClusterFacts]
    """Asks the cluster or queue whether it could ever take the run's largest step; raises if not."""
    inventory: Callable[[Destination], Cluster]
    """What it has and could get of GPUs, to plan with."""
    wait_state: Callable[[WaitedJob], WaitState]
    """Why a job has not started."""
    remove: Callable[[WaitedJob], None]
    """Takes a job away that has not started, or that nobody waits for any longer."""
    install: Callable[[Callable[[list[str]], None]], None]
    """For the process that waits for a step: refusals in words. Is given who hears how the step failed."""
    lost: Callable[[WaitedJob, LastWords | None], Loss | None]
    """What was taken away of a job that has failed; None: nothing, it has failed by itself."""
    refuse: Callable[[Request], None] = _nothing_to_refuse
    """Raises for what could not work there however large the cluster. Asks nobody."""
    lowered: Callable[[StepRequest], tuple[Override, ...]] = _nothing_lowered
    """What the room on its nodes takes off the plan's sizes."""
    preflight_beside: Callable[[StepRequest], None] = _all_alike
    """The preflight of another step of a run whose largest has passed."""
    observe: Callable[[WaitedJob], None] = _not_observed
    """Is called often while a job is waited for."""
    has_ended: Callable[[WaitedJob, LastWords | None], bool] = _ends_as_a_whole
    """Whether nothing of such a job runs any more."""
    machine_follows_queue: bool = False
    """Whether another machine is had by another queue only."""


def number_of(name: str, given: Given) -> float:
    """A size that the user has written. Raises UserError where it is no number."""
    try:
        return float(given.value)
    except (TypeError, ValueError):
        raise UserError(
            f"{given.by.rstrip('=')}: {name} {given.value!r} is not a number.",
            f"Write {name}=8, for example.",
        ) from None


def _whole(number: float) -> int | float:
    return int(number) if number.is_integer() else number
