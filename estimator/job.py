"""Job (the training), Target (its place) and Machine (a local machine)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import NoneType
from typing import get_args

from estimator.errors import UserError
from estimator.models import PROJECTIONS, ModelSpec
from estimator.models.vision import IMAGE_SIDE
from estimator.names import unknown_choice
from estimator.option_checks import check_choice, check_count, check_names, check_type
from estimator.option_names import option_name
from estimator.setup import DEFAULT_SEQ_LEN, Answers, LlamaAdapter
from estimator.vocabulary import (
    AUTOMATIC_METHODS,
    ENGINES,
    LAUNCHED_ENGINES,
    METHODS,
    PARALLEL_ENGINES,
    TASKS,
    TRAINED_MODULES,
    Capacity,
    FsdpSharding,
    LaunchedEngine,
    LaunchedFp8,
    LaunchedMethod,
    LaunchedOptimizer,
    LaunchedQuantization,
    Offload,
    Recompute,
    RequestedDevice,
    RequestedEngine,
    RequestedMethod,
    RequestedPrecision,
    TargetKind,
    Task,
    Vision,
)

DEFAULT_BATCH = 16  # default sequences per optimizer step
_DETECT = "Set machine to detect() of estimator.hardware.local_machine, or to another Machine."
DEGREES = ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One fine-tuning job. None and "auto" are for the planner to decide.

    Raises UserError for a value that is not known or not possible, and for values that contradict each other.
    """

    model: ModelSpec
    method: RequestedMethod = "full"
    methods: tuple[LaunchedMethod, ...] = AUTOMATIC_METHODS  # candidates of method "auto"
    engine: RequestedEngine = "torchtune"
    engines: tuple[LaunchedEngine, ...] = LAUNCHED_ENGINES  # candidates of engine "auto"
    task: Task = "sft"
    seq_len: int = DEFAULT_SEQ_LEN
    global_batch_size: int = 8  # sequences for each optimizer step, over all processes
    batch_multiple: int | None = None
    """The batch is a default, and may become the nearest workable multiple of this number. None: fixed."""
    micro_batch_size: int | None = None  # sequences for each process and forward pass
    optimizer: LaunchedOptimizer = "adamw"
    precision: RequestedPrecision = "auto"
    fp8: LaunchedFp8 = "none"  # of the matrix products
    activation_checkpointing: bool | None = None
    recompute: Recompute | None = None  # part of a block that checkpointing recomputes
    recompute_every: int | None = None  # one of this many blocks is recomputed
    lora_rank: int = 8
    lora_targets: tuple[str, ...] = PROJECTIONS
    lora_experts: bool = False  # also adapt the experts
    rslora: bool = False  # adapters scaled by alpha / sqrt(rank); memory and speed are the same
    quantization: LaunchedQuantization = "nf4-double"  # of qlora's base
    llama_adapter: LlamaAdapter = field(default_factory=LlamaAdapter)
    trained_modules: tuple[str, ...] = ()  # values of TRAINED_MODULES, fully trained next to LoRA adapters
    new_tokens: int = 0  # rows of the model's embedding and head that it was not published with
    packing: bool | None = False
    variable_length: bool | None = None
    """Documents separated by their lengths instead of padding and a mask. None: where supported."""
    longest_first: bool = True  # batches that vary in length begin with the longest
    expandable_segments: bool = True  # option of the CUDA allocator against fragmentation
    compile: bool | None = False
    liger: bool | None = False  # Liger-Kernel's kernels in place of the model's own
    vision: Vision | None = None  # how the tower of a vision-language model is trained; None: text alone
    images_per_row: int = 1  # images per sequence, with ``vision``
    image_size: int = IMAGE_SIDE  # pixels of the side of a square image
    optimizer_in_backward: bool = False  # applies each gradient immediately, without accumulation
    zero_stage: int | None = None
    fsdp_sharding: FsdpSharding | None = None  # whether weights are resharded after their use
    replicas: int | None = None  # copies of the model under FSDP, each divided over as many processes
    offload: Offload = "none"
    steps: int | None = None  # optimizer steps of the whole run; None: not known yet
    evaluated_sequences: int = 0  # held-out ones that go through the model while it trains, at most
    keep_checkpoints: int = 2
    adapter_only: bool = False  # export the adapter without merging it
    answers: Answers = field(default_factory=Answers)
    tensor_parallel: int | None = None
    context_parallel: int | None = None
    pipeline_parallel: int | None = None
    expert_parallel: int | None = None

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers()
        self._check_sharding()
        self._check_engine()
        self._check_trained_parts()
        self._check_degrees()

    def _check_choices(self) -> None:
        model: object = self.model  # callers without a type checker give a name
        if isinstance(model, str):
            raise UserError(f"model = {model!r} is a name.", "Use estimator.models.find(NAME).")
        check_type("model", model, ModelSpec, "Use estimator.models.find(NAME), or resolve(NAME).spec.")
        for name in ("methods", "engines", "lora_targets", "trained_modules"):
            check_names(name, getattr(self, name))
        for name in ("activation_checkpointing", "packing", "variable_length", "compile", "liger"):
            check_type(name, getattr(self, name), (bool, NoneType), "None leaves it to the planner.")
        check_choice("method", self.method, get_args(RequestedMethod))
        check_choice("task", self.task, get_args(Task))
        check_choice("engine", self.engine, get_args(RequestedEngine))
        check_choice("optimizer", self.optimizer, get_args(LaunchedOptimizer))
        check_choice("precision", self.precision, get_args(RequestedPrecision))
        check_choice("quantization", self.quantization, get_args(LaunchedQuantization))
        check_choice(
            "fsdp.offload" if self.engine == "fsdp2" else "zero.offload", self.offload, get_args(Offload)
        )
        check_choice("fp8", self.fp8, get_args(LaunchedFp8))
        if self.recompute is not None:
            check_choice("recompute", self.recompute, get_args(Recompute))
        if self.vision is not None:
            check_choice("vision", self.vision, get_args(Vision))
        if self.fsdp_sharding is not None:
            check_choice("fsdp.sharding", self.fsdp_sharding, get_args(FsdpSharding))

    def _check_numbers(self) -> None:
        for name in (
            "seq_len",
            "images_per_row",
            "image_size",
            "global_batch_size",
            "lora_rank",
            "keep_checkpoints",
        ):
            check_count(name, getattr(self, name))
        for name in ("micro_batch_size", "batch_multiple", "steps", "replicas", "recompute_every", *DEGREES):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if self.seq_len > self.model.max_seq_len:
            raise UserError(
                (
                    f"--seq-len {self.seq_len} is longer than the {self.model.max_seq_len} tokens that "
                    f"{self.model.name} was made for."
                ),
                f"Use --seq-len {self.model.max_seq_len} or less.",
            )
        if self.batch_over(1) is None and self.micro_batch_size:
            raise UserError(
                (
                    f"A batch of {self.global_batch_size} is not divisible by --micro-batch-size "
                    f"{self.micro_batch_size}."
                ),
                (
                    "Nearest possible batch: --global-batch-size "
                    f"{nearest_multiple(self.global_batch_size, self.micro_batch_size)}."
                ),
            )
        if self.zero_stage is not None and self.zero_stage not in (0, 1, 2, 3):
            raise UserError(f"--zero-stage {self.zero_stage} is not possible.", "Choose 0, 1, 2 or 3.")

    def _check_engine(self) -> None:
        if self.offload == "cpu" and self.zero_stage == 0:
            raise UserError(
                "--zero-offload cpu needs ZeRO stage 1, 2 or 3.", "Leave --zero-stage to the planner."
            )
        if self.engine == "torchtune" and self.precision == "bf16-mixed":
            raise UserError(
                "torchtune keeps no fp32 master weights, so it has no bf16-mixed.",
                "Use --precision bf16, or --engine deepspeed.",
            )
        if (
            self.optimizer_in_backward
            and self.engine != "auto"
            and not ENGINES[self.engine].optimizer_in_backward
        ):
            raise UserError(
                f"--optimizer-in-backward is not supported by engine {self.engine}.",
                "Use --engine torchtune, or remove the option."
                if self.task in ENGINES["torchtune"].tasks
                else "Remove the option.",
            )

    def _check_trained_parts(self) -> None:
        if self.method != "auto" and METHODS[self.method].llama_adapter:
            self.llama_adapter.check(self.model)
        if unknown := set(self.trained_modules) - set(TRAINED_MODULES):
            raise UserError(
                f"--modules-to-save has unknown modules: {', '.join(sorted(unknown))}.",
                f"Choose from {', '.join(TRAINED_MODULES)}.",
            )
        if self.low_rank:
            if not self.lora_targets:
                raise UserError("--lora-targets is empty: no layer would be trained.")
            self.model.check_lora_targets(self.lora_targets)

    def _check_sharding(self) -> None:
        """Refuse options of one engine's sharding with another engine."""
        zero, fsdp = self.zero_stage is not None, self.fsdp_sharding is not None or self.replicas is not None
        engine = None if self.engine == "auto" else ENGINES[self.engine]
        if engine and (
            (zero and engine.sharding_options != "zero")
            or (self.offload != "none" and engine.offload == "none")
        ):
            raise UserError(
                f"--zero-stage and --zero-offload belong to DeepSpeed; the engine is {self.engine}.",
                "Leave them out, or use --engine deepspeed.",
            )
        if fsdp and (zero or (engine and engine.sharding_options != "fsdp")):
            reason = "ZeRO is requested" if zero else f"the engine is {self.engine}"
            raise UserError(
                f"--fsdp-sharding and --fsdp-replicas belong to FSDP2; {reason}.",
                "Leave them out, or use --engine fsdp2.",
            )

    def _check_degrees(self) -> None:
        degrees = [name for name in DEGREES if (getattr(self, name) or 1) > 1]
        if degrees and self.engine not in PARALLEL_ENGINES:
            engine = "the engines that this package launches" if self.engine == "auto" else self.engine
            raise UserError(
                f"{option_name(degrees[0])} {getattr(self, degrees[0])} is not supported by {engine}.",
                f"Remove it, or plan without launching: --engine {PARALLEL_ENGINES[0]}, or "
                f"--engine {PARALLEL_ENGINES[1]}.",
            )
        model = self.model
        heads = {degree: divides_heads(model, degree) for degree in range(1, model.heads + 1)}
        if self.tensor_parallel and not heads.get(self.tensor_parallel):
            raise UserError(
                f"--tp {self.tensor_parallel} does not divide the {model.heads} attention heads "
                f"({model.kv_heads} for keys and values) and the MLP of {model.name}.",
                f"Choose one of {', '.join(str(degree) for degree, fits in heads.items() if fits)}.",
            )
        if self.pipeline_parallel and model.layers % self.pipeline_parallel:
            raise UserError(
                f"--pp {self.pipeline_parallel} does not divide the {model.layers} layers of {model.name}.",
                f"Choose one of {', '.join(map(str, divisors(model.layers)))}.",
            )
        if self.context_parallel and not divides_sequence(self.seq_len, self.context_parallel):
            raise UserError(
                f"--cp {self.context_parallel} does not divide {self.seq_len} tokens into "
                f"{2 * self.context_parallel} equal pieces, two for each process."
            )
        if (self.expert_parallel or 1) > 1 and (not model.experts or model.experts % self.expert_parallel):  # type: ignore[operator]
            raise UserError(
                f"--ep {self.expert_parallel} does not divide the {model.experts} experts of {model.name}."
            )

    @property
    def adapters(self) -> bool:
        """Whether adapters are trained and the base stays frozen."""
        return self.method == "auto" or METHODS[self.method].adapters

    @property
    def low_rank(self) -> bool:
        """Whether adapters are low-rank matrices (LoRA, DoRA), or may be with method "auto"."""
        return self.method == "auto" or METHODS[self.method].low_rank

    def has_zero_options(self, engine: str) -> bool:
        """Whether ZeRO options are set: a stage, or offload with an engine that does not use FSDP."""
        takes_fsdp = engine != "auto" and ENGINES[engine].sharding_options == "fsdp"
        return self.zero_stage is not None or (self.offload != "none" and not takes_fsdp)

    @property
    def has_fsdp_options(self) -> bool:
        """Whether the job has options of FSDP2's sharding."""
        return self.fsdp_sharding is not None or self.replicas is not None

    @property
    def recomputes_parts(self) -> bool:
        """Whether checkpointing recomputes parts of blocks, or some blocks only."""
        return self.recompute == "selective" or (self.recompute_every or 1) > 1

    def batch_over(self, data_parallel: int) -> int | None:
        """Return the global batch for this many data-parallel processes; None if the user's is not divisible.

        A default batch is changed to the nearest divisible one.
        """
        unit = data_parallel * (self.micro_batch_size or 1)
        if self.batch_multiple is None:
            return None if self.global_batch_size % unit else self.global_batch_size
        return nearest_multiple(self.global_batch_size, math.lcm(unit, self.batch_multiple))

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all sequences of one optimizer step; a preference pair is two sequences."""
        return self.global_batch_size * self.seq_len * TASKS[self.task].sequences_per_row


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Hardware of a local machine, or of each node of a scheduler's allocation. The caller looks it up."""

    gpus: tuple[tuple[str, int], ...] = ()  # (NVML product name, memory in bytes)
    cpu_cores: int
    ram_bytes: int
    disk_free_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Place of the job, with the user's own choices; None: the planner decides.

    On ``"local"`` the nodes share the one machine; an ``"allocation"`` (Slurm's, PBS's) has one for each.
    """

    kind: TargetKind = "local"
    machine: Machine | None = None
    nodes: int | None = None
    gpus: int | None = None  # for each node; on CPUs: processes for each node
    gpu: str | None = None
    instance_type: str | None = None
    cloud: str | None = None
    device: RequestedDevice = "auto"
    capacity: Capacity = "usual"  # usual: rank low on-demand availability last
    tight: bool = False  # rank plans with a risk of 2 to 20 % of running out of memory like others

    def __post_init__(self) -> None:
        if self.kind not in get_args(TargetKind):
            raise unknown_choice(f"target kind {self.kind!r}", self.kind, get_args(TargetKind))
        check_choice("device", self.device, get_args(RequestedDevice))
        check_choice("capacity", self.capacity, get_args(Capacity))
        for name in ("nodes", "gpus"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        for name in ("gpu", "instance_type", "cloud"):
            check_type(name, getattr(self, name), (str, NoneType), "Give one name.")
        check_type("machine", self.machine, (Machine, NoneType), _DETECT)
        if self.hardware_given and self.machine is None:
            raise UserError(
                f"A plan for {self.kind} needs a description of the machine.",
                _DETECT,
            )

    @property
    def hardware_given(self) -> bool:
        """Whether the hardware is given, instead of chosen by the planner."""
        return self.kind in ("local", "allocation")

    @property
    def nodes_per_machine(self) -> int:
        """Number of nodes on one machine: all on a local machine, otherwise 1."""
        return (self.nodes or 1) if self.kind == "local" else 1


def divides_heads(model: ModelSpec, degree: int) -> bool:
    """Return whether ``degree`` tensor parallel processes get equal parts of the heads and of the MLP."""
    shared = model.kv_heads % degree == 0 or degree % model.kv_heads == 0
    return model.heads % degree == 0 and shared and model.ffn % degree == 0


def divides_sequence(seq_len: int, degree: int) -> bool:
    """Return whether ``degree`` context parallel processes get equal work.

    With a causal mask each takes one piece from the front and one from the back (zig-zag): twice as many
    pieces as processes. Megatron-LM, core/utils.py, get_batch_on_this_cp_rank.
    """
    return degree == 1 or seq_len % (2 * degree) == 0


def divisors(number: int) -> list[int]:
    """Return all whole numbers that divide ``number``, in order."""
    return [degree for degree in range(1, number + 1) if number % degree == 0]


def nearest_multiple(value: int, divisor: int) -> int:
    """Return the multiple of ``divisor`` that is nearest to ``value``, at least ``divisor`` itself."""
    return max(round(value / divisor), 1) * divisor
