"""GPU nodes of a Kubernetes cluster, from their labels and allocatable resources.

Unknown label values are reported, never guessed. Labels: NVIDIA GPU feature discovery, Karpenter, GKE,
CoreWeave, and those of Kubernetes; OKE's nodes are known by their machine type.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from estimator.hardware.catalogue import Catalogue, Gpu, Instance
from estimator.hardware.catalogue.parts import PROFILE, replica_name, slice_name
from estimator.hardware.cluster import Cluster, ClusterNodes, Free, SkippedNodes, tables
from estimator.hardware.cluster.nodes import (
    CLOUDS,
    DISK,
    EFA,
    GPUS,
    INSTANCE_TYPE,
    MIG,
    REGION,
    SHARED_GPUS,
    ZONE,
    Node,
)
from estimator.hardware.cluster.pods import PodRules, Usage
from estimator.plan import MIB

PRODUCT, PRODUCT_MIB = "nvidia.com/gpu.product", "nvidia.com/gpu.memory"
REPLICAS, SHARING = "nvidia.com/gpu.replicas", "nvidia.com/gpu.sharing-strategy"
KARPENTER_NAME, KARPENTER_MIB = "karpenter.k8s.aws/instance-gpu-name", "karpenter.k8s.aws/instance-gpu-memory"
GKE = "cloud.google.com/gke-accelerator"
COREWEAVE = ("gpu.nvidia.com/model", "gpu.nvidia.com/class")
GKE_PARTITION = "cloud.google.com/gke-gpu-partition-size"
GKE_CLIENTS = "cloud.google.com/gke-max-shared-clients-per-gpu"
LABELS_OF_PARTS = (PRODUCT, GKE, GKE_PARTITION, GKE_CLIENTS)  # of nodes with slices or replicas
OTHER_ACCELERATORS = ("amd.com/gpu", "aws.amazon.com/neuron", "google.com/tpu", "habana.ai/gaudi")
NONE_ALLOCATABLE = f"no {GPUS} is allocatable: check NVIDIA's device plugin"
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
    user_gpu: Gpu | None = None,
) -> Cluster:
    """Group equal usable nodes, and unusable ones by reason.

    ``usage``: requests of the pods on the nodes, by node name; None: unknown. ``user_gpu``:
    GPU of nodes without a GPU label, named by the user.
    """
    usable: dict[tuple[object, ...], list[ClusterNodes]] = {}
    skipped: dict[str, list[str]] = {}
    without_gpu = 0
    for node in sorted(nodes, key=lambda node: node.name):
        if not _has_accelerator(node):
            without_gpu += 1
            continue
        try:
            group_of_one = _usable(node, catalogue, user_gpu)
            if usage is not None:
                group_of_one = _subtract_usage(group_of_one, usage.get(node.name), _units(node))
        except _UnusableNodeError as reason:
            skipped.setdefault(str(reason), []).append(node.name)
            continue
        group_of_one = replace(group_of_one, untolerated_taints=rules.match_taints(group_of_one.taints)[1])
        machine = (
            group_of_one.instance.name,
            group_of_one.gpu.name,
            group_of_one.instance.gpu_count,
            group_of_one.efa,
            group_of_one.spot,
            group_of_one.gpu_assumed,
        )
        key = (*machine, group_of_one.taints, group_of_one.free_gpus)
        usable.setdefault(key, []).append(group_of_one)
    return Cluster(
        context=context,
        nodes=tuple(_merge(members) for members in usable.values()),
        skipped=tuple(SkippedNodes(reason=reason, names=tuple(names)) for reason, names in skipped.items()),
        nodes_without_gpu=without_gpu,
    )


def _has_accelerator(node: Node) -> bool:
    resources = {*node.allocatable, *node.capacity}
    if any(name in (GPUS, SHARED_GPUS, *OTHER_ACCELERATORS) or name.startswith(MIG) for name in resources):
        return True
    return any(label in node.labels for label in (PRODUCT, KARPENTER_NAME, GKE, *COREWEAVE))


def _merge(members: list[ClusterNodes]) -> ClusterNodes:
    ephemeral = [node.ephemeral_bytes for node in members if node.ephemeral_bytes is not None]
    sizes = [node.gpu for node in members]
    return replace(
        members[0],
        gpu=min(sizes, key=lambda gpu: gpu.vram_bytes),
        count=len(members),
        cpu=min(node.cpu for node in members),
        memory_bytes=min(node.memory_bytes for node in members),
        ephemeral_bytes=min(ephemeral) if len(ephemeral) == len(members) else None,
        zones=tuple(sorted({zone for node in members for zone in node.zones})),
        names=tuple(name for node in members for name in node.names),
        free=_min_free([node.free for node in members]),
        holders=tuple(sorted({pod for node in members for pod in node.holders})),
    )


def _min_free(parts: list[Free | None]) -> Free | None:
    listed = [part for part in parts if part is not None]
    if len(listed) < len(parts):
        return None
    return Free(
        gpus=min(part.gpus for part in listed),
        cpu=min(part.cpu for part in listed),
        memory_bytes=min(part.memory_bytes for part in listed),
    )


def _subtract_usage(group_of_one: ClusterNodes, used: Usage | None, allocatable: int) -> ClusterNodes:
    """Subtract usage from one node; an unused node will run the usual daemon pods.

    ``allocatable``: GPUs, slices or replicas of the node, of which ``group_of_one`` may count fewer.
    """
    daemons = tables.daemons()
    gpus, cpu, memory = (used.gpus, used.cpu, used.memory_bytes) if used else (0, 0.0, 0)
    return replace(
        group_of_one,
        free=Free(
            gpus=min(max(allocatable - gpus, 0), group_of_one.instance.gpu_count),
            cpu=max(group_of_one.cpu - max(cpu, daemons.cpu), 0.0),
            memory_bytes=max(group_of_one.memory_bytes - max(memory, daemons.memory_bytes), 0),
        ),
        holders=used.holders if used else (),
    )


def _usable(node: Node, catalogue: Catalogue, user_gpu: Gpu | None) -> ClusterNodes:
    """Return one node as a group. Raises _UnusableNodeError.

    A node of MIG slices or replicas counts as a machine with one of them: a job can use no more.
    """
    if node.unavailable:
        raise _UnusableNodeError(node.unavailable)
    if accelerator := next((name for name in OTHER_ACCELERATORS if node.allocatable.get(name, 0)), None):
        raise _UnusableNodeError(f"not an NVIDIA GPU: {accelerator}")
    labeled_gpu: Gpu | None
    if (profile := _profile(node)) is not None:
        labeled_gpu, count = _slice(node, profile, catalogue), 1
        gpu = labeled_gpu
    elif (sharing := _sharing(node)) is not None:
        labeled_gpu, count = _replica(node, *sharing, catalogue, user_gpu), 1
        gpu = labeled_gpu
    else:
        count = int(node.allocatable.get(GPUS, 0)) if node.hami is None else node.hami[0]
        if not count:
            why = "GPUs are shared by HAMi, whose annotation is unreadable" if node.hami else NONE_ALLOCATABLE
            raise _UnusableNodeError(why)
        labeled_gpu = _gpu(node, catalogue)
        gpu = _sized(node, labeled_gpu or _gpu_of_user(node, user_gpu))
    labels = node.labels
    return ClusterNodes(
        instance=_instance(node, gpu, count, catalogue),
        gpu=gpu,
        count=1,
        cpu=float(node.allocatable.get("cpu", 0)),
        memory_bytes=int(node.allocatable.get("memory", 0)),
        ephemeral_bytes=_integer(node.allocatable.get(DISK)),
        efa=int(node.allocatable.get(EFA, 0)),
        spot=tables.is_spot(labels),
        zones=(labels[ZONE],) if ZONE in labels else (),
        taints=node.taints,
        names=(node.name,),
        gpu_assumed=labeled_gpu is None,
    )


def _units(node: Node) -> int:
    """Count the allocatable GPUs, slices or replicas of a node; with HAMi, its physical GPUs."""
    if node.hami is not None:
        return node.hami[0]
    gpus = node.allocatable.get(GPUS, 0) or node.allocatable.get(SHARED_GPUS, 0)
    return int(gpus or sum(_slices(node).values()))


def _slices(node: Node) -> dict[str, float]:
    """Return the number of allocatable MIG slices of a node, by resource."""
    return {name: value for name, value in node.allocatable.items() if name.startswith(MIG) and value}


def _profile(node: Node) -> str | None:
    """Return the largest MIG profile of a node; None if it allocates complete GPUs.

    With the device plugin's strategy "single", slices are called ``nvidia.com/gpu`` and the product label
    names the profile. GKE has its own label.
    """
    _, is_slice, profile = node.labels.get(PRODUCT, "").partition("-MIG-")
    if is_slice or (profile := node.labels.get(GKE_PARTITION, "")):
        return profile
    if node.allocatable.get(GPUS, 0):
        return None
    profiles = {name.removeprefix(MIG): PROFILE.fullmatch(name.removeprefix(MIG)) for name in _slices(node)}
    sizes = {name: int(match["gb"]) for name, match in profiles.items() if match}
    return max(sizes, key=lambda name: sizes[name], default=None)


def _slice(node: Node, profile: str, catalogue: Catalogue) -> Gpu:
    """Return a node's MIG slice as a GPU. Raises _UnusableNodeError for an unknown GPU."""
    labels = {**node.labels, PRODUCT: node.labels.get(PRODUCT, "").partition("-MIG-")[0]}
    gpu = _gpu(replace(node, labels=labels), catalogue)
    gpu_slice = gpu and catalogue.find_gpu(slice_name(gpu.name, profile))
    if gpu_slice is None:
        raise _UnusableNodeError(f"unknown GPU with MIG slices {profile}")
    return gpu_slice


