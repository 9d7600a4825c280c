"""Places: instance types that a plan may use, of the catalogue or of a cluster."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from estimator import hardware
from estimator.engines import fp16
from estimator.engines.support import refuse_gpu, unsupported_gpu
from estimator.errors import UserError
from estimator.hardware import Gpu, Instance
from estimator.hardware.catalogue.parts import is_part
from estimator.hardware.cluster.nodes import GPUS
from estimator.hardware.cluster.taints import toleration_option
from estimator.job import Job, Target
from estimator.names import did_you_mean
from estimator.planning.goals import Goals
from estimator.planning.interruption_rates import NO_RATE, Rate, rate_of

if TYPE_CHECKING:
    from estimator.hardware.cluster import Cluster, ClusterNodes
    from estimator.hardware.cluster.quotas import Quota

# Without a GPU, training a larger model than this takes days for a first result: a 0.5 B model reaches about
# 10 to 50 tokens/s on a laptop. --device cpu overrides it.
LARGEST_MODEL_ON_CPU = 500_000_000
ALLOCATABLE = 0.9  # share of a node's CPU and memory; the system and cluster pods use the rest
NODE_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
MORE_NODES = (24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # if the user allows them
CLUSTER_CLOUDS = ("aws", "gcp", "azure")  # with a managed Kubernetes
FREE_SHARE = 0.9  # share of a present node's free resources: other pods may start before the run's
WAIT_PREFIX = "the run waits"  # prefix of notes on busy resources
MOST_OWN_GPUS = 8  # per node, if the user sets no number
MOST_NAMED = 3  # pods and node groups in a message
RDMA_FABRICS = ("EFA", "IB ", "RoCE", "RDMA", "GPUDirect")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Instance type that a plan may use, and its resources for jobs."""

    name: str  # empty: hardware of the user, of which only the GPUs are known
    gpu: Gpu
    gpus: int  # per node
    vcpu: int | None
    ram_bytes: int | None
    allocatable: float  # share of CPU and memory for jobs
    disk_bytes: int | None = None  # ephemeral storage of a cluster node; None: unknown
    network_gbps: float | None
    rdma: bool
    cloud: str | None = None
    usd_per_hour: float | None = None
    spot: bool = False  # may be interrupted at any time, at the spot price
    interruptions: Rate = NO_RATE  # rate for spot nodes
    price: str = ""  # source of the price, for messages
    max_nodes: int | None = None
    free_nodes: int = 0  # number of present and free nodes
    tier: int = 0  # higher tiers are searched only if no place of a lower one fits
    notes: tuple[str, ...] = ()  # about nodes of a cluster, for the plan's reasons
    shared: bool = False  # a cluster node whose other GPUs are used by other jobs
    gpu_assumed: bool = False  # named by the user, not by a node label

    def shapes(self, target: Target, goals: Goals) -> Iterator[tuple[int, int]]:
        """Yield the (nodes, GPUs per node) to try, fewest GPUs first.

        A node is filled before a second one is used, unless the user sets both numbers.
        """
        counts = [2**power for power in range(5) if 2**power < self.gpus] + [self.gpus]
        if target.gpus:
            counts = [target.gpus]
        max_nodes = min(goals.max_nodes or NODE_COUNTS[-1], self.max_nodes or 2**30)
        nodes_tried = [nodes for nodes in (*NODE_COUNTS, *MORE_NODES) if nodes <= max_nodes]
        if counts[-1] < self.gpus:
            nodes_tried = nodes_tried[:1]
        for nodes in [target.nodes] if target.nodes else nodes_tried:
            for count in counts if nodes == 1 else counts[-1:]:
                if nodes * count <= (goals.max_gpus or nodes * count) and nodes <= (self.max_nodes or nodes):
                    yield nodes, count


