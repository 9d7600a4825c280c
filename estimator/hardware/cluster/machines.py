"""GPU nodes of a Kubernetes cluster, from their labels and allocatable resources.

Unknown label values are reported, never guessed. Labels: NVIDIA GPU feature discovery, Karpenter, GKE, and
those of Kubernetes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from estimator.hardware.catalogue import Catalogue, Gpu, Instance
from estimator.hardware.cluster import Cluster, ClusterNodes, Free, SkippedNodes, tables
from estimator.hardware.cluster.nodes import CLOUDS, DISK, EFA, GPUS, INSTANCE_TYPE, REGION, ZONE, Node
from estimator.hardware.cluster.pods import PodRules, Usage
from estimator.plan import MIB

PRODUCT, PRODUCT_MIB = "nvidia.com/gpu.product", "nvidia.com/gpu.memory"
REPLICAS, SHARING = "nvidia.com/gpu.replicas", "nvidia.com/gpu.sharing-strategy"
KARPENTER_NAME, KARPENTER_MIB = "karpenter.k8s.aws/instance-gpu-name", "karpenter.k8s.aws/instance-gpu-memory"
GKE = "cloud.google.com/gke-accelerator"
GKE_PARTITION = "cloud.google.com/gke-gpu-partition-size"
GKE_CLIENTS = "cloud.google.com/gke-max-shared-clients-per-gpu"
MIG = "nvidia.com/mig-"
OTHER_ACCELERATORS = ("amd.com/gpu", "aws.amazon.com/neuron", "google.com/tpu", "habana.ai/gaudi")
ON_PREMISES = "cluster"  # cloud of nodes without a provider


class _UnusableNodeError(Exception):
    """Reason why one node is skipped."""


def group(
    context: str,
    nodes: Iterable[Node],
    catalogue: Catalogue,
    rules: PodRules,
    *,
    usage: Mapping[str, Usage] | None = None,
    named: Gpu | None = None,
) -> Cluster:
    """Group equal nodes, and group nodes that cannot be used by reason.

    ``usage``: requests of the pods on the nodes, by node name; None: unknown. ``named``: GPU of nodes without
    a label of it, named by the user.
    """
    usable: dict[tuple[object, ...], list[ClusterNodes]] = {}
    skipped: dict[str, list[str]] = {}
    without_gpu = 0
    for node in sorted(nodes, key=lambda node: node.name):
        if not _has_accelerator(node):
            without_gpu += 1
            continue
        try:
            group = _usable(node, catalogue, named)
            if usage is not None:
                group = _subtract_usage(group, usage.get(node.name))
        except _UnusableNodeError as reason:
            skipped.setdefault(str(reason), []).append(node.name)
            continue
        group = replace(group, untolerated_taints=rules.fence(group.taints)[1])
        machine = (
            group.instance.name,
            group.gpu.name,
            group.instance.gpu_count,
            group.efa,
            group.spot,
            group.gpu_assumed,
        )
        key = (*machine, group.taints, group.free_gpus)
        usable.setdefault(key, []).append(group)
    return Cluster(
        context=context,
        nodes=tuple(_together(members) for members in usable.values()),
        skipped=tuple(SkippedNodes(reason=reason, names=tuple(names)) for reason, names in skipped.items()),
        nodes_without_gpu=without_gpu,
    )


def _has_accelerator(node: Node) -> bool:
    resources = {*node.allocatable, *node.capacity}
    if any(name in (GPUS, *OTHER_ACCELERATORS) or name.startswith(MIG) for name in resources):
        return True
    return any(label in node.labels for label in (PRODUCT, KARPENTER_NAME, GKE))


def _together(members: list[ClusterNodes]) -> ClusterNodes:
    ephemeral = [member.ephemeral_bytes for member in members if member.ephemeral_bytes is not None]
    sizes = [member.gpu for member in members]
    return replace(
        members[0],
        gpu=min(sizes, key=lambda gpu: gpu.vram_bytes),
        count=len(members),
        cpu=min(member.cpu for member in members),
        memory_bytes=min(member.memory_bytes for member in members),
        ephemeral_bytes=min(ephemeral) if len(ephemeral) == len(members) else None,
        zones=tuple(sorted({zone for member in members for zone in member.zones})),
        names=tuple(name for member in members for name in member.names),
        free=_least([member.free for member in members]),
        holders=tuple(sorted({pod for member in members for pod in member.holders})),
    )


def _least(parts: list[Free | None]) -> Free | None:
    known_parts = [part for part in parts if part is not None]
    if len(known_parts) < len(parts):
        return None
    return Free(
        gpus=min(part.gpus for part in known_parts),
        cpu=min(part.cpu for part in known_parts),
        memory_bytes=min(part.memory_bytes for part in known_parts),
    )


def _subtract_usage(node: ClusterNodes, used: Usage | None) -> ClusterNodes:
    """Subtract usage from one node; an unused node will run the usual daemon pods."""
    daemons = tables.daemons()
    gpus, cpu, memory = (used.gpus, used.cpu, used.memory_bytes) if used else (0, 0.0, 0)
    return replace(
        node,
        free=Free(
            gpus=max(node.instance.gpu_count - gpus, 0),
            cpu=max(node.cpu - max(cpu, daemons.cpu), 0.0),
            memory_bytes=max(node.memory_bytes - max(memory, daemons.memory_bytes), 0),
        ),
        holders=used.holders if used else (),
    )


def _usable(node: Node, catalogue: Catalogue, named: Gpu | None) -> ClusterNodes:
    """Return one node as a group. Raises _UnusableNodeError."""
    if node.unavailable:
        raise _UnusableNodeError(node.unavailable)
    _whole_gpus(node)
    count = int(node.allocatable.get(GPUS, 0))
    table_gpu = _gpu(node, catalogue)
    gpu = _sized(node, table_gpu or _named(node, named))
    labels = node.labels
    return ClusterNodes(
        instance=_instance(node, gpu, count, catalogue),
        gpu=gpu,
        count=1,
        cpu=float(node.allocatable.get("cpu", 0)),
        memory_bytes=int(node.allocatable.get("memory", 0)),
        ephemeral_bytes=_whole(node.allocatable.get(DISK)),
        efa=int(node.allocatable.get(EFA, 0)),
        spot=tables.is_spot(labels),
        zones=(labels[ZONE],) if ZONE in labels else (),
        taints=node.taints,
        names=(node.name,),
        gpu_assumed=table_gpu is None,
    )


def _whole_gpus(node: Node) -> None:
    """Raise _UnusableNodeError unless the node allocates complete NVIDIA GPUs."""
    labels = node.labels
    product = labels.get(PRODUCT, "")
    if any(node.allocatable.get(name, 0) for name in OTHER_ACCELERATORS):
        accelerator = next(name for name in OTHER_ACCELERATORS if node.allocatable.get(name, 0))
        raise _UnusableNodeError(f"not an NVIDIA GPU: {accelerator}")
    replicas = labels.get(REPLICAS, "1")
    shared = product.endswith("-SHARED") or labels.get(SHARING, "none") not in ("none", "")
    if shared or (replicas.isdigit() and int(replicas) > 1):
        named = labels.get(SHARING, "none")
        strategy = named if named != "none" else "time-slicing"
        raise _UnusableNodeError(f"GPUs are shared ({strategy}, {REPLICAS}={replicas})")
    if labels.get(GKE_CLIENTS, "1") not in ("", "0", "1"):
        raise _UnusableNodeError(f"GPUs are shared ({GKE_CLIENTS}={labels[GKE_CLIENTS]})")
    if "-MIG-" in product or GKE_PARTITION in labels:
        label = product or f"{GKE_PARTITION}={labels[GKE_PARTITION]}"
        raise _UnusableNodeError(f"GPUs are partitioned into MIG slices ({label})")
    if not node.allocatable.get(GPUS, 0):
        slices = sorted(name for name, value in node.allocatable.items() if name.startswith(MIG) and value)
        if slices:
            raise _UnusableNodeError(f"GPUs are partitioned into MIG slices ({slices[0]})")
        raise _UnusableNodeError(f"no {GPUS} is allocatable: check NVIDIA's device plugin")


def _names(node: Node) -> Iterator[tuple[str, str]]:
    """Yield (label, value) of the labels that name the node's GPU, the most specific first."""
    for label in (PRODUCT, GKE, KARPENTER_NAME):
        if node.labels.get(label):
            yield label, node.labels[label]


