"""What each engine does where an option is left out. To change an engine's default, change its row."""

from __future__ import annotations

from dataclasses import dataclass

from estimator.errors import UserError
from estimator.planning.engines import LOSSES
from estimator.setup import Checkpointing, LossKind, Precision, Quantization, StateSharding


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineDefaults:
    """What one engine does where an option is left out.

    ``*_unsharded`` holds where one process has all the states, ``*_sharded`` where several divide them.
    """

    precision: Precision
    precision_unsharded: Precision | None = None  # where no process shares the states; None: the same
    sharding: StateSharding
    loss: LossKind = "plain"
    loss_chunks: int = 8
    loss_positions: int | None = None  # tokens of a sequence in each chunk, where that is what is fixed
    checkpointing: Checkpointing = "none"
    checkpointing_sharded: Checkpointing | None = None  # None: the same
    quantization: Quantization = "nf4"  # of qlora
    lora_rank: int = 8
    lora_targets: tuple[str, ...] | None = None  # None: every linear layer of the blocks
    fixed_length: bool = True
    document_mask: bool = False
    sequence_parallel: bool = True
    launched_here: bool = False  # by this package: longest batch first, with expandable segments
    source: str

    def precision_of(self, *, sharded: bool) -> Precision:
        """The precision where the states are ``sharded`` over processes, or are not."""
        return self.precision if sharded else self.precision_unsharded or self.precision

    def checkpointing_of(self, *, sharded: bool) -> Checkpointing:
        """The activation checkpointing where the states are ``sharded`` over processes, or are not."""
        return (self.checkpointing_sharded if sharded else None) or self.checkpointing

    def chunks_of(self, seq_len: int) -> int:
        """Chunks of the loss for sequences of ``seq_len`` tokens."""
        return max(seq_len // self.loss_positions, 1) if self.loss_positions else self.loss_chunks


ENGINES: dict[str, EngineDefaults] = {
    "torchtune": EngineDefaults(
        precision="bf16",
        sharding="fsdp",
        loss=LOSSES["torchtune"],
        checkpointing="full",
        quantization="nf4-double",
        document_mask=True,
        launched_here=True,
        source="torchtune 0.6.1's recipes/configs; LoRA and loss as launchers/engines/torchtune/config.py",
    ),
    "deepspeed": EngineDefaults(
        precision="bf16-mixed",
        sharding="zero3",
        loss=LOSSES["deepspeed"],
        quantization="nf4-double",
        launched_here=True,
        source="launchers/engines/deepspeed; the planner takes the lowest ZeRO stage that fits",
    ),
    "fsdp2": EngineDefaults(
        precision="bf16-mixed",
        sharding="fsdp",
        loss=LOSSES["fsdp2"],
        quantization="nf4-double",
        launched_here=True,
        source="launchers/engines/fsdp2",
    ),
    "torchtitan": EngineDefaults(
        precision="bf16-mixed",
        precision_unsharded="bf16-autocast",
        sharding="fsdp",
        checkpointing="selective",
        source="torchtitan, config/job_config.py: mixed_precision_param, ActivationCheckpoint",
    ),
    "litgpt": EngineDefaults(
        precision="bf16",
        sharding="fsdp",
        loss="chunked",
        loss_positions=128,
        checkpointing_sharded="full",
        lora_targets=("q_proj", "v_proj"),
        fixed_length=False,
        source="litgpt, finetune/full.py and finetune/lora.py",
    ),
    "transformers": EngineDefaults(
        precision="bf16",
        sharding="ddp",
        lora_targets=("q_proj", "v_proj"),
        fixed_length=False,
        source="transformers 5, Trainer and TrainingArguments; PEFT, tuners/lora/config.py",
    ),
    "composer": EngineDefaults(
        precision="bf16-mixed",
        precision_unsharded="bf16-autocast",
        sharding="fsdp",
        source="llm-foundry with Composer's FSDP FULL_SHARD and amp_bf16",
    ),
    "megatron": EngineDefaults(
        precision="bf16-mixed",
        sharding="ddp",
        lora_rank=32,
        sequence_parallel=False,
        source="Megatron-LM, training/arguments.py with --bf16; Megatron-Bridge, peft/lora.py",
    ),
}


def defaults(engine: str) -> EngineDefaults:
    """The defaults of one engine; raises UserError, naming the known engines, for another name."""
    if engine not in ENGINES:
        raise UserError(f"--engine {engine} is not known.", f"Choose one of {', '.join(ENGINES)}.")
    return ENGINES[engine]
