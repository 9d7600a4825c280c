"""Interface of a backend: its request (:class:`StepRequest`), its results, and its functions.

Kubernetes and AWS Batch are a folder each, whose ``backend.py`` fills in a :class:`ComputeBackend`;
:mod:`decorators.backends.registry` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from decorators._metaflow import Backend, Given, WaitedJob, compiles_only
from decorators.backends.options import Options
from estimator.errors import UserError
from estimator.hardware.cluster import Cluster
from estimator.hardware.cluster.tables import Room, SpotLabel
from estimator.hardware.cluster.taints import Toleration
from estimator.plan import Override, Request


@dataclass(frozen=True, kw_only=True, slots=True)
class MinimumRequest:
    """Minimum request of one node of a run; the plan's request may be lowered to it."""

    cpu: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterFacts:
    """Facts about the planned machine that a cluster's nodes reported; empty by default."""

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
    """Target of a step before its request is known."""

    backend: Backend
    options: Options = field(default_factory=Options)
    given: Mapping[str, Given] = field(default_factory=dict)
    """The user's own values, of ``@resources`` and the compute decorator."""
    configured: Mapping[str, Any] = field(default_factory=dict)
    """All values of the compute decorator, the user's and Metaflow's own configuration's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRequest(Destination):
    """All that decides on what one step asks of its backend; the user's own values stand."""

    request: Request
    """What the plan asks for, for each node."""
    minimum: MinimumRequest | None = None
    """None: what is asked for."""
    facts: ClusterFacts = field(default_factory=ClusterFacts)
    step: str = ""
    """The step's name, for messages."""
    on_fabric: bool = False
    """Whether its pods are those that train, or that measure for those."""
    beside: bool = False
    """Whether the run's largest step has passed the preflight, so that only the size is looked at."""

    @property
    def may_ask(self) -> bool:
        """Whether the backend may be asked for what it has."""
        return self.options.preflight and not compiles_only()

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
    """Values for a step's decorators and its container's environment."""

    resources: dict[str, Any]
    """Of ``@resources``."""
    compute: dict[str, Any] = field(default_factory=dict)
    """Of ``@kubernetes`` or ``@batch``."""
    environment: dict[str, str] = field(default_factory=dict)
    pod_patches: tuple[dict[str, Any], ...] = ()
    """What is merged into its pods' template, one after the other."""
    lowered: tuple[Override, ...] = ()
    """What the room on a node takes off the plan's sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hopeless:
    """Reason why a job cannot start, which waiting does not resolve."""

    kind: str
    grace_s: float  # so long it may last, as it may pass by itself all the same
    advice: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitState:
    """Whether a job still waits for its nodes, and for what; ``reason`` is empty where no one tells."""

    pending: bool
    reason: str = ""
    running: int = 0  # of its nodes, where that is told
    missing: tuple[str, ...] = ()  # the others' pods, as far as they have been made
    nodes: int = 1
    hopeless: Hopeless | None = None


STARTED = WaitState(pending=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class LastWords:
    """End of a step's gang as reported by a node that still could (launchers.gang.failures)."""

    kind: str
    host: str  # of the node that the end began with

    @property
    def is_loss(self) -> bool:
        """Whether it began with a node that was lost or had to go."""
        return self.kind in ("node", "left")


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Resources of a job that a cluster took away."""

    lines: tuple[str, ...]  # one for each pod or machine


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeBackend:
    """One backend, as functions; all of them raise UserError, where they raise."""

    values_for: Callable[[StepRequest], StepValues]
    """What a step's decorators get. Asks nobody."""
    preflight: Callable[[StepRequest], ClusterFacts]
    """Raise for a step that could never run there, as far as that may be asked; return what was told."""
    offered: Callable[[StepRequest], ClusterFacts]
    """Return what nodes offer a flow without a plan; raise for what no cluster of this kind can run."""
    inventory: Callable[[Destination, str | None], Cluster]
    """What it has and could get of GPUs, to plan with; given the GPU that the user names, where one is."""
    wait_state: Callable[[WaitedJob], WaitState]
    """Why a job has not started."""
    remove: Callable[[WaitedJob], None]
    """Takes a job away that has not started, or that nobody waits for any longer."""
    install: Callable[[Callable[[list[str]], None]], None]
    """For the process that waits for a step: refusals in words. Is given who hears how the step failed."""
    lost: Callable[[WaitedJob, Callable[[], LastWords | None]], Loss | None]
    """What was taken away of a failed job, once nothing of it runs; None: it has failed by itself."""


def number_of(name: str, given: Given) -> float:
    """A size that the user has written. Raises UserError where it is no number, or of GPUs no whole one."""
    try:
        value = float(given.value)
        if name == "gpu" and not value.is_integer():
            raise ValueError
    except (TypeError, ValueError):
        raise UserError(
            f"{given.by.rstrip('=')}: {name} {given.value!r} is not a {'whole ' * (name == 'gpu')}number.",
            f"Write {name}=8, for example.",
        ) from None
    return value


def _whole(number: float) -> int | float:
    return int(number) if number.is_integer() else number