def _named(node: Node, gpu: Gpu | None) -> Gpu:
    """Return the GPU that the user named for unlabeled nodes. Raises _UnusableNodeError for none."""
    if gpu is not None:
        return gpu
    kind = node.labels.get(INSTANCE_TYPE, "")
    type_hint = f", and {INSTANCE_TYPE}={kind} is in no table" if kind else ""
    raise _UnusableNodeError(
        f"unknown GPU: no label names it ({PRODUCT} is missing){type_hint}; set it with --gpu NAME"
    )


def _gpu(node: Node, catalogue: Catalogue) -> Gpu | None:
    """Return the GPU of the first label that names one, otherwise of the instance type, otherwise None."""
    for label, value in _names(node):
        mib = node.labels.get(KARPENTER_MIB, "")
        if label == KARPENTER_NAME and mib.isdigit():
            gpu = catalogue.find_gpu_of_size(value, int(mib))
            value = f"{value} of {mib} MiB"
        else:
            gpu = catalogue.find_gpu(value)
        if gpu is None:
            raise _UnusableNodeError(f"unknown GPU: {label}={value} (add it: --hardware FILE)")
        return gpu
    kind = node.labels.get(INSTANCE_TYPE, "")
    item = catalogue.find_instance(kind) if kind else None
    return None if item is None else catalogue.gpu(item.gpu)


