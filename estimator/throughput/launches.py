"""Kernels that the host launches in a step, counted, and the seconds of a launch.

``data/launches.csv`` has the counts, written by ``python -m benchmarks.launches``. The host's seconds for one
layer in eager mode are fitted to published runs (``efficiency.py``, "launch"); the counts extend them to
compiled blocks, to what lies outside of the blocks, and to the optimizer.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Literal

from estimator.data import load_rows
from estimator.setup import Setup
from estimator.throughput.efficiency import kernels

TABLE = Path(__file__).parents[1] / "data" / "launches.csv"

Fusion = Literal["eager", "compiled"]

# Seconds of the host per launch on a DGX H100 with a block of Llama 3.2 1B: eager 0.616 ms for 65 kernels,
# compiled 0.163 ms for 24 (NVIDIA/Fuser#3507, 2024-12-02). By the fit to training runs eager kernels take
# 10 us: 1.1 ms for the 109 of a block.
LAUNCH_SECONDS: dict[Fusion, float] = {"eager": 9.4e-6, "compiled": 6.8e-6}
# The driver's part, cuLaunchKernel on a GB200 (meta-pytorch/tritonbench#1017, 2026-04-14)
FASTEST_LAUNCH = 3.0e-6
# The slowest published host: Qwen-1.8B on an A100, LoRA with checkpointing, 125 ms for a step of 256 tokens
# (QwenLM/Qwen@2df8e8a), in which 24 blocks launch 234 kernels each
SLOWEST_LAUNCH = 22e-6


def fused_share(setup: Setup) -> float:
    """Return the host's time for the kernels of a block, over that of its eager kernels.

    Liger's kernels count as eager ones: they are fewer, but Triton takes longer to launch them, and small
    batches were no faster (linkedin/Liger-Kernel#323). Megatron's fused kernels have their own fitted time.
    """
    if kernels(setup) != "compiled":
        return 1.0
    share = in_block("compiled", adapters=setup.adapters) / in_block("eager", adapters=setup.adapters)
    return share * LAUNCH_SECONDS["compiled"] / LAUNCH_SECONDS["eager"]


def of_step(setup: Setup, layers: float) -> float:
    """Return the launches of an optimizer step. ``layers``: passes through a layer (``Work.layers``)."""
    block = in_block("compiled" if setup.compile else "eager", adapters=setup.adapters)
    return setup.accumulation * (layers * block + outside(setup)) + of_optimizer(setup)


def in_block(fusion: Fusion, *, adapters: bool) -> int:
    """Return the launches of one block, forward and backward."""
    return _counts()[fusion, "adapters" if adapters else "full", "block"]


def outside(setup: Setup) -> int:
    """Return the launches of a micro batch outside of the blocks: embedding, last norm, head, loss."""
    return _counts()["eager", "adapters" if setup.adapters else "full", "outside"]


def of_optimizer(setup: Setup) -> int:
    """Return the launches to clip the gradients and update the weights by fused AdamW."""
    return _counts()["eager", "adapters" if setup.adapters else "full", "optimizer"]


@lru_cache(maxsize=1)
def _counts() -> dict[tuple[str, str, str], int]:
    """Read the launches of both passes by fusion, method and part."""
    return {
        (row["fusion"], row["method"], row["part"]): int(row["forward"]) + int(row["backward"])
        for row in load_rows(TABLE)
    }
