"""Capacity of a cluster: present and free nodes, nodes that may be added, quotas."""

from __future__ import annotations

from dataclasses import dataclass, replace

from estimator import hardware
from estimator.hardware.catalogue import Catalogue, Gpu, Instance
from estimator.hardware.catalogue.parts import is_part
from estimator.hardware.cluster.quotas import Quota

MOST_NAMED = 4  # instance types in a message


@dataclass(frozen=True, kw_only=True, slots=True)
class Free:
    """Resources of a node that running pods do not request."""

    gpus: int
    cpu: float  # cores
    memory_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterNodes:
    """Equal nodes of one cluster: present ones with equal free resources, or nodes that may be added.

    Allocatable resources are the minimum of the group, before requests of running pods.
    """

    instance: Instance  # with the allocatable GPU count
    gpu: Gpu  # with the memory of the node label, if that is less than in the table
    count: int  # of present nodes
    cpu: float  # cores
    memory_bytes: int
    ephemeral_bytes: int | None
    efa: int  # interfaces
    spot: bool | None  # None: unknown
    zones: tuple[str, ...]
    taints: tuple[str, ...]  # "key=value:effect"
    names: tuple[str, ...]
    free: Free | None = None  # per node; None: unknown, assumed to be everything
    holders: tuple[str, ...] = ()  # pods with GPUs of these nodes, "namespace/name"
    untolerated_taints: tuple[str, ...] = ()  # taints that the run's pods do not tolerate
    max_new_nodes: int | None = 0  # nodes that may be added; None: unlimited
    added_by: str = ""  # description of the autoscaler that would add them
    gpu_assumed: bool = False  # no label names the GPU: it was named by the user
    guessed: bool = False  # assumed: the instance type of added nodes is unknown

    @property
    def could_be_spot(self) -> bool:
        """Whether a label marks spot nodes, or added nodes could be spot nodes."""
        return bool(self.spot) or (self.spot is None and not self.count and self.max_new_nodes != 0)

    @property
    def free_gpus(self) -> int:
        """Free GPUs per node; each needs at least one free core."""
        if self.free is None:
            return self.instance.gpu_count
        return max(0, min(self.free.gpus, int(self.free.cpu)))


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedNodes:
    """Nodes that cannot be used, and the reason."""

    reason: str
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Present and possible GPU nodes of one cluster or queue, and the nodes that were skipped."""

    context: str  # of the kubeconfig; "in-cluster" in a pod; the queue of AWS Batch
    nodes: tuple[ClusterNodes, ...]
    skipped: tuple[SkippedNodes, ...] = ()
    nodes_without_gpu: int = 0  # nodes without GPUs and labels of GPUs
    quotas: tuple[Quota, ...] = ()
    unknown: tuple[str, ...] = ()  # unknown facts, one clause each
    name: str = ""  # for messages; empty: use the context
    spot_queues: tuple[str, ...] = ()  # other queues of AWS Batch that have spot machines

    @property
    def where(self) -> str:
        """Name of the cluster for messages."""
        return self.name or f"the cluster of context {self.context}"

    @property
    def gpu_summary(self) -> str:
        """Summary of its GPUs: "4 of p5.48xlarge (8x H100 SXM)"; empty without usable ones."""
        counts: dict[str, int | None] = {}
        for nodes in self.nodes:
            gpus, name = f"{nodes.instance.gpu_count}x {nodes.gpu.name}", nodes.instance.name
            name = name if name == gpus else f"{name} ({gpus})"
            earlier = counts.get(name, 0)
            added = (
                None if nodes.max_new_nodes is None or earlier is None else nodes.count + nodes.max_new_nodes
            )
            counts[name] = None if added is None or earlier is None else earlier + added
        kinds = [f"any number of {name}" if n is None else f"{n} of {name}" for name, n in counts.items()]
        return ", ".join(kinds[:MOST_NAMED]) + (
            f" and {len(kinds) - MOST_NAMED} other kinds" if len(kinds) > MOST_NAMED else ""
        )

    @property
    def usable(self) -> Cluster:
        """This cluster with all nodes that have untolerated taints moved to ``skipped``."""
        tainted: dict[str, list[str]] = {}
        for nodes in self.nodes:
            if nodes.untolerated_taints:
                reason = f"untolerated taint {', '.join(nodes.untolerated_taints)}"
                tainted.setdefault(reason, []).extend(nodes.names or (nodes.added_by,))
        return replace(
            self,
            nodes=tuple(nodes for nodes in self.nodes if not nodes.untolerated_taints),
            skipped=(
                *self.skipped,
                *(
                    SkippedNodes(reason=cause, names=tuple(dict.fromkeys(names)))
                    for cause, names in tainted.items()
                ),
            ),
        )

    @property
    def with_any_disk(self) -> Cluster:
        """Return the cluster without disk limits."""
        return replace(self, nodes=tuple(replace(nodes, ephemeral_bytes=None) for nodes in self.nodes))

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about the cluster, shown before the plan."""
        lines = [
            f"Skipped, {skipped.reason}: {_abbreviate(skipped.names)}" for skipped in self.usable.skipped
        ]
        if self.unknown:
            lines.append(f"Unknown about {self.where}: {'; '.join(self.unknown)}.")
        return tuple(lines)

    @property
    def has_gpus(self) -> bool:
        """Whether it has GPU nodes or can certainly add some, usable or not."""
        return bool(self.skipped) or any(not nodes.guessed for nodes in self.nodes)

    @property
    def instances(self) -> tuple[Instance, ...]:
        return tuple(group.instance for group in self.nodes if not group.guessed)

    def catalogue(self, base: Catalogue | None = None) -> Catalogue:
        """Return the GPUs of the tables, with the instance types of this cluster only.

        If groups share an instance type, the one with the most GPUs per node represents it.
        """
        tables = base or hardware.current()
        largest_first = sorted(self.nodes, key=lambda group: -group.gpu.vram_bytes)
        sizes = {group.gpu.name: group.gpu for group in largest_first}  # the smaller of two sizes
        machines: dict[str, Instance] = {}
        for item in sorted(self.instances, key=lambda item: -item.gpu_count):
            machines.setdefault(item.name.lower(), item)
        parts = (gpu for gpu in sizes.values() if is_part(gpu.name))
        return Catalogue(
            gpus=(*(sizes.get(gpu.name, gpu) for gpu in tables.gpus), *parts),
            instances=tuple(machines.values()),
        )


def _abbreviate(names: tuple[str, ...]) -> str:
    suffix = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + suffix