def _sized(node: Node, gpu: Gpu) -> Gpu:
    """Return the GPU with the memory reported by the driver, if smaller or if the table has no such size."""
    mib = node.labels.get(PRODUCT_MIB, "")
    if not mib.isdigit() or int(mib) == 0:
        return gpu
    size = int(mib) * MIB
    return replace(
        gpu, vram_bytes=min(size, gpu.vram_bytes) if gpu.vram_reported else size, vram_reported=True
    )


def _instance(node: Node, gpu: Gpu, count: int, catalogue: Catalogue) -> Instance:
    """Return the instance type of the table with that GPU, otherwise one derived from the labels."""
    kind = node.labels.get(INSTANCE_TYPE, "")
    cloud = node.cloud or ON_PREMISES
    table_instance = catalogue.find_instance(kind or f"{count}x {gpu.name}")
    if table_instance is not None and cloud != table_instance.cloud in CLOUDS.values():
        table_instance = None  # same name as an instance type of another cloud: its price does not apply
    vcpu, ram = _whole(node.capacity.get("cpu")), _whole(node.capacity.get("memory"))
    if table_instance is not None and table_instance.gpu == gpu.name:
        return replace(
            table_instance,
            gpu_count=count,
            vcpu=table_instance.vcpu or vcpu,
            ram_bytes=table_instance.ram_bytes or ram,
        )
    return Instance(
        cloud=cloud,
        name=kind or f"{count}x {gpu.name}",
        gpu=gpu.name,
        gpu_count=count,
        vcpu=vcpu,
        ram_bytes=ram,
        network_gbps=None,
        fabric="EFA" if node.allocatable.get(EFA) else "",
        usd_per_hour=None,
        spot_usd_per_hour=None,
        region=node.labels.get(REGION),
        price_date=None,
        price_source="",
        source=f"labels of node {node.name}",
        notes="",
    )


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
