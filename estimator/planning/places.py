"""Places: the kinds of machines that a plan may use, of the catalogue or of the user's own cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from estimator import hardware
from estimator.errors import Change, UserError
from estimator.hardware import Gpu, Instance
from estimator.job import Job, Target
from estimator.planning.goals import Goals

if TYPE_CHECKING:
    from estimator.hardware.from_cluster import ClusterNodes

ALLOCATABLE = 0.9  # of a node's CPU and memory; the system and the cluster's own pods have the rest
NODE_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
MORE_NODES = (24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # where the user allows so many
CLUSTER_CLOUDS = ("aws", "gcp", "azure")  # with a managed Kubernetes
RDMA_FABRICS = ("EFA", "IB ", "RoCE", "RDMA", "GPUDirect")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One kind of machine that a plan may use, and what of it jobs may have."""

    name: str
    gpu: Gpu
    gpus: int  # of one machine
    vcpu: int | None
    ram_bytes: int | None
    allocatable: float  # the share of CPU and memory that jobs may have
    network_gbps: float | None
    rdma: bool
    cloud: str | None = None
    usd_per_hour: float | None = None
    spot: bool = False  # what kind of price it is
    price: str = ""  # where the price comes from, in words
    most_nodes: int | None = None

    def shapes(self, target: Target, goals: Goals) -> Iterator[tuple[int, int]]:
        """The numbers of machines to try, as (nodes, GPUs for each node), fewest GPUs first."""
        counts = [2**power for power in range(5) if 2**power < self.gpus] + [self.gpus]
        if target.gpus:
            counts = [target.gpus]
        most = min(goals.max_nodes or NODE_COUNTS[-1], self.most_nodes or 2**30)
        nodes_tried = [nodes for nodes in (*NODE_COUNTS, *MORE_NODES) if nodes <= most]
        for nodes in [target.nodes] if target.nodes else nodes_tried:
            for count in counts if nodes == 1 else counts[-1:]:
                if nodes * count <= (goals.max_gpus or nodes * count) and nodes <= (self.most_nodes or nodes):
                    yield nodes, count


def choose_places(job: Job, target: Target, goals: Goals) -> list[Place]:
    """The machines that the user's choices leave; raises UserError where they leave none."""
    # A name of several GPUs ("A100") stands for those that there are
    gpus = {gpu.name for gpu in hardware.gpus_called(target.gpu)} if target.gpu else set()
    if goals.cluster_nodes:
        candidates = [_of_cluster(nodes, goals.spot) for nodes in goals.cluster_nodes]
        any_gpu = True
    else:
        names = (*goals.instance_types, *((target.instance_type,) if target.instance_type else ()))
        any_gpu = bool(names) or bool(gpus) or job.precision == "fp32"
        candidates = [_of_catalogue(item, goals.spot) for item in _instances(target, goals, names)]
    usable = [
        place
        for place in candidates
        if (not gpus or place.gpu.name in gpus)
        and place.gpu.vendor == "nvidia"
        and place.gpus > 0
        and (place.gpu.bf16 or any_gpu)
        and (target.gpus or 1) <= place.gpus
    ]
    if not usable:
        raise _none_left(target, goals)
    return usable


def _instances(target: Target, goals: Goals, names: tuple[str, ...]) -> list[Instance]:
    if names:
        return [hardware.instance(name) for name in dict.fromkeys(names)]
    clouds = _clouds(target, goals)
    # A cluster's requests need the machine's CPUs and memory; a look at the catalogue doesn't
    with_resources = target.kind != "catalogue"
    return [
        item
        for item in hardware.instances()
        if item.cloud in clouds and not (with_resources and (item.vcpu is None or item.ram_bytes is None))
    ]


def _clouds(target: Target, goals: Goals) -> tuple[str, ...]:
    clouds = (*goals.clouds, *((target.cloud,) if target.cloud else ()))
    for cloud in clouds:
        if cloud.lower() not in hardware.clouds():
            raise UserError(
                f"There is no cloud {cloud!r} in the instance table.",
                f"It has {', '.join(hardware.clouds())}.",
            )
        if target.kind == "batch" and cloud.lower() != "aws":
            raise UserError((Change("resources.cloud", cloud), ": AWS Batch runs on aws only."))
    if clouds:
        return tuple(cloud.lower() for cloud in clouds)
    if target.kind == "catalogue":
        return hardware.clouds()
    return ("aws",) if target.kind == "batch" else CLUSTER_CLOUDS


def _of_catalogue(item: Instance, spot: bool) -> Place:
    price = item.spot_usd_per_hour if spot else item.usd_per_hour
    kind = "spot" if spot else "on demand"
    source = f"{kind}, {item.cloud} {item.region}, prices of {item.price_date}"
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


def _of_cluster(nodes: ClusterNodes, spot: bool) -> Place:
    """Nodes that exist: what pods can have of them, and no more of them than there are."""
    place = _of_catalogue(nodes.instance, spot or bool(nodes.spot))
    return replace(
        place,
        gpu=nodes.gpu,
        vcpu=int(nodes.cpu),
        ram_bytes=nodes.memory_bytes,
        allocatable=1.0,  # the node has taken its own part off already
        rdma=place.rdma and (nodes.efa > 0 or "EFA" not in nodes.instance.fabric),
        most_nodes=nodes.count,
    )


def _none_left(target: Target, goals: Goals) -> UserError:
    choices = [("cloud", cloud) for cloud in (*goals.clouds, target.cloud)]
    choices += [("instance_type", name) for name in (*goals.instance_types, target.instance_type)]
    choices += [("gpu", target.gpu), ("gpus", str(target.gpus) if target.gpus else None)]
    wishes: list[str | Change] = []
    for name, value in choices:
        if value:
            wishes += [" and "] if wishes else []
            wishes.append(Change(f"resources.{name}", value))
    if goals.cluster_nodes:
        return UserError(
            ("No NVIDIA GPU node of the cluster goes with ", *(wishes or ["the job"]), "."),
            "Leave one of them out, or see what the cluster has with finetune gpus --from-cluster.",
        )
    return UserError(
        ("No machine of the instance table goes with ", *(wishes or [target.kind]), "."),
        "Leave one of them out; estimator/data/instances.csv lists the machines.",
    )
