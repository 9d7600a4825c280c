"""Methods, tasks, optimizers, engines, shardings and other named choices, each with its properties.

Types, validators, choices of the command line, help, the JSON Schema of the settings and generated documents
derive from this module. ``Launched*`` are the names that an engine of this package runs, ``Requested*`` adds
"auto". To add a name, add it to its type and to the table of its kind. Imports only the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

LaunchedMethod = Literal["full", "lora", "qlora", "dora", "adapter-v1", "adapter-v2"]
RequestedMethod = Literal[LaunchedMethod, "auto"]
Method = Literal["full", "lora", "dora", "adapter-v1", "adapter-v2"]  # without the quantization of the base
Task = Literal["sft", "pretrain", "dpo", "orpo", "simpo", "kto", "reward", "grpo", "text-to-image"]
LaunchedOptimizer = Literal[
    "adamw", "adamw8bit", "paged-adamw", "paged-adamw8bit", "adafactor", "muon", "sgd"
]
Optimizer = Literal[LaunchedOptimizer, "adamw4bit"]
LaunchedEngine = Literal["torchtune", "deepspeed", "fsdp2", "trl"]
PlannedEngine = Literal[LaunchedEngine, "torchtitan", "megatron"]
RequestedEngine = Literal[PlannedEngine, "auto"]
Engine = Literal[  # rows of data/implementations.csv
    "torchtune", "deepspeed", "fsdp2", "torchtitan", "litgpt", "transformers", "composer", "megatron"
]
LaunchedPrecision = Literal["bf16", "bf16-mixed", "fp16-mixed", "fp32"]
RequestedPrecision = Literal["auto", LaunchedPrecision]
Precision = Literal[
    "fp32",  # everything in fp32
    "bf16",  # everything in bf16, including the optimizer's states
    "bf16-mixed",  # fp32 weights kept, bf16 copies made where they are gathered or used by the engine
    "fp16-mixed",  # like bf16-mixed with fp16 copies, and a scaled loss against underflow of gradients
    "bf16-autocast",  # fp32 weights, gradients and states; torch.autocast casts around each product
    "fp16-autocast",
]
ProductType = Literal["bf16", "fp16", "fp32"]  # of the matrix products' inputs
LaunchedFp8 = Literal["none", "tensorwise", "rowwise"]
Fp8 = Literal[LaunchedFp8, "te", "mxfp8", "nvfp4", "msamp-o1", "msamp-o2", "msamp-o3"]
LaunchedQuantization = Literal["nf4-double", "nf4", "int8"]
Quantization = Literal["none", "nf4", "nf4-double", "int8"]
Sharding = Literal["none", "ddp", "zero0", "zero1", "zero2", "zero3", "fsdp", "shard_grad_op"]
FsdpSharding = Literal["full", "grad-op"]  # choices of FSDP2 for a run
Recompute = Literal["full", "selective"]
Vision = Literal["frozen", "lora", "full"]  # training of a vision-language model's tower
Checkpointing = Literal["none", "selective", "full"]
LossKind = Literal["plain", "kernel", "chunked", "fused", "recomputed"]
LaunchedSchedule = Literal["none", "afab", "1f1b", "interleaved", "zero-bubble"]
Schedule = Literal[
    "none",
    "split",  # layers on one GPU after the other without a schedule: Hugging Face's device_map
    "afab",
    "1f1b",
    "interleaved",
    "zero-bubble",
]
Device = Literal["cuda", "cpu"]
RequestedDevice = Literal["auto", Device]
TargetKind = Literal["local", "allocation", "kubernetes", "batch", "catalogue"]
Capacity = Literal["usual", "any"]
Offload = Literal["none", "cpu"]  # choices for a run
StateOffload = Literal["none", "optimizer", "all"]  # "all": also weights and gradients
TrainedModule = Literal["embed_tokens", "lm_head", "norms"]  # trained in full next to adapters

LAUNCHED_METHODS: tuple[LaunchedMethod, ...] = get_args(LaunchedMethod)
LAUNCHED_OPTIMIZERS: tuple[LaunchedOptimizer, ...] = get_args(LaunchedOptimizer)
LAUNCHED_ENGINES: tuple[LaunchedEngine, ...] = get_args(LaunchedEngine)
PLANNED_ENGINES: tuple[PlannedEngine, ...] = get_args(PlannedEngine)
TRAINED_MODULES: tuple[TrainedModule, ...] = get_args(TrainedModule)
IMAGE_TASK: Literal["text-to-image"] = "text-to-image"


def product_type(precision: str) -> ProductType:
    """Return the type of the matrix products' inputs in a precision."""
    if precision == "fp32":
        return "fp32"
    return "fp16" if precision.startswith("fp16") else "bf16"


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodSpec:
    """Properties of a training method."""

    description: str  # trained weights, for help texts
    base: Method  # the method of the training step, whose quantization is separate
    adapters: bool = True  # adapters are trained and the base model is frozen
    low_rank: bool = False  # the adapters are LoRA's matrices, which can be switched off
    llama_adapter: bool = False  # the adapters are prompts in front of attention
    quantized: bool = False  # the frozen base model is quantized
    automatic: bool = False  # method "auto" tries it


