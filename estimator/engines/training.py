"""Properties of a training that engine support depends on."""

from __future__ import annotations

from dataclasses import dataclass

from estimator.models import PROJECTIONS


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """Properties of a training that engine support depends on, in addition to the model."""

    method: str
    seq_len: int
    task: str = "sft"
    precision: str = "auto"
    fp8: str = "none"
    compile: bool = False
    liger: bool = False  # use Liger-Kernel's kernels
    vision: str | None = None  # how the tower of a vision-language model is trained; None: text alone
    optimizer: str = "adamw"
    optimizer_in_backward: bool = False
    part_recomputed: bool = False  # selective checkpointing, or of some blocks only
    packing: bool = False
    lora_targets: tuple[str, ...] = PROJECTIONS
    rslora: bool = False
    lora_experts: bool = False  # adapters on experts too
    quantization: str = "nf4-double"  # of qlora's base
    processes: int = 1
    trained_modules: tuple[str, ...] = ()  # trained in full, next to LoRA adapters
    new_tokens: int = 0  # added rows of embedding and head
    zero: bool = False  # whether ZeRO's stage or offload is set
    fsdp: bool = False  # whether FSDP2's sharding, replicas or offload are set
