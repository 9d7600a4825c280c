"""Communication of one training step: volume by kind of parallelism, and rates of the links.

A link's rate is that of the datasheet times the share that published collectives usually reach
(``data/fabric_shares.csv``), unless it was measured on the cluster (``MeasuredBandwidth``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from estimator.errors import UserError
from estimator.hardware.catalogue import Gpu
from estimator.hardware.fabrics import FAST_TCP_GBPS, RDMA, fabric_shares, tcp_kind
from estimator.setup import Setup
from estimator.throughput.flops import weights_of, work
from estimator.vocabulary import QUANTIZATIONS

# GPUs that one NVLink switch connects beyond a node: gpus.csv, GB200 and GB300 NVL72
NVL72 = 72


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredBandwidth:
    """Measured bus bandwidth of collectives on the cluster, as nccl-tests defines it.

    In GB/s per process: ``intra_node`` among the GPUs of one node, ``inter_node`` among all GPUs of several
    nodes. None: not measured; the datasheet's rate applies.
    """

    intra_node_gbytes_per_s: float | None = None
    inter_node_gbytes_per_s: float | None = None
    source: str
    date: str

    def __post_init__(self) -> None:
        for name in ("intra_node_gbytes_per_s", "inter_node_gbytes_per_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UserError(f"{name} = {value!r} must be above 0 GB/s.", "Leave it out if it is unknown.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """Rates in bytes per second: of one process within its domain, and between one domain and the others.

    A domain is a node, or all nodes that one NVLink switch connects. None: unknown rate.
    """

    intra_bytes_per_s: float | None
    inter_bytes_per_s: float | None
    domain: int  # processes
    basis: str = ""

    def ring(self, volume: float, group: int, stride: int = 1) -> float | None:
        """Return the seconds of gathering or reducing ``volume`` bytes in a ``group``; None if unknown.

        ``stride`` is the distance between neighbors of the group in the order of processes. A ring enters
        and leaves each domain once, independent of the number of members in it; a domain holds members of as
        many rings as the stride. A ring moves (n - 1) / n of the volume over its slowest link.
        """
        local_group = min(max(self.domain // stride, 1), group)
        intra = self._inside(volume * (local_group - 1) / local_group)
        if local_group == group or intra is None:
            return intra
        inter = self._between(volume * (group - 1) / group * min(stride, self.domain))
        return None if inter is None else max(intra, inter)

    def exchange(self, volume: float, group: int, stride: int = 1, copies: int = 1) -> float | None:
        """Return the seconds of an all-to-all of ``volume`` bytes per process; None if unknown.

        ``copies``: number of receivers of the same data. It is sent to each domain only once (DeepSeek-V3,
        arXiv:2412.19437, section 3.2.2; Megatron's HybridEP).
        """
        local_group = min(max(self.domain // stride, 1), group)
        domains = group / local_group
        # Expected number of the other domains that hold at least one of this many random receivers
        other_domains = (domains - 1) * (1 - (1 - 1 / domains) ** copies)
        intra = self._inside(volume * (local_group - 1) / group)
        inter = self._between(volume / copies * other_domains * self.domain)
        return None if intra is None or inter is None else max(intra, inter)

    def _inside(self, volume: float) -> float | None:
        if not volume:
            return 0.0
        return None if self.intra_bytes_per_s is None else volume / self.intra_bytes_per_s

    def _between(self, volume: float) -> float | None:
        if not volume:
            return 0.0
        return None if self.inter_bytes_per_s is None else volume / self.inter_bytes_per_s


def links(
    setup: Setup, gpu: Gpu, *, network_gbps: float | None, rdma: bool, busbw: MeasuredBandwidth | None = None
) -> Links:
    """Return the rates of a job's links; ``network_gbps`` is one node's network, in gigabits a second.

    In an NVL72 rack ``processes_per_node`` may be that of a node or of the rack; NVLink connects the rack.
    """
    domain = max(setup.processes_per_node, NVL72 if "NVL72" in gpu.interconnect else 1)
    intra = inter = None
    basis = ""
    if gpu.interconnect_gbps is not None:
        fast = gpu.interconnect.split("(")[0]
        kind = next((name for name in ("NVLink", "xGMI") if name in fast), "PCIe").lower()
        intra = gpu.interconnect_gbps / 2 * 1e9 * _share(kind)  # the table counts both directions
    if network_gbps is not None:
        reached = network_gbps * _share(RDMA) if rdma else _tcp_gbps(network_gbps)
        inter = reached / 8 * 1e9
    if busbw is not None:
        if busbw.intra_node_gbytes_per_s is not None:
            intra = busbw.intra_node_gbytes_per_s * 1e9
        if busbw.inter_node_gbytes_per_s is not None:
            # A ring over all GPUs enters and leaves each node once: its bus bandwidth is the node's
            inter = busbw.inter_node_gbytes_per_s * 1e9
        basis = f"links as measured ({busbw.source}, {busbw.date})"
    if inter is not None:
        inter *= domain / setup.processes_per_node
    return Links(intra_bytes_per_s=intra, inter_bytes_per_s=inter, domain=domain, basis=basis)


def _tcp_gbps(line_gbps: float) -> float:
    """Return the rate that collectives reach over TCP, never less than that of a slower line."""
    slow_line_gbps = min(line_gbps, FAST_TCP_GBPS)
    return max(slow_line_gbps * _share(tcp_kind(slow_line_gbps)), line_gbps * _share(tcp_kind(line_gbps)))


def _share(kind: str) -> float:
    """Return the share of its line rate that a healthy link or network of this kind reaches."""
    return min(fabric_shares()[kind].typical, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Volumes:
    """Bytes that one process sends per micro batch; fields ``*_step``: per optimizer step."""

    gather: float  # weights gathered and gradients reduced for each micro batch where weights are sharded
    reduced: float  # of ``gather``, the gradients
    gather_step: float  # gradients and weights once a step: DDP, ZeRO 1 and 2, replicas of sharded groups
    replicas_step: float  # gradients between the replicas of a sharded group
    tensor: float
    context: float
    pipeline: float
    expert: float


@lru_cache(maxsize=65536)
def volumes(setup: Setup) -> Volumes:
    """Return the bytes that one process sends, by kind of parallelism.

    ``Links.ring`` multiplies them by (n - 1) / n. ZeRO and FSDP: Rajbhandari et al. 2020
    (arXiv:1910.02054), section 7. Tensor parallelism with sequence parallelism: Korthikanti et al. 2022
    (arXiv:2205.05198), section 4.2.2: per layer two all-gathers and two reduce-scatters in either direction.
    Ring attention: Liu et al. 2023 (arXiv:2310.01889). Experts: two all-to-alls in either direction (Lepikhin
    et al. 2020, arXiv:2006.16668).
    """
    model, size = setup.model, 4 if setup.precision == "fp32" else 2
    rank_share = 1 / (setup.tensor * setup.pipeline)  # of the weights, before data parallel sharding
    count = weights_of(model)
    experts = count.one_expert * model.experts
    weights = count.all - experts + experts / setup.expert
    stored = weights * size
    if setup.quantization != "none":
        packed = count.linear * weights / count.all
        stored = (weights - packed) * size + packed * QUANTIZATIONS[setup.quantization].weight_bytes
    trained = work(setup).trained * (weights / count.all) * size
    tokens = float(setup.tokens)
    repeats = 1 if setup.checkpointing == "full" else 0
    stage = -(-model.layers // setup.pipeline)
    gather = reduced = gather_step = replicas = 0.0
    if setup.sharding == "fsdp" or setup.zero_stage == 3:
        gather, reduced = (2 * stored + trained) * rank_share, trained * rank_share
        replicas = 2 * trained * rank_share / setup.shard
    elif setup.sharding == "shard_grad_op":
        gather, reduced = (stored + trained) * rank_share, trained * rank_share
        replicas = 2 * trained * rank_share / setup.shard
    else:
        gather_step = 2 * trained * rank_share
    width = tokens * model.hidden * size
    tensor = (4 + 4 + 2 * repeats) * width * stage if setup.tensor > 1 else 0.0
    keys = tokens * (model.kv_dim + model.v_dim) * size
    context = (3 + repeats) * keys * (setup.context - 1) * stage / setup.tensor if setup.context > 1 else 0.0
    pipeline = 2 * width * setup.virtual_stages / setup.tensor if setup.pipeline > 1 else 0.0
    expert = 0.0
    if setup.expert > 1:
        expert_layers = stage * model.expert_layers / model.layers
        expert = (4 + 2 * repeats) * width * model.experts_per_token * expert_layers / setup.tensor
    return Volumes(
        gather=gather,
        reduced=reduced,
        gather_step=gather_step,
        replicas_step=replicas,
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        expert=expert,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds of communication per micro batch; fields ``*_step``: per optimizer step."""

    tensor: float  # not overlapped: products wait for it
    expert: float
    context: float
    gather: float
    reduced: float  # part of ``gather`` for the gradients
    pipeline: float
    gather_step: float
    replicas_step: float
    hops: int  # sequential hops between nodes per micro batch (:func:`hops`)

    @property
    def overlapped(self) -> float:
        """Seconds per micro batch that overlap with computing: context, sharding and pipeline."""
        return self.context + self.gather + self.pipeline

    @property
    def overlapped_per_step(self) -> float:
        """Seconds per step that overlap with its last backward pass."""
        return self.gather_step + self.replicas_step


def communication_seconds(setup: Setup, wires: Links) -> Times | None:
    """Return the seconds of all communication over the links; None if a required link has no known rate.

    Process ranks are ordered by tensor parallelism first, then context and data, then pipeline stages.
    """
    volume = volumes(setup)
    tensor, shard = setup.tensor, setup.shard
    times = {
        "tensor": wires.ring(volume.tensor, tensor),
        "expert": wires.exchange(volume.expert, setup.expert, tensor, max(setup.model.experts_per_token, 1)),
        "context": wires.ring(volume.context, setup.context, tensor),
        "gather": wires.ring(volume.gather, shard, tensor),
        "pipeline": wires.exchange(volume.pipeline, setup.pipeline, setup.world_size // setup.pipeline),
        "gather_step": wires.ring(volume.gather_step, shard * setup.replicate, tensor),
        "replicas_step": wires.ring(volume.replicas_step, setup.replicate, tensor * shard),
    }
    known_times = {name: seconds for name, seconds in times.items() if seconds is not None}
    if len(known_times) < len(times):
        return None
    reduced = known_times["gather"] * volume.reduced / volume.gather if volume.gather else 0.0
    return Times(reduced=reduced, hops=hops(setup, wires), **known_times)


def hops(setup: Setup, wires: Links) -> int:
    """Count the sequential hops between nodes in the collectives of sharded weights, per micro batch.

    A ring over n nodes takes n - 1 sequential hops, whatever its volume. Each block's weights are gathered
    twice (once if they stay gathered) and its gradients are reduced once.
    """
    if not volumes(setup).gather:
        return 0
    local_group = min(max(wires.domain // setup.tensor, 1), setup.shard)
    collectives = 2 if setup.sharding == "shard_grad_op" else 3
    return (-(-setup.shard // local_group) - 1) * collectives * -(-setup.model.layers // setup.pipeline)


def collective_seconds(setup: Setup, times: Times) -> tuple[tuple[str, float], ...]:
    """Return the seconds of a step's collectives by kind, overlapped with computing or not.

    Their sum is that of ``times``. Gradients of ZeRO-1 and ZeRO-2 count as an all_reduce, the default of
    DeepSpeed (runtime/zero/config.py, use_multi_rank_bucket_allreduce); tensor parallelism counts as with
    sequence parallelism.
    """
    micro = setup.accumulation
    # ZeRO-1 and ZeRO-2 gather the updated weights after they have reduced the gradients
    gathered = times.gather_step / 2 if setup.sharding in ("zero1", "zero2") else 0.0
    collectives = {
        "all_gather": (times.gather - times.reduced + times.tensor / 2) * micro + gathered,
        "reduce_scatter": (times.reduced + times.tensor / 2) * micro,
        "all_reduce": times.gather_step - gathered + times.replicas_step,
        "all_to_all": times.expert * micro,
        "send and receive": (times.context + times.pipeline) * micro,
    }
    return tuple((kind, seconds) for kind, seconds in collectives.items() if seconds)
