"""Setup: all parameters that determine the memory and the speed of one training step.

A Setup is built from a Job and a Layout (chosen by the planner), or from a row of a table of
published measurements. It is the only input of ``memory`` and ``throughput``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from estimator.errors import UserError
from estimator.models import PROJECTIONS, ModelSpec, parameters
from estimator.models.vision import IMAGE_SIDE
from estimator.option_checks import check_choice, check_count
from estimator.vocabulary import (
    ENGINES,
    METHODS,
    SHARDINGS,
    TASKS,
    TRAINED_MODULES,
    Checkpointing,
    Device,
    Engine,
    Fp8,
    LossKind,
    Method,
    Optimizer,
    Precision,
    Quantization,
    Schedule,
    Sharding,
    StateOffload,
    Task,
    Vision,
)

DEFAULT_SEQ_LEN = 2048  # tokens
TINY_SEQ_LEN = 256  # tiny-llama's rows are short: a plan for 2048 tokens would overestimate its memory


def default_seq_len(model: ModelSpec) -> int:
    """Return the default sequence length: 2,048 tokens, or the model's limit if lower."""
    return min(TINY_SEQ_LEN if model.name == "tiny-llama" else DEFAULT_SEQ_LEN, model.max_seq_len)


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaAdapter:
    """Prompts of LLaMA-Adapter, v1 and v2."""

    prompt_length: int = 10  # vectors of each block
    start_layer: int = 2  # the first block that has them

    def check(self, model: ModelSpec) -> None:
        """Raise UserError for prompts without vectors, or without a block of the model."""
        check_count("adapter_prompt_length", self.prompt_length)
        if not 0 <= self.start_layer < model.layers:
            raise UserError(
                f"--adapter-start-layer {self.start_layer}: {model.name} has {model.layers} blocks, counted "
                "from 0.",
                "Use --adapter-start-layer 0 for prompts in all of them.",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """Answers that are generated and rewarded in each step (grpo)."""

    length: int | None = None  # tokens, of seq_len; None: default_answer_len
    compares_reference: bool | None = (
        None  # KL divergence from the initial model in the loss; None: with adapters
    )
    reward_parameters: int = 0  # size of the reward model that scores the answers; 0: none


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """One training step: the input of memory and speed estimates. One process has one GPU.

    Degrees of parallelism are numbers of processes. Raises UserError for unknown or impossible values, and
    for degrees that do not divide the model.
    """

    model: ModelSpec
    engine: Engine = "torchtune"
    engine_version: str = ""  # version in data/implementations.csv; "": current code
    method: Method = "full"
    task: Task = "sft"
    lora_rank: int = 8
    lora_targets: tuple[str, ...] = PROJECTIONS  # may include "lm_head" and "embed_tokens"
    looped_experts: bool = False  # computed one after another, by dense products: transformers 4
    lora_experts: bool = False  # PEFT's adapters on the tensors that hold a block's experts
    llama_adapter: LlamaAdapter = field(default_factory=LlamaAdapter)
    trained_modules: tuple[str, ...] = ()  # values of TRAINED_MODULES, fully trained next to adapters
    quantization: Quantization = "none"  # of the frozen base; QLoRA is lora with nf4 or nf4-double
    upcast_frozen: bool = False  # keep its 16-bit parts in fp32 (PEFT: prepare_model_for_kbit_training)
    undivided_base: bool = False  # quantized weights that ZeRO-3 cannot shard: each process has all

    precision: Precision = "bf16"
    fp8: Fp8 = "none"  # of the matrix products
    optimizer: Optimizer = "adamw"
    fused_optimizer: bool | None = None  # AdamW in one kernel, else in torch's foreach; None: as the engine
    optimizer_in_backward: bool = False  # apply and free each gradient immediately

    sharding: Sharding = "none"
    shard: int = 1  # processes that share one copy of the states, including context parallel ones
    replicate: int = 1  # groups of ``shard`` processes (DDP, HYBRID_SHARD)
    flat_parameters: bool = False  # FSDP1 instead of FSDP2, where the engine has both
    tensor: int = 1
    sequence_parallel: bool = True  # norms and residuals sharded as well where tensor > 1
    context: int = 1
    pipeline: int = 1
    virtual_stages: int = 1  # model chunks of each pipeline stage
    schedule: Schedule = "none"
    expert: int = 1
    # a token is sent once for each of its experts (all-to-all), not once to each process (DeepEP, HybridEP);
    # None: the default of the engine
    dispatch_by_expert: bool | None = None

    micro_batch_size: int = 1  # sequences (of tasks with pairs: pairs) for each process and forward pass
    accumulation: int = 1  # forward passes for each optimizer step; with a pipeline: its micro batches
    seq_len: int = DEFAULT_SEQ_LEN  # tokens of the longest sequence
    fixed_length: bool = True  # packed or padded to seq_len; else batches vary in length
    longest_first: bool = False  # the longest of the batches of varying length is trained first
    longest_once: bool = False  # only one batch has sequences of seq_len tokens, others are far shorter
    expandable_segments: bool = False  # PYTORCH_CUDA_ALLOC_CONF: freed memory is reused at any size
    variable_length: bool = False  # documents are separated by their lengths, without padding and mask
    document_mask: bool = False  # packed samples are separated by a dense seq_len x seq_len mask
    # mean length of packed documents, each weighted by its tokens; None: one document fills seq_len
    document_tokens: int | None = None
    answers: Answers = field(default_factory=Answers)
    reference_copy: bool = False  # full training keeps a frozen copy as reference model, as TRL does

    checkpointing: Checkpointing = "none"
    recompute_every: int = 1  # one of this many blocks is checkpointed
    activation_offload: bool = False
    vision: Vision | None = None  # how the tower of a vision-language model is trained; None: text alone
    images_per_row: int = 1  # images per sequence, with ``vision``
    image_size: int = IMAGE_SIDE  # pixels of the side of a square image
    compile: bool = False
    loss: LossKind = "plain"
    loss_chunks: int = 8
    attention: Literal["flash", "math"] = "flash"  # math keeps seq_len x seq_len scores
    flash_version: int = 2  # of FlashAttention; torch's scaled_dot_product_attention has version 2
    offload: StateOffload = "none"
    offload_to: Literal["cpu", "nvme"] = "cpu"

    device: Device = "cuda"
    processes_per_node: int = 8
    keep_checkpoints: int = 2
    adapter_only: bool = False  # export the adapter without merging it

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            check_choice(_SETTINGS.get(name, name), getattr(self, name), allowed)
        for name in _COUNTS:
            check_count(_SETTINGS.get(name, name), getattr(self, name))
        check_count("keep_checkpoints", self.keep_checkpoints, least=0)
        check_count("reward_parameters", self.answers.reward_parameters, least=0)
        self._check_parallelism()
        if unknown := set(self.trained_modules) - set(TRAINED_MODULES):
            raise UserError(
                f"--modules-to-save {', '.join(sorted(unknown))} is not known.",
                f"Name some of {', '.join(TRAINED_MODULES)}.",
            )
        if self.prompts:
            self.llama_adapter.check(self.model)
        if self.quantization != "none" and not self.adapters:
            raise UserError(
                f"quantization {self.quantization} freezes the weights; full training changes them.",
                "Use method lora.",
            )
        if self.document_tokens is not None and not 1 <= self.document_tokens <= self.seq_len:
            raise UserError(
                f"--document-tokens {self.document_tokens} is not from 1 to --seq-len {self.seq_len}.",
                "Use the mean length of your documents, or remove it.",
            )

    def _check_parallelism(self) -> None:
        model, tensor = self.model, self.tensor
        if model.heads % tensor or (tensor > model.kv_heads and tensor % model.kv_heads):
            raise UserError(
                f"tensor parallel {tensor} does not divide the {model.heads} attention heads "
                f"({model.kv_heads} for keys and values) of {model.name}.",
                f"Choose one of {', '.join(str(n) for n in range(1, 17) if model.heads % n == 0)}.",
            )
        if model.ffn % tensor:
            raise UserError(f"tensor parallel {tensor} does not divide the MLP's width {model.ffn}.")
        if self.seq_len % self.context:
            raise UserError(f"context parallel {self.context} does not divide {self.seq_len} tokens.")
        # Megatron-Core counts the embedding and the loss as layers when it cuts 126 layers in 128 stages
        if self.pipeline * self.virtual_stages > model.layers + 2:
            raise UserError(
                f"pipeline {self.pipeline} x {self.virtual_stages} virtual stages is more than the "
                f"{model.layers} layers of {model.name}."
            )
        if self.expert > 1 and (not model.experts or model.experts % self.expert):
            raise UserError(
                f"expert parallel {self.expert} does not divide the {model.experts} experts of {model.name}."
            )
        if self.shard > 1 and not SHARDINGS[self.sharding].divides:
            raise UserError(f"sharding {self.sharding!r} divides nothing over {self.shard} processes.")

    @property
    def world_size(self) -> int:
        """Number of all processes. Expert parallelism reuses processes of the other kinds."""
        return self.shard * self.replicate * self.tensor * self.pipeline

    @property
    def nodes(self) -> int:
        """Number of nodes, with up to ``processes_per_node`` processes on each."""
        return -(-self.world_size // self.processes_per_node)

    @property
    def data_parallel(self) -> int:
        """Number of processes with different sequences. ``shard`` includes context parallel processes."""
        return max(self.shard * self.replicate // self.context, 1)

    @property
    def adapters(self) -> bool:
        """Whether adapters are trained and the base stays frozen."""
        return METHODS[self.method].adapters

    @property
    def prompts(self) -> bool:
        """Whether the adapters are prompts in front of attention: LLaMA-Adapter, v1 and v2."""
        return METHODS[self.method].llama_adapter

    @property
    def fsdp_in_one_process(self) -> bool:
        """Whether FSDP2 wraps the model in a single process, for its mixed precision or CPU offload.

        launchers/engines/fsdp2/sharding.py, _is_divided.
        """
        several_networks = TASKS[self.task].images and self.precision == "bf16-mixed"
        wrapped = self.sharding != "none" or self.offload == "all" or several_networks
        return self.engine == "fsdp2" and wrapped and self.world_size == 1

    @property
    def copies_weights(self) -> bool:
        """Whether one process keeps 16-bit copies of trained fp32 weights.

        launchers/engines/fsdp2/master_weights.py.
        """
        alone = self.engine == "fsdp2" and self.world_size == 1 and not self.fsdp_in_one_process
        return alone and self.precision in ("bf16-mixed", "fp16-mixed")

    @property
    def runs_loop(self) -> bool:
        """Whether the engine is the training loop of this package, which trains modules of transformers 5."""
        return ENGINES[self.engine].runs_loop

    @property
    def copies_experts(self) -> bool:
        """Whether each forward pass adds adapters to a copy of a block's experts, as PEFT's do."""
        return self.lora_experts and self.adapters and self.runs_loop

    @property
    def token_copies(self) -> int:
        """Number of experts of a token that share one message to their process.

        1: a message for each expert, as in torchtitan by default. Megatron-Bridge's recipes use DeepEP and
        HybridEP by default.
        """
        by_expert = self.engine != "megatron" if self.dispatch_by_expert is None else self.dispatch_by_expert
        return 1 if by_expert else max(self.model.experts_per_token, 1)

    @property
    def idle_blocks(self) -> int:
        """Number of blocks below LLaMA-Adapter v1's prompts: they have no backward pass and save nothing."""
        return self.llama_adapter.start_layer if self.method == "adapter-v1" else 0

    @property
    def trains_norms(self) -> bool:
        """Whether the weights of norms are trained, in full training or together with adapters."""
        return not self.adapters or self.method == "adapter-v2" or "norms" in self.trained_modules

    @property
    def reference(self) -> Literal["none", "adapters-off", "computed-before", "copy"]:
        """Reference model of DPO, KTO and GRPO: none, the base without adapters, precomputed, or a copy.

        Adapters are switched off for a second forward pass. For full training and LLaMA-Adapter, the loop of
        this package computes the initial model's log-probabilities once before training
        (launchers/evaluation/reference.py); other engines hold a frozen copy of the initial model.
        """
        task = TASKS[self.task]
        compares = self.answers.compares_reference
        if task.draws_answers and (self.adapters if compares is None else compares):
            return "adapters-off" if self.adapters else "copy"
        if not task.compares:
            return "none"
        if self.runs_loop and not (self.reference_copy and not self.adapters):
            return "adapters-off" if METHODS[self.method].low_rank else "computed-before"
        return "adapters-off" if self.adapters else "copy"

    @property
    def answer_len(self) -> int:
        """Tokens of ``seq_len`` reserved for a generated answer; 0 for tasks without generation."""
        if not TASKS[self.task].draws_answers:
            return 0
        return default_answer_len(self.seq_len) if self.answers.length is None else self.answers.length

    @property
    def sequences(self) -> int:
        """Sequences in one forward pass of one process; a preference pair is two sequences."""
        return self.micro_batch_size * TASKS[self.task].sequences_per_row

    @property
    def tokens(self) -> int:
        """Tokens in one forward pass of one process: with context parallel, its share of each sequence."""
        return self.sequences * self.seq_len // self.context

    @property
    def zero_stage(self) -> int | None:
        """DeepSpeed's ZeRO stage; None for other engines."""
        return SHARDINGS[self.sharding].zero_stage if self.engine == "deepspeed" else None

    @property
    def trainable_parameters(self) -> int:
        """Parameters that are trained: all of the model, or adapters and modules trained next to them."""
        if not self.adapters:
            return self.model.parameters
        return self.adapter_parameters + self.trained_norm_parameters + self.trained_module_parameters

    @property
    def adapter_parameters(self) -> int:
        """Adapter weights; DoRA adds a magnitude for each output (Liu et al. 2024, arXiv:2402.09353).

        LLaMA-Adapter: :func:`estimator.models.parameters.prompts`, and for v2 a scale and a bias for each
        output of every linear layer (Gao et al. 2023, arXiv:2304.15010). PEFT's v1 has one gate per block;
        litgpt and v2 in launchers/engines/loop/adapter_v2.py have one per head.
        """
        if not self.adapters:
            return 0
        if self.prompts:
            is_v2 = self.method == "adapter-v2"
            return parameters.prompts(
                self.model,
                length=self.llama_adapter.prompt_length,
                start_layer=self.llama_adapter.start_layer,
                gates=self.model.heads if is_v2 or self.engine == "litgpt" else 1,
            ) + is_v2 * 2 * parameters.outputs(self.model)
        model, rank = self.model, self.lora_rank
        inner = tuple(target for target in self.lora_targets if target not in ("lm_head", "embed_tokens"))
        outer = len(self.lora_targets) - len(inner)
        total = model.lora_parameters(
            rank, inner, family_code=self.runs_loop, magnitudes=self.method == "dora"
        )
        if self.copies_experts:
            total += parameters.expert_lora(model, rank)
        return total + outer * rank * (model.vocab + model.hidden)

    @property
    def trained_norm_parameters(self) -> int:
        """Weights of norms over the hidden size that LLaMA-Adapter v2 trains in place, without a copy."""
        return parameters.norms(self.model) if self.method == "adapter-v2" else 0

    @property
    def trained_module_parameters(self) -> int:
        """Weights of modules that are fully trained together with adapters (PEFT: modules_to_save).

        Each is a copy next to the frozen original; the loop makes a single copy of tied embeddings.
        """
        matrices = len({"embed_tokens", "lm_head"} & set(self.trained_modules))
        if self.runs_loop and self.model.tied_embeddings:
            matrices = min(matrices, 1)
        total = matrices * self.model.vocab * self.model.hidden
        return total + ("norms" in self.trained_modules) * parameters.norms(self.model)


def default_answer_len(seq_len: int) -> int:
    """Return the default completion length of grpo: 256 tokens (TRL 1.16), or half of the sequence."""
    return max(1, min(256, seq_len // 2))


_CHOICES: dict[str, tuple[str, ...]] = {
    "engine": get_args(Engine),
    "method": get_args(Method),
    "task": get_args(Task),
    "quantization": get_args(Quantization),
    "precision": get_args(Precision),
    "fp8": get_args(Fp8),
    "optimizer": get_args(Optimizer),
    "sharding": get_args(Sharding),
    "schedule": get_args(Schedule),
    "checkpointing": get_args(Checkpointing),
    "loss": get_args(LossKind),
    "attention": ("flash", "math"),
    "offload": get_args(StateOffload),
    "offload_to": ("cpu", "nvme"),
    "device": get_args(Device),
}
_SETTINGS = {
    "replicate": "dp_replicate",
    "tensor": "tp",
    "context": "cp",
    "pipeline": "pp",
    "expert": "ep",
    "processes_per_node": "gpus",
    "checkpointing": "recompute",
}  # fields whose option of ``finetune estimate`` has another name
_COUNTS = (
    "images_per_row",
    "image_size",
    "lora_rank",
    "shard",
    "replicate",
    "tensor",
    "context",
    "pipeline",
    "virtual_stages",
    "expert",
    "micro_batch_size",
    "accumulation",
    "seq_len",
    "recompute_every",
    "loss_chunks",
    "flash_version",
    "processes_per_node",
)