def _sharing(node: Node) -> tuple[str, int] | None:
    """Return (strategy, replicas) of a node with shared GPUs; None without sharing."""
    labels = node.labels
    clients = labels.get(GKE_CLIENTS, "")
    if clients not in ("", "0", "1"):
        return f"{GKE_CLIENTS}={clients}", int(clients) if clients.isdigit() else 0
    replicas = labels.get(REPLICAS, "1")
    strategy = labels.get(SHARING, "none") or "none"
    count = int(replicas) if replicas.isdigit() else 0
    if not (labels.get(PRODUCT, "").endswith("-SHARED") or strategy != "none" or count > 1):
        return None
    return f"{strategy if strategy != 'none' else 'time-slicing'}, {REPLICAS}={replicas}", count


def _replica(node: Node, strategy: str, replicas: int, catalogue: Catalogue, user_gpu: Gpu | None) -> Gpu:
    """Return one replica of a node's shared GPUs, if the user named it. Raises _UnusableNodeError."""
    labels = {**node.labels, PRODUCT: node.labels.get(PRODUCT, "").removesuffix("-SHARED")}
    gpu = _gpu(replace(node, labels=labels), catalogue)
    name = replica_name(gpu.name, replicas) if gpu is not None and replicas > 1 else None
    if name is None or user_gpu is None or user_gpu.name != name:
        advice = f"; to use one replica: --gpu {name!r}" if name else ""
        raise _UnusableNodeError(f"GPUs are shared ({strategy}){advice}")
    return user_gpu


