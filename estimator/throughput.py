"""Speed and price: FLOPs a token, the share of the peak that published runs reach, and what it costs.

A GPU without a sourced peak, an architecture without a published run, and a CPU have no predicted speed.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from estimator.hardware import Gpu
from estimator.memory import NF4_SCALE_BYTES, NF4_WEIGHT_BYTES
from estimator.setup import Setup

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


def flops_per_token(setup: Setup) -> float:
    """Model FLOPs of one token, forward and backward, without recomputation.

    6 for each weight that takes part in a matrix product (embedding look-ups don't), 4 where the weight is
    frozen, as its gradient isn't computed, and 12 x layers x query width x sequence length for attention:
    Chowdhery et al. 2022, PaLM (arXiv:2204.02311), appendix B; torchtitan counts the same way.
    """
    model = setup.model
    matrices = model.active_parameters - (0 if model.tied_embeddings else model.vocab * model.hidden)
    attention = 12 * model.layers * model.q_dim * setup.seq_len
    if not setup.adapters:
        return float(6 * matrices + attention)
    return float(4 * matrices + 6 * setup.trainable_parameters + attention)


def speed(setup: Setup, gpu: Gpu | None, *, network_gbps: float | None = None, rdma: bool = False) -> Speed:
    """Tokens a second of the whole job; the slower of computing and communicating, which overlap."""
    if setup.device == "cpu" or gpu is None:
        return Speed(None, "no published speed for this device")
    peak = gpu.peak_flops("fp32" if setup.precision == "fp32" else "bf16")
    found = efficiency(setup, gpu)
    if peak is None or found is None:
        return Speed(None, f"no published rate for the {gpu.name}")
    share, basis = found
    tokens = setup.micro_batch * setup.seq_len
    compute = tokens * flops_per_token(setup) / (peak * share)
    network = communication_seconds(setup, gpu, network_gbps=network_gbps, rdma=rdma)
    if network is None:
        return Speed(None, "the network between the nodes is not known")
    if network > compute:
        basis += "; the network is slower than the GPUs"
    return Speed(tokens * setup.data_parallel / max(compute, network), basis)


def efficiency(setup: Setup, gpu: Gpu) -> tuple[float, str] | None:
    """Share of the peak that model FLOPs reach (MFU), and the published run it comes from."""
    several = "several" if setup.world_size > 1 else "one"
    rows = [row for row in _table() if row["architecture"] == gpu.architecture]
    if not rows:
        return None
    checkpointing, compiled = str(int(setup.checkpointing != "none")), str(int(setup.compile))
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
        share *= CHECKPOINTING_EFFICIENCY if setup.checkpointing != "none" else 1 / CHECKPOINTING_EFFICIENCY
    if row["compile"] != compiled and not setup.compile:
        share *= EAGER_EFFICIENCY
    share *= LORA_EFFICIENCY if setup.adapters else 1.0
    share *= QLORA_EFFICIENCY if setup.quantization != "none" else 1.0
    if setup.offload != "none":
        share *= OFFLOAD_EFFICIENCY
    return share, f"{share:.0%} of peak, after {row['setting']} ({row['source']})"


def communication_seconds(setup: Setup, gpu: Gpu, *, network_gbps: float | None, rdma: bool) -> float | None:
    """Seconds of communication for each micro batch; None where a link between nodes is unknown.

    Volume: Rajbhandari et al. 2020 (arXiv:1910.02054), section 7: gathering weights twice and reducing
    gradients once where weights are sharded, otherwise reducing gradients once a step (counted double, as
    reduce-scatter and all-gather). A ring moves (n - 1) / n of the volume over its slowest link.
    """
    n = setup.world_size
    if n == 1:
        return 0.0
    size = 4 if setup.precision == "fp32" else 2
    model, trainable = setup.model, setup.trainable_parameters
    weights = float(size * model.parameters)
    if setup.quantization != "none":
        weights -= model.linear_parameters * (size - NF4_WEIGHT_BYTES - NF4_SCALE_BYTES)
    if setup.sharding == "fsdp" or setup.zero_stage == 3:
        volume = 2 * weights + size * trainable
    else:
        volume = 2 * size * trainable / setup.accumulation
    volume *= (n - 1) / n
    seconds = 0.0
    if min(setup.processes_per_node, setup.world_size) > 1 and gpu.interconnect_gbps is not None:
        share = NVLINK_SHARE if "NVLink" in gpu.interconnect.split("(")[0] else PCIE_SHARE
        seconds = volume / (gpu.interconnect_gbps / 2 * 1e9 * share)
    if setup.nodes > 1:
        if network_gbps is None:
            return None
        share = RDMA_SHARE if rdma else TCP_SHARE
        seconds = max(seconds, volume / (network_gbps / 8 * 1e9 * share))
    return seconds


@lru_cache(maxsize=1)
def _table() -> tuple[dict[str, str], ...]:
    with TABLE.open(newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))