def choose_places(job: Job, target: Target, goals: Goals) -> list[Place]:
    """Return the places that can run the job and match the options. Raises UserError if there are none."""
    usable = list_places(target, goals, any_gpu=job.precision in ("fp32", fp16.PRECISION))
    if not usable:
        raise _no_place_error(job, target, goals)
    supported = [place for place in usable if unsupported_gpu(job, place.gpu) is None]
    if not supported:
        refuse_gpu(job, usable[0].gpu)
    given_rate = goals.interruption_rate
    return [
        replace(place, interruptions=rate_of(place.cloud, place.name, given_rate)) if place.spot else place
        for place in supported
    ]


def list_places(target: Target, goals: Goals, *, any_gpu: bool = False) -> list[Place]:
    """Return the places with NVIDIA GPUs that match the options, for any job.

    ``any_gpu``: include GPUs without bf16, which otherwise must be named by the user.
    """
    # A name of several GPUs ("A100") matches all of them
    gpus = {gpu.name for gpu in hardware.gpus_called(target.gpu)} if target.gpu else set()
    if goals.cluster is not None:
        candidates = _cluster_places(goals.cluster, target, goals)
        any_gpu = True
    else:
        names = (*goals.instance_types, *((target.instance_type,) if target.instance_type else ()))
        any_gpu = any_gpu or bool(names) or bool(gpus)
        candidates = [_catalogue_place(item, goals.spot) for item in _instances(target, goals, names)]
    usable = [
        place
        for place in candidates
        if (not gpus or place.gpu.name in gpus)
        and place.gpu.vendor == "nvidia"
        and place.gpus > 0
        and (place.gpu.bf16 or any_gpu)
        and (target.gpus or 1) <= place.gpus
    ]
    if not usable and target.kind == "catalogue":
        usable = _hypothetical_nodes(target, goals)
    return usable


def _hypothetical_nodes(target: Target, goals: Goals) -> list[Place]:
    """Return hypothetical nodes for a GPU in a number that no instance type of the table has."""
    machine = target.cloud or target.instance_type or goals.clouds or goals.instance_types or goals.spot
    if target.gpu is None or machine:
        return []
    gpus = [gpu for gpu in hardware.gpus_called(target.gpu) if gpu.vendor == "nvidia"]
    for gpu in gpus:
        _check_board_size(gpu, target.gpus or 1)
    return [
        Place(
            name="",
            gpu=gpu,
            gpus=target.gpus or MOST_OWN_GPUS,
            vcpu=None,
            ram_bytes=None,
            allocatable=1.0,
            network_gbps=None,
            rdma=False,
            max_nodes=target.nodes or goals.max_nodes or 1,
            notes=("your own hardware: price, CPUs, memory and network are unknown",),
        )
        for gpu in gpus
    ]


def _check_board_size(gpu: Gpu, per_node: int) -> None:
    """Raise UserError for more GPUs per node than any instance type connects by NVLink."""
    largest = max((item.gpu_count for item in hardware.instances() if item.gpu == gpu.name), default=per_node)
    if gpu.interconnect.startswith("NVLink") and per_node > largest:
        raise UserError(
            f"--gpus {per_node} is per node; instance types with {gpu.name} have at most {largest}.",
            f"Use --gpus {largest} --nodes {-(-per_node // largest)}, or describe the node: --hardware FILE.",
        )


def _instances(target: Target, goals: Goals, names: tuple[str, ...]) -> list[Instance]:
    if names:
        return [hardware.instance(name) for name in dict.fromkeys(names)]
    clouds = _clouds(target, goals)
    # Requests to a cluster need CPUs and memory of the instance type; plans of the catalogue do not
    needs_resources = target.kind != "catalogue"
    return [
        item
        for item in hardware.instances()
        if item.cloud in clouds and not (needs_resources and (item.vcpu is None or item.ram_bytes is None))
    ]