METHODS: Mapping[str, MethodSpec] = {
    "full": MethodSpec(description="all weights", base="full", adapters=False, automatic=True),
    "lora": MethodSpec(description="low-rank adapters", base="lora", low_rank=True, automatic=True),
    "qlora": MethodSpec(
        description="LoRA on a quantized base model",
        base="lora",
        low_rank=True,
        quantized=True,
        automatic=True,
    ),
    "dora": MethodSpec(description="LoRA plus a magnitude per row (DoRA)", base="dora", low_rank=True),
    "qdora": MethodSpec(
        description="DoRA on a quantized base model", base="dora", low_rank=True, quantized=True
    ),
    "adapter-v1": MethodSpec(
        description="prompts in the attention of the upper blocks (LLaMA-Adapter)",
        base="adapter-v1",
        llama_adapter=True,
    ),
    "adapter-v2": MethodSpec(
        description="adds norms and a scale and bias per linear layer", base="adapter-v2", llama_adapter=True
    ),
}
AUTOMATIC_METHODS = tuple(name for name in LAUNCHED_METHODS if METHODS[name].automatic)
"""Methods that "auto" tries, in order: each trains less of the model than the one before, or on coarser
weights."""


def automatic_methods(*, low_rank: bool = False, quantized: bool = False) -> tuple[LaunchedMethod, ...]:
    """Return the methods that "auto" tries, in order.

    ``low_rank``: only those with LoRA adapters; ``quantized``: only those with a quantized base model.
    """
    return tuple(
        name
        for name in AUTOMATIC_METHODS
        if METHODS[name].low_rank >= low_rank and METHODS[name].quantized >= quantized
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSpec:
    """Properties of a training task: the rows of its data, and what its loss needs."""

    pairs: bool = False  # a row is a chosen and a rejected answer to one prompt
    judged: bool = False  # a row is one answer, marked good or bad
    next_token: bool = False  # the loss is the cross entropy of the next token
    draws_answers: bool = False  # answers are sampled in each step and rewarded
    images: bool = False  # a row is an image with a caption
    compares: bool = False  # every step compares with the untrained model
    methods: tuple[LaunchedMethod, ...] = LAUNCHED_METHODS
    optimizers: tuple[LaunchedOptimizer, ...] = LAUNCHED_OPTIMIZERS
    preference_settings: tuple[str, ...] = ()  # settings of section `preference` that its loss has
    extra_cost: str = ""  # why a step takes longer than one of sft with as many rows

    @property
    def sequences_per_row(self) -> int:
        """Number of training sequences per row of the data."""
        return 2 if self.pairs else 1

    @property
    def preferences(self) -> bool:
        """Whether its data has answers labeled as better or worse."""
        return self.pairs or self.judged


TASKS: Mapping[str, TaskSpec] = {
    "sft": TaskSpec(next_token=True),
    "pretrain": TaskSpec(next_token=True),
    "dpo": TaskSpec(
        pairs=True,
        compares=True,
        preference_settings=("beta", "label_smoothing"),
        extra_cost="two answers a row",
    ),
    "orpo": TaskSpec(pairs=True, preference_settings=("beta",), extra_cost="two answers a row"),
    "simpo": TaskSpec(
        pairs=True, preference_settings=("beta", "margin", "label_smoothing"), extra_cost="two answers a row"
    ),
    "kto": TaskSpec(
        judged=True,
        compares=True,
        preference_settings=("beta",),
        extra_cost="another forward pass, on answers to other prompts",
    ),
    "reward": TaskSpec(pairs=True, extra_cost="two answers a row, no output layer"),
    "grpo": TaskSpec(draws_answers=True),
    "text-to-image": TaskSpec(
        images=True, methods=("full", "lora"), optimizers=("adamw", "adamw8bit", "adafactor", "sgd")
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec:
    """Properties of an optimizer: its states, and its class if it is one of bitsandbytes.

    ``traffic_bytes``: bytes of device memory that a step reads and writes per trained fp32 parameter. AdamW
    reads weight, gradient and two moments and writes all of these but the gradient.
    """

    traffic_bytes: float
    moments: int = 0  # states per parameter that are of the type of the weights or of the master weights
    state_bytes: float = 0.0  # per parameter, of states that are quantized
    factored: bool = False  # a row and a column for each matrix (Adafactor)
    orthogonalized: bool = False  # one moment for each matrix, AdamW for the rest (Muon)
    paged: bool = False  # states are in managed memory, which is moved to the host if the GPU is full
    bitsandbytes: str = ""  # the name of its class in bitsandbytes.optim

    @property
    def needs_matrices(self) -> bool:
        """Whether it needs complete matrices instead of flat shards."""
        return self.factored or self.orthogonalized


# Both keep two states: bitsandbytes 0.4x in 8 bits, an fp32 scale for each 256 (optim/optimizer.py); torchao
# 0.15 in 4 bits, one for each 128 (optim/subclass_4bit.py)
_EIGHT_BIT_STATES = 2 * (1 + 4 / 256)
_FOUR_BIT_STATES = 2 * (0.5 + 4 / 128)
OPTIMIZERS: Mapping[str, OptimizerSpec] = {
    "adamw": OptimizerSpec(moments=2, traffic_bytes=28.0),
    "adamw8bit": OptimizerSpec(state_bytes=_EIGHT_BIT_STATES, traffic_bytes=16.0, bitsandbytes="AdamW8bit"),
    "paged-adamw": OptimizerSpec(moments=2, traffic_bytes=28.0, paged=True, bitsandbytes="PagedAdamW"),
    "paged-adamw8bit": OptimizerSpec(
        state_bytes=_EIGHT_BIT_STATES, traffic_bytes=16.0, paged=True, bitsandbytes="PagedAdamW8bit"
    ),
    "adafactor": OptimizerSpec(traffic_bytes=20.0, factored=True),
    "muon": OptimizerSpec(moments=1, traffic_bytes=20.0, orthogonalized=True),
    "sgd": OptimizerSpec(moments=1, traffic_bytes=12.0),
    "adamw4bit": OptimizerSpec(state_bytes=_FOUR_BIT_STATES, traffic_bytes=15.0),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingSpec:
    """Model states that a sharding divides over processes, and its usual name."""

    title: str
    weights: bool = False
    gradients: bool = False
    optimizer: bool = False
    fsdp: bool = False
    zero_stage: int | None = None  # of DeepSpeed's ZeRO

    @property
    def divides(self) -> bool:
        """Whether any of the states is sharded over processes."""
        return self.optimizer


SHARDINGS: Mapping[str, ShardingSpec] = {
    "none": ShardingSpec(title="not sharded"),
    "ddp": ShardingSpec(title="DDP"),
    "zero0": ShardingSpec(title="ZeRO-0", zero_stage=0),
    "zero1": ShardingSpec(title="ZeRO-1", optimizer=True, zero_stage=1),
    "zero2": ShardingSpec(title="ZeRO-2", optimizer=True, gradients=True, zero_stage=2),
    "zero3": ShardingSpec(title="ZeRO-3", optimizer=True, gradients=True, weights=True, zero_stage=3),
    "fsdp": ShardingSpec(title="FSDP", optimizer=True, gradients=True, weights=True, fsdp=True),
    # Its weights are gathered from the forward pass to the end of the backward pass
    "shard_grad_op": ShardingSpec(
        title="FSDP grad-op", optimizer=True, gradients=True, weights=True, fsdp=True
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationSpec:
    """Storage format of the weights of a quantized base model."""

    description: str
    weight_bytes: float  # bytes per weight, including scales


QUANTIZATIONS: Mapping[str, QuantizationSpec] = {
    "nf4-double": QuantizationSpec(description="4 bits per weight (NF4), 8-bit scales", weight_bytes=0.516),
    "nf4": QuantizationSpec(description="4 bits per weight (NF4), 32-bit scales", weight_bytes=0.5625),
    "int8": QuantizationSpec(description="8 bits per weight, a scale for each row", weight_bytes=1.0),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineDefaults:
    """Defaults of an engine for the options of ``finetune estimate``.

    ``*_unsharded``: for one process with all states; ``*_sharded``: for states divided over processes.
    """

    precision_unsharded: Precision | None = None  # None: the first of the engine's precisions
    sharding: Sharding
    loss_chunks: int = 8
    loss_positions: int | None = None  # tokens per chunk, for engines with a fixed chunk size
    checkpointing: Checkpointing = "none"
    checkpointing_sharded: Checkpointing | None = None  # None: the same
    quantization: Quantization = "nf4"  # of qlora
    lora_rank: int = 8
    lora_targets: tuple[str, ...] | None = None  # None: every linear layer of the blocks
    fixed_length: bool = True
    document_mask: bool = False
    sequence_parallel: bool = True
    source: str

    def checkpointing_of(self, *, sharded: bool) -> Checkpointing:
        """Return the default activation checkpointing with states ``sharded`` over processes, or not."""
        return (self.checkpointing_sharded if sharded else None) or self.checkpointing

    def chunks_of(self, seq_len: int) -> int:
        """Return the number of chunks of the loss for sequences of ``seq_len`` tokens."""
        return max(seq_len // self.loss_positions, 1) if self.loss_positions else self.loss_chunks


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """Capabilities of a training engine, as far as plans depend on them.

    Packages and modules of its processes are in its folder of launchers/engines. Engines that are only
    planned or estimated list no tasks, methods or optimizers.
    """

    code: Engine  # engine with the same memory and speed of a training step
    title: str  # as its authors write it
    loss: LossKind
    precisions: tuple[Precision, ...]  # the default first
    tasks: tuple[Task, ...] = ()
    methods: tuple[LaunchedMethod, ...] = LAUNCHED_METHODS
    optimizers: tuple[LaunchedOptimizer, ...] = LAUNCHED_OPTIMIZERS
    shardings: tuple[Sharding, ...] = ("none",)  # the first is for a single process
    sharding_options: Literal["none", "zero", "fsdp"] = "none"  # the section of the settings that it reads
    offload: StateOffload = "none"  # states that offload moves off the GPU
    streams: bool = False  # cuts one stream of tokens into pieces of seq_len: every batch is full
    parallel: bool = False  # has tensor, context, pipeline and expert parallelism
    master_copies: bool = False  # weights are in 16 bits, and the optimizer keeps fp32 copies of them
    runs_loop: bool = False  # its folder is a sharding of launchers/engines/loop, over transformers models
    optimizer_in_backward: bool = False  # applies the optimizer during the backward pass
    fp8: bool = False  # has float8 matrix products here
    traced_with: Literal["", "torchtune", "transformers"] = ""  # package whose modules exact mode builds
    traced_losses: tuple[LossKind, ...] = ()
    defaults: EngineDefaults | None = None  # None: `finetune estimate` does not have it

    def precision_of(self, *, sharded: bool) -> Precision:
        """Return the default precision with states ``sharded`` over processes, or not."""
        unsharded = self.defaults.precision_unsharded if self.defaults and not sharded else None
        return unsharded or self.precisions[0]


_TEXT_TASKS: tuple[Task, ...] = ("sft", "pretrain", "dpo", "orpo", "simpo", "kto", "reward")
ENGINES: Mapping[str, EngineSpec] = {
    "torchtune": EngineSpec(
        code="torchtune",
        title="torchtune",
        loss="chunked",  # launchers/engines/torchtune/config.py
        precisions=("bf16", "fp32"),
        tasks=("sft", "pretrain", "dpo"),
        methods=("full", "lora", "qlora"),
        optimizers=("adamw", "sgd", "adamw8bit", "paged-adamw", "paged-adamw8bit"),
        shardings=("none", "fsdp"),
        optimizer_in_backward=True,
        traced_with="torchtune",
        traced_losses=("plain", "chunked"),
        defaults=EngineDefaults(
            sharding="fsdp",
            checkpointing="full",
            quantization="nf4-double",
            document_mask=True,
            source="torchtune 0.6.1's recipes/configs; LoRA and loss as "
            "launchers/engines/torchtune/config.py",
        ),
    ),
    "deepspeed": EngineSpec(
        code="deepspeed",
        title="DeepSpeed",
        loss="recomputed",  # launchers/dataset/batches.py
        precisions=("bf16-mixed", "fp32"),
        tasks=_TEXT_TASKS,
        optimizers=("adamw", "adamw8bit", "paged-adamw", "paged-adamw8bit", "sgd"),
        shardings=("zero0", "zero1", "zero2", "zero3"),
        sharding_options="zero",
        offload="optimizer",
        master_copies=True,
        runs_loop=True,
        traced_with="transformers",
        traced_losses=("plain", "recomputed"),
        defaults=EngineDefaults(
            sharding="zero3",
            quantization="nf4-double",
            source="launchers/engines/deepspeed; the planner takes the lowest ZeRO stage that fits",
        ),
    ),
    "fsdp2": EngineSpec(
        code="fsdp2",
        title="FSDP2",
        loss="recomputed",  # launchers/dataset/batches.py
        precisions=("bf16-mixed", "bf16", "fp16-mixed", "fp32"),
        tasks=(*_TEXT_TASKS, IMAGE_TASK),
        optimizers=("adamw", "adamw8bit", "adafactor", "muon", "sgd"),
        shardings=("none", "shard_grad_op", "fsdp"),
        sharding_options="fsdp",
        offload="all",
        runs_loop=True,
        fp8=True,
        defaults=EngineDefaults(sharding="fsdp", quantization="nf4-double", source="launchers/engines/fsdp2"),
    ),
    "trl": EngineSpec(
        code="transformers",
        title="TRL",
        loss="fused",  # TRL 1.16 has one tile of the logits at a time (kernels/chunked_logprob.py)
        precisions=("bf16-mixed", "bf16", "fp32"),
        tasks=("grpo",),
        methods=("full", "lora", "dora"),
        # The rest are in several groups or in bits, which transformers' Trainer was not tried with here
        optimizers=("adamw", "adafactor", "sgd"),
        shardings=("none", "ddp"),
    ),
    "torchtitan": EngineSpec(
        code="torchtitan",
        title="torchtitan",
        loss="plain",  # the whole cross-entropy by default (components/loss.py)
        precisions=("bf16-mixed", "fp32"),
        shardings=("none", "fsdp"),
        streams=True,  # hf_datasets/text_datasets.py
        parallel=True,
        optimizer_in_backward=True,
        traced_with="torchtune",
        traced_losses=("plain",),
        defaults=EngineDefaults(
            precision_unsharded="bf16-autocast",
            sharding="fsdp",
            checkpointing="selective",
            source="torchtitan, config/job_config.py: mixed_precision_param, ActivationCheckpoint",
        ),
    ),
    "litgpt": EngineSpec(
        code="litgpt",
        title="LitGPT",
        loss="chunked",
        precisions=("bf16",),
        defaults=EngineDefaults(
            sharding="fsdp",
            loss_positions=128,
            checkpointing_sharded="full",
            lora_targets=("q_proj", "v_proj"),
            fixed_length=False,
            source="litgpt, finetune/full.py and finetune/lora.py",
        ),
    ),
    "transformers": EngineSpec(
        code="transformers",
        title="transformers",
        loss="plain",
        precisions=("bf16",),
        traced_with="transformers",
        traced_losses=("plain", "recomputed"),
        defaults=EngineDefaults(
            sharding="ddp",
            lora_targets=("q_proj", "v_proj"),
            fixed_length=False,
            source="transformers 5, Trainer and TrainingArguments; PEFT, tuners/lora/config.py",
        ),
    ),
    "composer": EngineSpec(
        code="composer",
        title="Composer",
        loss="plain",
        precisions=("bf16-mixed",),
        defaults=EngineDefaults(
            precision_unsharded="bf16-autocast",
            sharding="fsdp",
            source="llm-foundry with Composer's FSDP FULL_SHARD and amp_bf16",
        ),
    ),
    "megatron": EngineSpec(
        code="megatron",
        title="Megatron",
        loss="plain",  # over the vocabulary's shards (core/tensor_parallel/cross_entropy.py)
        precisions=("bf16-mixed", "fp32"),
        shardings=("none", "zero1"),
        master_copies=True,
        streams=True,  # core/datasets/gpt_dataset.py
        parallel=True,
        defaults=EngineDefaults(
            sharding="ddp",
            lora_rank=32,
            sequence_parallel=False,
            source="Megatron-LM, training/arguments.py with --bf16; Megatron-Bridge, peft/lora.py",
        ),
    ),
}
"""To add an engine, add its record here; where this package runs it, also its folder in launchers/engines.

A single process of an engine that is planned only holds all states ("none")."""
PARALLEL_ENGINES = tuple(name for name in PLANNED_ENGINES if ENGINES[name].parallel)