def _names(node: Node) -> Iterator[tuple[str, str]]:
    """Yield (label, value) of the labels that name the node's GPU, the most specific first."""
    for label in (PRODUCT, GKE, KARPENTER_NAME, *COREWEAVE):
        if node.labels.get(label):
            yield label, node.labels[label]


def _gpu_of_user(node: Node, gpu: Gpu | None) -> Gpu:
    """Return ``gpu``, which the user set for unlabeled nodes. Raises _UnusableNodeError if it is None."""
    if gpu is not None:
        return gpu
    kind = node.labels.get(INSTANCE_TYPE, "")
    also = f", and {INSTANCE_TYPE}={kind} is in no table" if kind else ""
    raise _UnusableNodeError(
        f"unknown GPU: no label names it ({PRODUCT} is missing){also}; "
        "add the machine type (--hardware FILE), or set it with --gpu NAME"
    )


def _gpu(node: Node, catalogue: Catalogue) -> Gpu | None:
    """Return the GPU of the first label that names one, otherwise of the instance type, otherwise None."""
    for label, value in _names(node):
        mib = node.labels.get(KARPENTER_MIB, "")
        if label == KARPENTER_NAME and mib.isdigit():
            gpu = catalogue.find_gpu_of_size(value, int(mib))
            value = f"{value} of {mib} MiB"
        else:
            gpu = catalogue.find_gpu(tables.gpu_of_label(label, value) or value)
        if gpu is None:
            raise _UnusableNodeError(f"unknown GPU: {label}={value} (add it: --hardware FILE)")
        return gpu
    kind = node.labels.get(INSTANCE_TYPE, "")
    item = catalogue.find_instance(kind) if kind else None
    name = item.gpu if item is not None else tables.gpu_of_label(INSTANCE_TYPE, kind)
    return None if name is None else catalogue.gpu(name)


def _sized(node: Node, gpu: Gpu) -> Gpu:
    """Return the GPU with the memory reported by the driver, if smaller or if the table has no such size."""
    mib = node.labels.get(PRODUCT_MIB, "") if node.hami is None else str(node.hami[1])
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
    listed = catalogue.find_instance(kind or f"{count}x {gpu.name}")
    if listed is not None and cloud != listed.cloud in CLOUDS.values():
        listed = None  # same name as an instance type of another cloud: its price does not apply
    vcpu, ram = _integer(node.capacity.get("cpu")), _integer(node.capacity.get("memory"))
    if listed is not None and listed.gpu == gpu.name:
        return replace(
            listed,
            gpu_count=count,
            vcpu=listed.vcpu or vcpu,
            ram_bytes=listed.ram_bytes or ram,
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


def _integer(value: float | None) -> int | None:
    return None if value is None else int(value)
