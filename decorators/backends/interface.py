"""Interface of a backend: its functions (:class:`ComputeBackend`), their inputs and results.

Kubernetes and AWS Batch each have a folder whose ``backend.py`` defines a :class:`ComputeBackend`;
:mod:`decorators.backends.registry` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from decorators._metaflow import Backend, UserValue, WaitedJob, compiles_only
from decorators.backends.options import Options
from estimator.errors import UserError
from estimator.hardware.cluster import Cluster
from estimator.hardware.cluster.tables import PodResources, SpotLabel
from estimator.hardware.cluster.taints import Toleration
from estimator.plan import Override, Request


@dataclass(frozen=True, kw_only=True, slots=True)
class MinimumRequest:
    """Minimum resources of one node of a run; the plan's request may be lowered to these."""

    cpu: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """Multus network whose pods request a device."""

    name: str  # as pods refer to it: with the namespace if it is not the run's
    resource: str  # extended resource
    plugin: str = ""  # CNI plugin that attaches it: "sriov", "ib-sriov", "host-device", ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterFacts:
    """Properties of the planned machine as reported by a cluster's nodes; empty by default."""

    labels: tuple[tuple[str, str], ...] | None = None  # node labels that select it; None: unknown
    tolerations: tuple[Toleration, ...] = ()
    pod_capacity: PodResources | None = None  # resources for one pod on the smallest fitting node
    efa: int | None = None
    hugepages_bytes: int | None = None
    zone: str | None = None  # a zone that has enough nodes
    spot: SpotLabel | None = None  # label of spot nodes, for a spot request
    devices: tuple[tuple[str, int], ...] | None = None  # extended resources that every node offers
    networks: tuple[Network, ...] = ()  # Multus networks of the run's and the default namespace
    arch: str | None = None  # CPU architecture that steps without GPUs select; None: any
    archs: tuple[str, ...] = ()  # CPU architectures of the cluster's nodes
    cpu_tolerations: tuple[Toleration, ...] = ()  # of steps without GPUs, where all nodes have GPU taints
    queue_system: str | None = None  # what manages the run's queue: "kueue", "volcano" or "kai"
    near: str | None = None  # label of the topology level at which the queue keeps the nodes together


@dataclass(frozen=True, kw_only=True, slots=True)
class Destination:
    """Target of a step: where it runs, before its request is known."""

    backend: Backend
    options: Options = field(default_factory=Options)
    user_values: Mapping[str, UserValue] = field(default_factory=dict)
    """The user's values of ``@resources`` and the compute decorator."""
    configured: Mapping[str, Any] = field(default_factory=dict)
    """All values of the compute decorator, from the user and from Metaflow's configuration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRequest(Destination):
    """Everything that determines a step's request to its backend. The user's values take precedence."""

    request: Request
    """The plan's request for each node."""
    minimum: MinimumRequest | None = None
    """Minimum to accept; None: the request itself."""
    facts: ClusterFacts = field(default_factory=ClusterFacts)
    step: str = ""
    """The step's name, for messages."""
    on_fabric: bool = False
    """Whether its pods train, or measure the network for training."""
    size_only: bool = False
    """Whether the run's largest step has passed the preflight, so that only the size is checked."""

    @property
    def may_query(self) -> bool:
        """Whether the backend's API may be queried."""
        return self.options.preflight and not compiles_only()

    def with_given_sizes(self, sizes: Mapping[str, Any]) -> dict[str, Any]:
        """Return sizes by the names of ``@resources``, overridden by the user's values. Raises UserError."""
        user_sizes = {
            name: _as_int_if_whole(number_of(name, self.user_values[name]))
            for name in sizes
            if name in self.user_values
        }
        return {**sizes, **user_sizes}

    def sizes_in_mib(self) -> dict[str, Any]:
        """Return ``@resources`` with memory and disk in MiB, the unit of Batch. Raises UserError."""
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
    """Values of ``@resources``."""
    compute: dict[str, Any] = field(default_factory=dict)
    """Values of ``@kubernetes`` or ``@batch``."""
    environment: dict[str, str] = field(default_factory=dict)
    pod_patches: tuple[dict[str, Any], ...] = ()
    """Patches of the pod template, merged in order."""
    lowered: tuple[Override, ...] = ()
    """Sizes of the plan that were lowered to what a node can hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PermanentFailure:
    """Reason why a job cannot start that waiting does not resolve."""

    kind: str
    grace_period_s: float  # seconds that it is tolerated, because it may still clear up
    advice: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitState:
    """Whether a job still waits for its nodes, and why; ``reason`` is empty if unknown."""

    pending: bool
    reason: str = ""
    running: int = 0  # nodes that run, if known
    missing: tuple[str, ...] = ()  # existing pods that do not run yet
    nodes: int = 1
    permanent_failure: PermanentFailure | None = None


STARTED = WaitState(pending=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class GangEnd:
    """Cause of a gang's end, as stored by a surviving node (launchers.gang.failures)."""

    kind: str
    host: str  # host name of the node that failed first

    @property
    def is_loss(self) -> bool:
        """Whether the cause is a node that was lost or drained."""
        return self.kind in ("node", "left")


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Pods or machines of a job that a cluster took away."""

    lines: tuple[str, ...]  # one line per pod or machine


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeBackend:
    """Functions of one backend. Errors are raised as UserError."""

    values_for: Callable[[StepRequest], StepValues]
    """Return the values of a step's decorators. Makes no API calls."""
    preflight: Callable[[StepRequest], ClusterFacts]
    """Raise if the step can never run there, as far as the API shows; return the facts that it reports.
    """
    offered: Callable[[StepRequest], ClusterFacts]
    """Return the facts for a flow without a plan; raise if no cluster of this kind can run the step."""
    inventory: Callable[[Destination, str | None], Cluster]
    """Return current and possible GPU capacity for planning. The second argument is the user's GPU, if named.
    """
    wait_state: Callable[[WaitedJob], WaitState]
    """Return whether and why a job has not started."""
    remove: Callable[[WaitedJob], None]
    """Remove a job that has not started or is not waited for any more."""
    install: Callable[[Callable[[list[str]], None]], None]
    """Install error messages in the process that waits for a step. The argument receives a failed step's
    lines.
    """
    lost: Callable[[WaitedJob, Callable[[], GangEnd | None]], Loss | None]
    """Return what the cluster took away from a failed job, once it has ended; None if it failed by itself."""


def number_of(name: str, user_value: UserValue) -> float:
    """Return a size set by the user. Raises UserError unless it is a number (for ``gpu`` an integer)."""
    try:
        value = float(user_value.value)
        if name == "gpu" and not value.is_integer():
            raise ValueError
    except (TypeError, ValueError):
        raise UserError(
            f"{user_value.by.rstrip('=')}: {name}={user_value.value!r} must be a "
            f"{'whole ' * (name == 'gpu')}number.",
            f"Write {name}=8, for example.",
        ) from None
    return value


def _as_int_if_whole(number: float) -> int | float:
    return int(number) if number.is_integer() else number
