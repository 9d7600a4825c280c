"""Speed and price: FLOPs a token, the share of the peak that published runs reach, and what it costs.

A GPU without a sourced peak, an architecture without a published run, and a CPU have no predicted speed.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from estimator.hardware import Gpu
from estimator.job import Job
from estimator.memory import NF4_SCALE_BYTES, NF4_WEIGHT_BYTES, zero_stage
from estimator.models import ModelSpec
from estimator.plan import Layout

TABLE = Path(__file__).with_name("data") / "efficiency.csv"

# Model FLOP/s of adapter runs over those of full runs on the same GPU: torchtune README @1814feb17, 8210
# tokens/s at 4 FLOPs a parameter against 7210 at 6 (Llama 3.2 3B, A100, compiled, checkpointing).
LORA_EFFICIENCY = 0.76
# QLoRA over LoRA in tokens/s: 0.98 (torchtune, compiled) to 0.56 (litgpt with bitsandbytes); between them.
QLORA_EFFICIENCY = 0.8
# Eager over compiled: torchtune README @1814feb17, 7075 against 9174 tokens/s.
EAGER_EFFICIENCY = 0.77
# Checkpointing over none, in tokens/s, where only one was measured: 7210 against 9174, same source.
CHECKPOINTING_EFFICIENCY = 0.79
# An optimizer on the host makes a step 1.9 to 4.2 times slower (Megatron-LM, optimizer CPU offload).
OFFLOAD_EFFICIENCY = 0.35

# Share of the link's rate that collectives reach on large messages: 8x A100 NVLink 232 of 300 GB/s (Azure
# nccl-tests), PCIe without NVLink about 15 of 31 GB/s (NVSentinel), EFA and InfiniBand 73-80 % of the
# adapters' rate (awsome-distributed-training nccl-tests), TCP at most 60 % (NVIDIA/nccl#209).
NVLINK_SHARE, PCIE_SHARE, RDMA_SHARE, TCP_SHARE = 0.77, 0.48, 0.75, 0.6


@dataclass(frozen=True, slots=True)
class Speed:
    """Predicted speed over all processes; None where something that it follows from is unknown."""

    tokens_per_second: float | None
    basis: str


def flops_per_token(model: ModelSpec, job: Job) -> float:
    """Model FLOPs of one token, forward and backward, without recomputation.

    6 for each weight that takes part in a matrix product (embedding look-ups don't), 4 where the weight is
    frozen, as its gradient isn't computed, and 12 x layers x query width x sequence length for attention:
    Chowdhery et al. 2022, PaLM (arXiv:2204.02311), appendix B; torchtitan counts the same way.
    """
    matrices = model.active_parameters - (0 if model.tied_embeddings else model.vocab * model.hidden)
    attention = 12 * model.layers * model.q_dim * job.seq_len
    if not job.adapters:
        return float(6 * matrices + attention)
    return float(4 * matrices + 6 * job.trainable_parameters + attention)


def speed(
    job: Job, layout: Layout, gpu: Gpu | None, *, network_gbps: float | None = None, rdma: bool = False
) -> Speed:
    """Tokens a second of the whole job; the slower of computing and communicating, which overlap."""
    if layout.device == "cpu" or gpu is None:
        return Speed(None, "no published speed for this device")
    peak = gpu.peak_flops("fp32" if layout.precision == "fp32" else "bf16")
    found = efficiency(job, layout, gpu)
    if peak is None or found is None:
        return Speed(None, f"no published rate for the {gpu.name}")
    share, basis = found
    tokens = layout.micro_batch * layout.seq_len
    compute = tokens * flops_per_token(job.model, job) / (peak * share)
    network = communication_seconds(job, layout, gpu, network_gbps=network_gbps, rdma=rdma)
    if network is None:
        return Speed(None, "the network between the nodes is not known")
    if network > compute:
        basis += "; the network is slower than the GPUs"
    return Speed(tokens * layout.data_parallel / max(compute, network), basis)


def efficiency(job: Job, layout: Layout, gpu: Gpu) -> tuple[float, str] | None:
    """Share of the peak that model FLOPs reach (MFU), and the published run it comes from."""
    several = "several" if layout.world_size > 1 else "one"
    rows = [row for row in _table() if row["architecture"] == gpu.architecture]
    if not rows:
        return None
    checkpointing, compiled = str(int(layout.activation_checkpointing)), str(int(job.compile))
    row = min(
        rows,
        key=lambda row: (
            row["checkpointing"] != checkpointing,
            row["gpus"] != several,
            row["compile"] != compiled,
        ),
    )
    share = float(row["mfu_pct"]) / 100
    if row["checkpointing"] != checkpointing:
        share *= CHECKPOINTING_EFFICIENCY if layout.activation_checkpointing else 1 / CHECKPOINTING_EFFICIENCY
    if row["compile"] != compiled and not job.compile:
        share *= EAGER_EFFICIENCY
    share *= {"full": 1.0, "lora": LORA_EFFICIENCY, "qlora": LORA_EFFICIENCY * QLORA_EFFICIENCY}[job.method]
    if layout.offload == "cpu":
        share *= OFFLOAD_EFFICIENCY
    return share, f"{share:.0%} of peak, after {row['setting']} ({row['source']})"


def communication_seconds(
    job: Job, layout: Layout, gpu: Gpu, *, network_gbps: float | None, rdma: bool
) -> float | None:
    """Seconds of communication for each micro batch; None where a link between nodes is unknown.

    Volume: Rajbhandari et al. 2020 (arXiv:1910.02054), section 7: gathering weights twice and reducing
    gradients once where weights are sharded, otherwise reducing gradients once a step (counted double, as
    reduce-scatter and all-gather). A ring moves (n - 1) / n of the volume over its slowest link.
    """
    n = layout.world_size
    if n == 1:
        return 0.0
    size = 4 if layout.precision == "fp32" else 2
    model, trainable = job.model, job.trainable_parameters
    weights = float(size * model.parameters)
    if job.method == "qlora":
        weights -= model.linear_parameters * (size - NF4_WEIGHT_BYTES - NF4_SCALE_BYTES)
    if layout.sharding == "fsdp" or zero_stage(layout) == 3:
        volume = 2 * weights + size * trainable
    else:
        volume = 2 * size * trainable / layout.accumulation
    volume *= (n - 1) / n
    seconds = 0.0
    if layout.processes_per_node > 1 and gpu.interconnect_gbps is not None:
        share = NVLINK_SHARE if "NVLink" in gpu.interconnect.split("(")[0] else PCIE_SHARE
        seconds = volume / (gpu.interconnect_gbps / 2 * 1e9 * share)
    if layout.nodes > 1:
        if network_gbps is None:
            return None
        share = RDMA_SHARE if rdma else TCP_SHARE
        seconds = max(seconds, volume / (network_gbps / 8 * 1e9 * share))
    return seconds


@lru_cache(maxsize=1)
def _table() -> tuple[dict[str, str], ...]:
    with TABLE.open(newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))
