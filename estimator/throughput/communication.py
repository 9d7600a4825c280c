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
from estimator.vocabulary import QUANTIZATIONS, SHARDINGS

# GPUs that one NVLink switch connects beyond a node: gpus.csv, GB200 and GB300 NVL72
NVL72 = 72
# Engines that reduce gradients in fp32 with mixed precision (:func:`_gradient_bytes`)
REDUCES_FP32 = ("torchtitan", "fsdp2")


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

        ``copies``: number of receivers of the same data. It is sent only once to each domain, and to each
        process of the sender's domain (DeepSeek-V3, arXiv:2412.19437, section 3.2.2).
        """
        local_group = min(max(self.domain // stride, 1), group)
        domains = group / local_group
        # Expected number of the other domains, and processes of the own one, with at least one of this many
        # random receivers
        other_domains = (domains - 1) * (1 - (1 - 1 / domains) ** copies)
        other_processes = (local_group - 1) * (1 - (1 - 1 / group) ** copies)
        intra = self._inside(volume / copies * other_processes)
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

    gather: float  # sharded weights
    reduce: float  # gradients that are reduced in each backward pass (:func:`reduces_in_each_pass`)
    gather_step: float  # weights that ZeRO-1 and ZeRO-2 have updated in shards
    reduce_step: float  # gradients that are reduced in the last backward pass of a step
    replicas_step: float  # gradients between the replicas of a sharded group
    tensor: float
    context: float
    pipeline: float
    expert: float


def reduces_in_each_pass(setup: Setup) -> bool:
    """Return whether gradients are reduced in each backward pass, not only in the last one of a step.

    ZeRO-2 and ZeRO-3 keep shards of gradients (DeepSpeed 0.19.8, runtime/engine.py, allreduce_gradients), as
    FSDP does for full training. FSDP's engines of this package keep gradients of adapters whole until the
    last pass (launchers/engines/fsdp2/sharding.py, launchers/engines/torchtune/recipe.py).
    """
    spec = SHARDINGS[setup.sharding]
    return spec.gradients and not (spec.fsdp and setup.adapters)


def _gradient_bytes(setup: Setup) -> int:
    """Return the bytes of one gradient in a reduction.

    fp32 in torchtitan (mixed_precision_reduce) and in FSDP2 with mixed precision
    (launchers/engines/fsdp2/sharding.py); 16 bits in llm-foundry's benchmarks (mixed_precision PURE),
    fms-fsdp (bfSixteen), accelerate, Megatron-Bridge's recipes (grad_reduce_in_fp32 = False), torchtune, and
    DeepSpeed (communication_data_type).
    """
    if setup.precision == "fp32" or (setup.engine in REDUCES_FP32 and setup.precision.endswith("-mixed")):
        return 4
    return 2


def _reduction(setup: Setup) -> int:
    """Return the volume of one reduction of the gradients: 1 for a reduce-scatter, 2 for an all-reduce.

    DeepSpeed's ZeRO-1 and ZeRO-2 all-reduce by default, and each rank keeps its shard (DeepSpeed 0.19.8,
    runtime/zero/config.py, use_multi_rank_bucket_allreduce). Megatron's ZeRO-1 scatters.
    """
    scatters = SHARDINGS[setup.sharding].weights or (setup.sharding == "zero1" and setup.zero_stage is None)
    return 1 if scatters else 2


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
    trained = work(setup).trained * (weights / count.all)
    tokens = float(setup.tokens)
    repeats = 1 if setup.checkpointing == "full" else 0
    stage = -(-model.layers // setup.pipeline)
    sharding = SHARDINGS[setup.sharding]
    gathers = _gathers(setup)
    gradients = trained * _gradient_bytes(setup) * rank_share
    reduced = _reduction(setup) * gradients
    in_each_pass = reduces_in_each_pass(setup)
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
        gather=gathers * stored * rank_share,
        reduce=reduced if in_each_pass else 0.0,
        gather_step=trained * size * rank_share if sharding.optimizer and not sharding.weights else 0.0,
        reduce_step=0.0 if in_each_pass else reduced,
        replicas_step=2 * gradients / setup.shard if sharding.weights else 0.0,
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        expert=expert,
    )


def _gathers(setup: Setup) -> int:
    """Return how often weights are gathered for one micro batch; once if they stay gathered in between."""
    if not SHARDINGS[setup.sharding].weights:
        return 0
    return 1 if setup.sharding == "shard_grad_op" else 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds of communication per micro batch; fields ``*_step``: per optimizer step."""

    tensor: float  # not overlapped: products wait for it
    expert: float
    context: float
    gather: float
    reduce: float
    pipeline: float
    gather_step: float
    reduce_step: float
    replicas_step: float
    hops: int  # sequential hops between nodes per micro batch (:func:`hops`)
    hops_step: int

    @property
    def overlapped(self) -> float:
        """Seconds per micro batch that overlap with computing: context, sharding and pipeline."""
        return self.context + self.gather + self.reduce + self.pipeline

    @property
    def reduced_per_step(self) -> float:
        """Seconds per step of gradients that are reduced behind its last backward pass."""
        return self.reduce_step + self.replicas_step


