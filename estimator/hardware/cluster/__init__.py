"""A cluster as machines to plan with: what is there and free, what may come, what quotas allow."""

from __future__ import annotations

from dataclasses import dataclass, replace

from estimator import hardware
from estimator.hardware.catalogue import Catalogue, Gpu, Instance
from estimator.hardware.cluster.quotas import Quota

MOST_NAMED = 4  # kinds of machines in a sentence


@dataclass(frozen=True, kw_only=True, slots=True)
class Free:
    """Resources of a node that its running pods leave free."""

    gpus: int
    cpu: float  # cores
    memory_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterNodes:
    """Equal machines of one cluster: nodes that are there, with as much free, or that may come.

    What can be allocated is the least of the group, before the pods that run there now.
    """

    instance: Instance  # its GPU count is what can be allocated
    gpu: Gpu  # with the memory that the node's label gives, where that is less than the table's
    count: int  # of nodes that are there
    cpu: float  # cores
    memory_bytes: int
    ephemeral_bytes: int | None
    efa: int  # interfaces
    spot: bool | None  # None: no label says so
    zones: tuple[str, ...]
    taints: tuple[str, ...]  # that a pod must tolerate, "key=value:effect"
    names: tuple[str, ...]
    free: Free | None = None  # of each; None: not told, taken as all of it
    holders: tuple[str, ...] = ()  # pods that have GPUs of these nodes, "namespace/name"
    fences: tuple[str, ...] = ()  # those of the taints that the run's pods don't tolerate
    may_come: int | None = 0  # nodes that may be added; None: as many as are asked for
    added_by: str = ""  # what would add them, in words
    gpu_on_trust: bool = False  # no label names the GPU: as named by the user
    guessed: bool = False  # nothing says that these are the machines which would be added

    @property
    def could_be_spot(self) -> bool:
        """Whether a label says that they are spot nodes, or nodes that may come could be."""
        return bool(self.spot) or (self.spot is None and not self.count and self.may_come != 0)

    @property
    def free_gpus(self) -> int:
        """GPUs of each node that a run could have now; each needs a core at least."""
        if self.free is None:
            return self.instance.gpu_count
        return max(0, min(self.free.gpus, int(self.free.cpu)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Aside:
    """Nodes that cannot be planned with, and why."""

    reason: str
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """GPUs that one cluster or queue has or could add, and the nodes that were skipped."""

    context: str  # of the kubeconfig; "in-cluster" in a pod; of AWS Batch the queue
    nodes: tuple[ClusterNodes, ...]
    aside: tuple[Aside, ...] = ()
    without_gpu: int = 0  # nodes that have none and no label of one
    quotas: tuple[Quota, ...] = ()
    untold: tuple[str, ...] = ()  # what it doesn't tell, in clauses
    name: str = ""  # in words; empty: by its context

    @property
    def where(self) -> str:
        """The cluster in words."""
        return self.name or f"the cluster of context {self.context}"

    @property
    def in_words(self) -> str:
        """Its GPUs: "4 of p5.48xlarge (8x H100 SXM)"; empty where it has none that can be used."""
        counts: dict[str, int | None] = {}
        for nodes in self.nodes:
            gpus, what = f"{nodes.instance.gpu_count}x {nodes.gpu.name}", nodes.instance.name
            what = what if what == gpus else f"{what} ({gpus})"
            before = counts.get(what, 0)
            more = None if nodes.may_come is None or before is None else nodes.count + nodes.may_come
            counts[what] = None if more is None or before is None else before + more
        kinds = [f"any number of {what}" if n is None else f"{n} of {what}" for what, n in counts.items()]
        return ", ".join(kinds[:MOST_NAMED]) + (
            f" and {len(kinds) - MOST_NAMED} other kinds" if len(kinds) > MOST_NAMED else ""
        )

    @property
    def open(self) -> Cluster:
        """Without what a taint keeps the run's pods from, which is left aside."""
        fenced: dict[str, list[str]] = {}
        for nodes in self.nodes:
            if nodes.fences:
                reason = f"fenced off by the taint {', '.join(nodes.fences)}"
                fenced.setdefault(reason, []).extend(nodes.names or (nodes.added_by,))
        return replace(
            self,
            nodes=tuple(nodes for nodes in self.nodes if not nodes.fences),
            aside=(
                *self.aside,
                *(Aside(reason=why, names=tuple(dict.fromkeys(names))) for why, names in fenced.items()),
            ),
        )

    @property
    def with_any_disk(self) -> Cluster:
        """The cluster without limits of its nodes' disks."""
        return replace(self, nodes=tuple(replace(nodes, ephemeral_bytes=None) for nodes in self.nodes))

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the user about this cluster, shown before the plan."""
        lines = [f"Left aside, {aside.reason}: {_few(aside.names)}" for aside in self.open.aside]
        if self.untold:
            lines.append(f"Of {self.where} is not known: {'; '.join(self.untold)}.")
        return tuple(lines)

    @property
    def has_gpus(self) -> bool:
        """Whether there are GPUs, or surely may be: also such as cannot be planned with."""
        return bool(self.aside) or any(not nodes.guessed for nodes in self.nodes)

    @property
    def instances(self) -> tuple[Instance, ...]:
        return tuple(group.instance for group in self.nodes if not group.guessed)

    def catalogue(self, base: Catalogue | None = None) -> Catalogue:
        """The tables' GPUs, with this cluster's own machines instead of the clouds'.

        Where groups share a machine type, the one with most GPUs a node stands for it.
        """
        tables = base or hardware.current()
        largest_first = sorted(self.nodes, key=lambda group: -group.gpu.vram_bytes)
        sizes = {group.gpu.name: group.gpu for group in largest_first}  # of two sizes the smaller
        machines: dict[str, Instance] = {}
        for item in sorted(self.instances, key=lambda item: -item.gpu_count):
            machines.setdefault(item.name.lower(), item)
        return Catalogue(
            gpus=tuple(sizes.get(gpu.name, gpu) for gpu in tables.gpus), instances=tuple(machines.values())
        )


def _few(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
