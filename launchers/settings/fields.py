"""All settings of a run with types, defaults and help texts, and the rules between them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from estimator.formatting import format_list
from estimator.job import DEFAULT_BATCH, nearest_multiple
from estimator.models import ModelSpec
from estimator.setup import default_seq_len
from estimator.vocabulary import (
    AUTOMATIC_METHODS,
    LAUNCHED_METHODS,
    METHODS,
    TASKS,
    LaunchedEngine,
    LaunchedFp8,
    LaunchedMethod,
    RequestedMethod,
    RequestedPrecision,
    Task,
    Vision,
    automatic_methods,
)
from launchers.settings.handover_sections import Export, Harness
from launchers.settings.image_sections import Images
from launchers.settings.sections import (
    Adapter,
    Auto,
    Columns,
    Evaluation,
    Fsdp,
    Lora,
    NonNegative,
    NotEmpty,
    Optimizer,
    Positive,
    PositiveFloat,
    Preference,
    ProfileWindow,
    Recompute,
    Rejection,
    Resources,
    Rl,
    Schedule,
    Section,
    Tokens,
    Weight,
    Zero,
)

_METHODS_HELP = (
    "Training method. "
    + " ".join(f"{name}: {METHODS[name].description}." for name in LAUNCHED_METHODS)
    + f" auto: the first of {format_list(AUTOMATIC_METHODS)} that fits."
)


class Settings(Section):
    """All settings of a run; unknown names are errors."""

    model: str = Field(default="tiny-llama", min_length=1)
    """Model: a name from the model table, a Hugging Face id, s3://bucket/path or a local directory."""
    method: RequestedMethod = Field(default="auto", description=_METHODS_HELP)
    task: Task = "sft"
    """Training task. sft: supervised fine-tuning on answers. pretrain: plain text. dpo, orpo, simpo:
    preferences from pairs of a better and a worse answer, dpo with a reference model, the others without.
    kto: preferences from single answers marked good or bad. reward: a reward model. grpo: reinforcement
    learning on sampled answers (`rl`). text-to-image: images from captions (`images`)."""
    engine: LaunchedEngine | Auto = "auto"
    """Training engine. auto: the engine with the best predicted price and speed among those that support the
    job; of engines within 20 %, the simplest."""
    dataset: str = Field(default="support-tickets", min_length=1)
    """Dataset: JSONL, JSON, CSV or Parquet with chat messages, instruction/response pairs or text;
    preference pairs for preference tasks; text (also .txt) for pretrain. A local path, a folder of
    save_to_disk, s3://, a Hugging Face id, support-tickets (generated: messages and the JSON record of
    each), or python-docs (generated: the documentation of the running Python). NAME#SPLIT selects a split."""
    mixture: dict[str, Weight] = Field(default_factory=dict)
    """Additional datasets with weights: how often one epoch repeats the rows of each. 2: twice; 0.5: a random
    half."""
    columns: Columns = Field(default_factory=dict)
    """Names of the dataset's columns by key: `prompt=question,response=answer`, or a
    mapping. For all datasets of the run; rows without such a column are read as they are."""
    seq_len: Positive | None = None
    """Maximum sequence length in tokens; longer rows are truncated, or split for pretrain. Empty: 2048
    (tiny-llama: 256), or the model's limit if lower."""
    vision: Vision | None = None
    """Train a vision-language model on rows with images (task sft). frozen: the vision tower is not trained;
    the projector is with method full. lora: adapters in the tower, too. full: the tower is trained in full.
    Empty: frozen if the rows of a local dataset have images and the model sees them, else text alone."""
    packing: bool | Auto = "auto"
    """Pack several short rows into one sequence (attention stays within each row). auto: on GPUs for tasks
    sft and pretrain, where it is tested for the engine and the model family, neither `global_batch_size` nor
    `group_by_length` is set and the packed run has at least 100 steps."""
    variable_length: bool | Auto = "auto"
    """Keep documents apart by their lengths instead of padding and an attention mask (FlashAttention's
    variable-length kernel; deepspeed, fsdp2, on GPUs in bf16). auto: where it is tested for the model family
    and passes a comparison at the start of the run. true: fail if it does not. false: use the mask."""
    group_by_length: bool = False
    """Group rows of similar length into a batch to reduce padding. Rows move by at most 50 steps; the order
    of the batches stays random."""
    longest_first: bool = True
    """Start the first epoch with the longest rows, so that memory is reserved once, and a run that does
    not fit fails in its first step. Packed rows keep their order."""
    expandable_segments: bool = True
    """On NVIDIA GPUs add expandable_segments:True to PYTORCH_CUDA_ALLOC_CONF, unless that variable sets
    it; freed memory can then be reused by batches of other lengths."""
    neftune_alpha: PositiveFloat | None = None
    """NEFTune: noise on the embeddings in training, at most this value over the square root of a
    document's tokens times dimensions; the authors use 5, 10 or 15 (tasks sft and pretrain). Empty: none."""
    trial: NonNegative = 0
    """Number of steps for which the three best plans are tried on the run's machines before training; the
    fastest is used. 0: use the best predicted plan."""
    train_on_prompt: bool = False
    """Include the prompt's tokens in the loss."""
    trust_remote_code: bool = False
    """Run Python code of the model's folder if transformers has no class for the model or its tokenizer. It
    runs in the tasks that prepare, train, evaluate and export, with their access to files, network and
    credentials; never on the machine that launches the run. Read the code first."""
    chat_template: str | None = None
    """Jinja chat template that replaces the tokenizer's."""
    new_tokens: tuple[NotEmpty, ...] = ()
    """Tokens to add to the tokenizer. Their embeddings start as the mean of all embeddings; embedding and
    head are then trained in full next to adapters. Needs deepspeed or fsdp2."""
    epochs: Positive | None = None
    """Passes over the data. Empty: 1, or as many as `max_steps` needs."""
    max_steps: Positive | None = None
    """Stop after this many optimizer steps. Without `epochs` the data is repeated as often as they need."""
    tokens: Tokens | None = None
    """Stop after this many training tokens (20000, 300M, 1B), without padding. The data is repeated as often
    as needed. Instead of `epochs` and `max_steps`."""
    global_batch_size: Positive | None = None
    """Sequences per optimizer step, summed over all GPUs. Empty: 16, or the nearest number that the GPUs and
    the data can make up."""
    micro_batch_size: Positive | None = None
    """Sequences per GPU and forward pass. Empty: the largest that fits."""
    precision: RequestedPrecision = "auto"
    """Training precision. auto: fp32 on CPUs; on GPUs bf16 with torchtune, bf16 with fp32 master weights
    with the other engines where that fits; on GPUs without bf16 fp16-mixed where it is tested. fp16-mixed:
    fp16 with fp32 master weights and loss scaling (fsdp2)."""
    fp8: LaunchedFp8 = "none"
    """Matrix products in float8, with one scale per tensor or per row (fsdp2)."""
    activation_checkpointing: bool | Auto = "auto"
    """Recompute activations in the backward pass. auto: only if memory requires it."""
    recompute: Recompute = Recompute()
    """Activations that activation checkpointing recomputes."""
    compile: bool | Auto = "auto"
    """torch.compile the model's blocks (torchtune, deepspeed, fsdp2). auto: on GPUs, where it is tested for
    the engine and the model family."""
    liger: bool | Auto = "auto"
    """Use Liger-Kernel's loss, which avoids materializing the logits, and for llama, mistral, qwen2 and qwen3
    models without `compile` and `fp8` also its norms, MLPs and rotary embeddings (deepspeed, fsdp2, on GPUs;
    needs the package liger-kernel). auto: on GPUs, where it is tested for the engine and the model family."""
    clip_grad_norm: float | None = Field(default=1.0, gt=0)
    """Maximum gradient norm. Empty: no clipping."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Random seed of the data order and of the adapters' initial weights."""
    optimizer: Optimizer = Optimizer()
    """Optimizer and its constants."""
    schedule: Schedule = Schedule()
    """Learning rate schedule."""
    lora: Lora = Lora()
    """Adapters, for methods lora, qlora and dora."""
    adapter: Adapter = Adapter()
    """LLaMA-Adapters, for methods adapter-v1 and adapter-v2."""
    preference: Preference = Preference()
    """Losses of preference tasks (dpo, orpo, simpo, kto)."""
    rl: Rl = Rl()
    """Rewards of sampled answers, for task grpo."""
    images: Images = Images()
    """Images with captions, for task text-to-image."""
    zero: Zero = Zero()
    """Sharding with DeepSpeed."""
    fsdp: Fsdp = Fsdp()
    """Sharding with FSDP2."""
    rejection: Rejection = Rejection()
    """Rejection sampling: training on the model's sampled answers, for flows/rejection_flow.py."""
    evaluation: Evaluation = Evaluation()
    """Held-out data and sample answers."""
    harness: Harness = Harness()
    """Task metrics of base and finished model, by lm-evaluation-harness."""
    export: Export = Export()
    """Form and destination of the finished model."""
    resources: Resources = Resources()
    """Hardware; empty values are planned."""
    checkpoint_every: int = Field(default=0, ge=0)
    """Optimizer steps between checkpoints. 0: a tenth of the run, but at least 10 steps; on spot nodes
    with a known interruption rate, the interval that loses the least time."""
    keep_checkpoints: Positive = 2
    """Number of newest checkpoints to keep."""
    log_every: Positive | Auto = "auto"
    """Optimizer steps between two log lines. auto: a tenth of the run, but at most one line per second and
    at least one per minute. On a terminal, one line is updated in place."""
    profile: ProfileWindow = ProfileWindow()
    """Detailed time and memory profile of a few steps."""
    tracker: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    """Experiment trackers that receive the metrics of every step."""
    output_dir: str = Field(default="finetuned", min_length=1)
    """Folder for finished models; local runs write to a subfolder named by the run's id."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Raw options that override the engine's configuration (torchtune YAML, DeepSpeed JSON)."""

    @property
    def automatic_methods(self) -> tuple[LaunchedMethod, ...]:
        """Methods that ``auto`` may choose: those to which every ``lora`` setting of the user applies."""
        names = self.lora.model_fields_set
        return automatic_methods(
            low_rank=bool(names) or self.export.adapter_only, quantized="quantization" in names
        )

    def sequence_length(self, spec: ModelSpec) -> int:
        """Return the maximum sequence length in tokens, with the model's default resolved."""
        return default_seq_len(spec) if self.seq_len is None else self.seq_len

    @property
    def batch_multiple(self) -> int:
        """Required divisor of the global batch size: answers per prompt for task grpo, otherwise 1."""
        return self.rl.group_size if TASKS[self.task].draws_answers else 1

    @property
    def batch_size(self) -> int:
        """Sequences per optimizer step: the user's value, or the default."""
        return self.global_batch_size or nearest_multiple(DEFAULT_BATCH, self.batch_multiple)

    @property
    def rows_per_step(self) -> int:
        """Dataset rows per optimizer step; for task grpo these are prompts, each with a group of answers."""
        return self.batch_size // self.batch_multiple

    def steps_of(self, rows: int) -> int:
        """Return the number of optimizer steps on ``rows`` dataset rows: all epochs, at most ``max_steps``.

        With ``max_steps`` but without ``epochs``, it is ``max_steps``: the rows are repeated.
        """
        if self.epochs is None and self.max_steps is not None:
            return self.max_steps
        steps = rows * (self.epochs or 1) // self.rows_per_step
        return min(steps, self.max_steps or steps)

    def limit_batch(self, rows: int | None) -> Settings:
        """Return the settings with the default batch reduced to ``rows`` dataset rows, if there are fewer.

        A batch size set by the user is kept. ``rows``: number of rows; None: unknown, nothing is reduced.
        """
        if self.global_batch_size is not None or not rows or rows >= self.rows_per_step:
            return self
        return self.model_copy(update={"global_batch_size": rows * self.batch_multiple})

    @property
    def trains_on_pairs(self) -> bool:
        """Whether each dataset row is a pair: a chosen and a rejected answer to one prompt."""
        return TASKS[self.task].pairs

    def merges(self, method: str) -> bool:
        """Whether ``method`` exports a complete model instead of a separate adapter."""
        spec = METHODS[method]
        separate = self.export.adapter_only or (method == "lora" and self.lora.experts)
        return not spec.adapters or (spec.low_rank and not separate)

    @property
    def trained_modules(self) -> tuple[str, ...]:
        """Modules trained in full next to LoRA adapters, including those that new tokens need."""
        token_modules: tuple[str, ...] = ()
        if self.new_tokens:  # the head of a reward model has no rows per token
            token_modules = ("embed_tokens",) if self.task == "reward" else ("embed_tokens", "lm_head")
        return tuple(dict.fromkeys((*self.lora.modules_to_save, *token_modules)))

    @model_validator(mode="before")
    @classmethod
    def _disable_clipping(cls, values: Any) -> Any:
        """Disable norm clipping for an optimizer in the backward pass, which frees gradients one by one."""
        optimizer = values.get("optimizer") if isinstance(values, dict) else None
        if not (isinstance(optimizer, dict) and optimizer.get("in_backward") is True):
            return values
        if values.get("clip_grad_norm") is not None:
            raise ValueError("clip_grad_norm does not work with optimizer.in_backward: remove one of them")
        return {**values, "clip_grad_norm": None}

    @model_validator(mode="after")
    def _check(self) -> Settings:
        if self.tokens is not None and (self.max_steps is not None or (self.epochs or 1) > 1):
            limit = "epochs" if self.max_steps is None else "max_steps"
            raise ValueError(f"tokens and {limit} both limit the training: set one of them")
        if self.batch_size % self.batch_multiple:
            raise ValueError(
                f"global_batch_size {self.batch_size} (answers) must be a multiple of "
                f"rl.group_size {self.rl.group_size}"
            )
        window = self.profile.window
        if window is not None and self.max_steps is not None and window[1] > self.max_steps:
            raise ValueError(f"profile.steps {self.profile.steps}: max_steps is {self.max_steps}")
        interval = self.evaluation.every_steps
        if interval is not None and self.max_steps is not None and interval > self.max_steps:
            raise ValueError(f"evaluation.every_steps {interval}: max_steps is {self.max_steps}")
        if TASKS[self.task].draws_answers and self.evaluation.in_training:
            raise ValueError(
                "evaluation.every_steps: grpo is evaluated only before and after the run; its mean reward is "
                "logged every step"
            )
        if TASKS[self.task].draws_answers and self.tokens is not None:
            raise ValueError(
                "tokens: unknown in advance for grpo, which samples answers; set max_steps or epochs"
            )
        if self.group_by_length and self.packing is True:
            raise ValueError(
                "group_by_length and packing: packed sequences have no padding to reduce; remove one of them"
            )
        if self.dataset in self.mixture:
            raise ValueError(
                f"mixture contains {self.dataset}, which is already `dataset`: remove one of them"
            )
        return self