def communication_seconds(setup: Setup, wires: Links) -> Times | None:
    """Return the seconds of all communication over the links; None if a required link has no known rate.

    Process ranks are ordered by tensor parallelism first, then context and data, then pipeline stages.
    """
    volume = volumes(setup)
    tensor, shard = setup.tensor, setup.shard
    # without sharded weights, all processes with other sequences reduce together
    group = shard if SHARDINGS[setup.sharding].weights else shard * setup.replicate
    times = {
        "tensor": wires.ring(volume.tensor, tensor),
        "expert": wires.exchange(volume.expert, setup.expert, tensor, setup.token_copies),
        "context": wires.ring(volume.context, setup.context, tensor),
        "gather": wires.ring(volume.gather, shard, tensor),
        "reduce": wires.ring(volume.reduce, group, tensor),
        "pipeline": wires.exchange(volume.pipeline, setup.pipeline, setup.world_size // setup.pipeline),
        "gather_step": wires.ring(volume.gather_step, group, tensor),
        "reduce_step": wires.ring(volume.reduce_step, group, tensor),
        "replicas_step": wires.ring(volume.replicas_step, setup.replicate, tensor * shard),
    }
    known_times = {name: seconds for name, seconds in times.items() if seconds is not None}
    if len(known_times) < len(times):
        return None
    per_micro_batch, per_step = hops(setup, wires)
    return Times(hops=per_micro_batch, hops_step=per_step, **known_times)


def hops(setup: Setup, wires: Links) -> tuple[int, int]:
    """Count the sequential hops between nodes in collectives of sharded weights.

    Per micro batch, and those of a step's last backward pass alone. A ring over n nodes takes n - 1
    sequential hops, whatever its volume. Each block's weights are gathered twice (once if they stay
    gathered) and its gradients are reduced once.
    """
    gathers = _gathers(setup)
    if not gathers:
        return 0, 0
    local_group = min(max(wires.domain // setup.tensor, 1), setup.shard)
    ring = (-(-setup.shard // local_group) - 1) * -(-setup.model.layers // setup.pipeline)
    in_each_pass = reduces_in_each_pass(setup)
    return ring * (gathers + in_each_pass), ring * (not in_each_pass)


def collective_seconds(setup: Setup, times: Times) -> tuple[tuple[str, float], ...]:
    """Return the seconds of a step's collectives by kind, overlapped with computing or not.

    Their sum is that of ``times``. Tensor parallelism counts as with sequence parallelism.
    """
    micro = setup.accumulation
    gradients = times.reduce * micro + times.reduce_step
    scattered = gradients if _reduction(setup) == 1 else 0.0
    collectives = {
        "all_gather": (times.gather + times.tensor / 2) * micro + times.gather_step,
        "reduce_scatter": scattered + times.tensor / 2 * micro,
        "all_reduce": gradients - scattered + times.replicas_step,
        "all_to_all": times.expert * micro,
        "send and receive": (times.context + times.pipeline) * micro,
    }
    return tuple((kind, seconds) for kind, seconds in collectives.items() if seconds)