def _clouds(target: Target, goals: Goals) -> tuple[str, ...]:
    clouds = (*goals.clouds, *((target.cloud,) if target.cloud else ()))
    for cloud in clouds:
        if cloud.lower() not in hardware.clouds():
            raise UserError(
                f"There is no cloud {cloud!r} in the instance table.",
                f"{did_you_mean(cloud, hardware.clouds())} It has {', '.join(hardware.clouds())}.".lstrip(),
            )
        if target.kind == "batch" and cloud.lower() != "aws":
            raise UserError(f"--cloud {cloud}: AWS Batch runs on aws only.")
    if clouds:
        return tuple(cloud.lower() for cloud in clouds)
    if target.kind == "catalogue":
        return hardware.clouds()
    return ("aws",) if target.kind == "batch" else CLUSTER_CLOUDS


def _catalogue_place(item: Instance, spot: bool) -> Place:
    price = item.spot_usd_per_hour if spot else item.usd_per_hour
    kind = "spot" if spot else "on demand"
    region = f"{item.cloud} {item.price_region}" if item.price_region else item.cloud
    source = f"{kind}, {region}, " + (f"prices of {item.price_day}" if item.price_day else item.price_source)
    return Place(
        name=item.name,
        gpu=hardware.gpu(item.gpu),
        gpus=item.gpu_count,
        vcpu=item.vcpu,
        ram_bytes=item.ram_bytes,
        allocatable=ALLOCATABLE,
        network_gbps=item.network_gbps,
        rdma=any(name in item.fabric for name in RDMA_FABRICS),
        cloud=item.cloud,
        usd_per_hour=price,
        spot=spot,
        price=source if price is not None else "",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Limits:
    """Quota limits of a namespace for all nodes of a run; None: no limit."""

    gpus: float | None = None
    cpu: float | None = None
    memory_bytes: float | None = None
    in_use: tuple[Quota, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, cluster: Cluster, *, now: bool) -> _Limits:
        """Compute the limits. ``now``: minus current usage; otherwise once other runs have finished."""

        def least(resource: str) -> float | None:
            lines = [quota for quota in cluster.quotas if quota.resource == resource]
            return min((quota.remaining if now else quota.limit for quota in lines), default=None)

        used_quotas = tuple(quota for quota in cluster.quotas if quota.used and quota.resource == GPUS)
        return cls(gpus=least(GPUS), cpu=least("cpu"), memory_bytes=least("memory"), in_use=used_quotas)

    def within(self, place: Place) -> Place | None:
        """Reduce a place to the limits; None: no GPU is left."""
        nodes = place.max_nodes
        if self.gpus is not None and self.gpus < 1:
            return None
        if self.gpus is not None and self.gpus < place.gpus:
            place, nodes = _part_of(place, _power_of_two(int(self.gpus))), 1
        elif self.gpus is not None:
            nodes = min(nodes or 2**30, int(self.gpus) // place.gpus)
        for limit, available in ((self.cpu, place.vcpu), (self.memory_bytes, place.ram_bytes)):
            if limit is not None and available:
                nodes = max(min(nodes or 2**30, int(limit // available)), 1)
        cpu, memory = place.vcpu, place.ram_bytes
        return replace(
            place,
            max_nodes=nodes,
            vcpu=cpu if cpu is None or self.cpu is None else min(cpu, int(self.cpu)),
            ram_bytes=memory
            if memory is None or self.memory_bytes is None
            else min(memory, int(self.memory_bytes)),
        )


def _cluster_places(cluster: Cluster, target: Target, goals: Goals) -> list[Place]:
    """Return the present and possible places of the cluster that match the user's options."""
    kinds: dict[tuple[object, ...], list[ClusterNodes]] = {}
    names = {name.lower() for name in (*goals.instance_types, target.instance_type) if name}
    for nodes in cluster.nodes:
        if goals.spot and not nodes.could_be_spot:
            continue
        if nodes.guessed and not names:  # the user must confirm the instance type
            continue
        item = nodes.instance
        kind = (
            item.name,
            nodes.gpu.name,
            item.gpu_count,
            nodes.spot,
            nodes.untolerated_taints,
            nodes.guessed,
            nodes.gpu_assumed,
        )
        kinds.setdefault(kind, []).append(nodes)
    clouds = {cloud.lower() for cloud in (*goals.clouds, target.cloud) if cloud}
    return [
        place
        for group in kinds.values()
        for place in _places_of_kind(group, cluster, goals.spot)
        if (not names or place.name.lower() in names) and (not clouds or place.cloud in clouds)
    ]


def _places_of_kind(group: list[ClusterNodes], cluster: Cluster, spot: bool) -> Iterator[Place]:
    """Yield places of equal nodes: complete and partial ones that are free, and all of them to wait for."""
    total = group[0].instance.gpu_count
    idle = [nodes for nodes in group if nodes.free_gpus >= total]
    tier = 3 if group[0].untolerated_taints else 2 if group[0].guessed else 0
    now, when_idle = _Limits.of(cluster, now=True), _Limits.of(cluster, now=False)
    candidates: list[Place | None] = []
    if idle:
        candidates.append(now.within(_place_of_nodes(idle, group, spot, tier)))
    for nodes in group:
        if 0 < nodes.free_gpus < total:
            free = replace(_place_of_nodes([nodes], group, spot, tier), gpus=nodes.free_gpus)
            part = _part_of(free, _power_of_two(nodes.free_gpus))
            note = f"{nodes.free_gpus} of {total} GPUs are free on {', '.join(nodes.names[:MOST_NAMED])}"
            candidates.append(now.within(replace(part, notes=(*part.notes, note))))
    if len(idle) < len(group) or now != when_idle:
        complete = when_idle.within(_place_of_nodes(group, group, spot, max(tier, 1), waits=True))
        reasons = _waits_for(group, when_idle)
        candidates.append(
            replace(complete, notes=(*complete.notes, *reasons)) if complete is not None else None
        )
    yield from (place for place in candidates if place is not None)


def _place_of_nodes(
    members: list[ClusterNodes], group: list[ClusterNodes], spot: bool, tier: int, *, waits: bool = False
) -> Place:
    """Build the place of ``members`` among the equal nodes ``group``; ``waits``: including busy resources."""
    first = members[0]
    place = _catalogue_place(first.instance, spot or bool(first.spot))
    resources = [
        (nodes.cpu, nodes.memory_bytes)
        if waits or nodes.free is None
        else (nodes.free.cpu, nodes.free.memory_bytes)
        for nodes in members
    ]
    growth, disks = [nodes.max_new_nodes for nodes in members], [nodes.ephemeral_bytes for nodes in members]
    count = sum(nodes.count for nodes in members)
    return replace(
        place,
        gpu=min((nodes.gpu for nodes in members), key=lambda gpu: gpu.vram_bytes),
        vcpu=int(min(cpu for cpu, _ in resources) * FREE_SHARE),
        ram_bytes=int(min(memory for _, memory in resources) * FREE_SHARE),
        allocatable=1.0,  # allocatable resources exclude system reservations
        rdma=place.rdma and (min(n.efa for n in members) > 0 or "EFA" not in first.instance.fabric),
        max_nodes=1
        if is_part(first.gpu.name)  # NCCL uses no two slices or replicas for one job
        else None
        if None in growth
        else count + sum(number or 0 for number in growth),
        free_nodes=0 if waits else count,
        tier=tier,
        disk_bytes=None if None in disks else min(disk for disk in disks if disk is not None),
        notes=_notes(first, group),
        shared=True,
        gpu_assumed=first.gpu_assumed,
    )


def _part_of(place: Place, gpus: int) -> Place:
    """Return a part of a place: some of its GPUs, with their share of the other resources and the price."""
    share = gpus / place.gpus
    return replace(
        place,
        gpus=gpus,
        vcpu=None if place.vcpu is None else max(int(place.vcpu * share), 1),
        ram_bytes=None if place.ram_bytes is None else int(place.ram_bytes * share),
        usd_per_hour=None if place.usd_per_hour is None else place.usd_per_hour * share,
    )


def _power_of_two(number: int) -> int:
    """Return the largest power of two up to ``number``: other numbers of GPUs rarely divide a batch."""
    return int(2 ** (number.bit_length() - 1))


def _notes(first: ClusterNodes, group: list[ClusterNodes]) -> tuple[str, ...]:
    name = first.instance.name
    present = sum(nodes.count for nodes in group)
    idle = sum(nodes.count for nodes in group if nodes.free_gpus >= nodes.instance.gpu_count)
    lines = [f"the cluster has {present} of {name}" + (f", {idle} of them idle" if idle < present else "")]
    lines = lines if present else []
    for nodes in group:
        if nodes.added_by:
            limit = "any number" if nodes.max_new_nodes is None else f"{nodes.max_new_nodes}"
            lines.append(f"{nodes.added_by} may add {limit} of {name}")
    if first.gpu_assumed:
        lines.append(f"no label of {name} names its GPU: {first.gpu.name} is assumed, from --gpu")
    if first.guessed:
        lines.append("the instance type of an empty node group is unknown: yours is assumed")
    if untolerated := ", ".join(first.untolerated_taints):
        lines.append(f"untolerated taint {untolerated}; tolerate it with {toleration_option(first.taints)}")
    return tuple(lines)


def _waits_for(group: list[ClusterNodes], limits: _Limits) -> list[str]:
    """List the busy resources that a run on all of the equal nodes waits for."""
    total = sum(nodes.count * nodes.instance.gpu_count for nodes in group)
    used = total - sum(nodes.count * nodes.free_gpus for nodes in group)
    lines = []
    if used:
        holders = sorted({pod for nodes in group for pod in nodes.holders})
        suffix = f" and {len(holders) - MOST_NAMED} more" if len(holders) > MOST_NAMED else ""
        users = f", by {', '.join(holders[:MOST_NAMED])}{suffix}" if holders else ""
        lines.append(f"{WAIT_PREFIX}: {used} of these {total} {group[0].gpu.name} are in use now{users}")
    for quota in limits.in_use:
        used_of = f"{quota.amount(quota.used)} of {quota.amount(quota.limit)} {quota.key}"
        lines.append(f"{WAIT_PREFIX}: of ResourceQuota {quota.name} {used_of} are in use now")
    return lines


def _no_place_error(job: Job, target: Target, goals: Goals) -> UserError:
    """Return the error for options that no instance type or node matches."""
    choices = [("--cloud", cloud) for cloud in (*goals.clouds, target.cloud)]
    choices += [("--instance-type", name) for name in (*goals.instance_types, target.instance_type)]
    choices += [("--gpu", target.gpu), ("--gpus", str(target.gpus) if target.gpus else None)]
    options = ["--spot"] if goals.spot else []
    options += [shlex.join((name, value)) for name, value in choices if value]
    requested = " and ".join(options)
    if goals.cluster is not None:
        inventory = goals.cluster.gpu_summary or "no usable NVIDIA GPU"
        cluster = goals.cluster.where
        if goals.spot and goals.cluster.spot_queues:
            queues = " or ".join(goals.cluster.spot_queues[:MOST_NAMED])
            return UserError(
                f"No node of {cluster} matches {requested}: it has {inventory}.",
                f"Use a queue with spot machines: --queue {queues}",
            )
        cpu_advice = ", or use --device cpu" if job.model.parameters <= LARGEST_MODEL_ON_CPU else ""
        return UserError(
            f"No node of {cluster} matches {requested or 'the job'}: it has {inventory}.",
            f"{'Remove one of them, or plan' if requested else 'Plan'} for instance types of the catalogue "
            f"(`finetune plan` without --from-cluster, `finetune run` with --from-catalogue){cpu_advice}.",
        )
    if target.gpu is not None and all(gpu.vendor != "nvidia" for gpu in hardware.gpus_called(target.gpu)):
        return UserError(
            f"--gpu {target.gpu} is not an NVIDIA GPU.",
            "Choose an NVIDIA GPU: the engines are tested with CUDA only.",
        )
    return UserError(
        f"No instance type of the table matches {requested or target.kind}.",
        f"{'Remove one of them' if len(options) > 1 else 'Choose another'}; `finetune gpus` lists instance "
        "types.",
    )
