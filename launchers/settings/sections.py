"""Sections of the settings, and types of their values."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from estimator import token_counts, vocabulary
from estimator.names import did_you_mean
from estimator.setup import default_answer_len
from estimator.vocabulary import (
    METHODS,
    Capacity,
    FsdpSharding,
    LaunchedOptimizer,
    LaunchedQuantization,
    Offload,
    RequestedDevice,
    TrainedModule,
)

Auto = Literal["auto"]
Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
NotEmpty = Annotated[str, Field(min_length=1)]
Average = Annotated[float, Field(ge=0, lt=1)]  # decay of a running average
Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROJECTIONS: tuple[Projection, ...] = get_args(Projection)


def _count_tokens(value: Any) -> int:
    """Parse a number of tokens, such as 20000, 300M or 1B."""
    is_number = isinstance(value, int | float | str) and not isinstance(value, bool)
    count = token_counts.parse(str(value)) if is_number else None
    if count is None or count < 1:
        raise ValueError("a number of tokens, such as 20000, 300M or 1B")
    return round(count)


Tokens = Annotated[
    int,
    BeforeValidator(_count_tokens),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}]}),
]
Weight = Annotated[float, Field(gt=0, le=1000)]
ROW_KEYS = (
    *("messages", "conversations", "prompt", "completion", "response", "text", "system", "history", "tools"),
    *("instruction", "input", "context", "output"),
    *("chosen", "rejected", "chosen_response", "rejected_response", "answers", "label", "kto_tag"),
    *("image", "file_name", "caption"),
)
"""Keys of dataset rows to which columns of other names can be mapped."""


def _parse_columns(value: Any) -> Any:
    """Parse ``prompt=question,response=answer``; raises ValueError for an unsupported key."""
    if isinstance(value, str):
        parts = [part.partition("=") for part in value.split(",") if part.strip()]
        if not all(key.strip() and name.strip() for key, _, name in parts):
            raise ValueError("pairs of key and column, such as prompt=question,response=answer")
        value = {key.strip(): name.strip() for key, _, name in parts}
    for key in value if isinstance(value, dict) else ():
        if key not in ROW_KEYS:
            advice = did_you_mean(key, ROW_KEYS) or f"The keys are {', '.join(ROW_KEYS)}."
            raise ValueError(f"columns of supported keys, not of `{key}` ({advice})")
    return value


Columns = Annotated[
    dict[str, NotEmpty],
    BeforeValidator(_parse_columns),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "propertyNames": {"enum": list(ROW_KEYS)},
                    "additionalProperties": {"type": "string", "minLength": 1},
                },
                {"type": "string"},
            ]
        }
    ),
]


def _needs_list(section: type[BaseModel], name: str, text: str) -> bool:
    """Whether ``text`` must be wrapped in a list: a list setting that has no such choice."""
    info = section.model_fields.get(name)
    types = get_args(info.annotation) if info and get_origin(info.annotation) is not tuple else ()
    types = types or ((info.annotation,) if info else ())
    choices = {choice for kind in types if get_origin(kind) is Literal for choice in get_args(kind)}
    return any(get_origin(kind) is tuple for kind in types) and text not in choices


def _accepts_bool(info: FieldInfo) -> bool:
    """Whether a setting accepts true and false."""
    return bool in (info.annotation, *get_args(info.annotation))


class Section(BaseModel):
    """Base class of settings sections: immutable; unknown names are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, defer_build=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _wrap_single_values(cls, values: Any) -> Any:
        """Convert a single string to a list of one, unless the string is one of the setting's choices."""
        if not isinstance(values, dict):
            return values
        texts = {name: value for name, value in values.items() if isinstance(value, str)}
        lists = {name: [value] for name, value in texts.items() if _needs_list(cls, name, value)}
        return {**values, **lists}

    @model_validator(mode="before")
    @classmethod
    def _refuse_booleans_for_numbers(cls, values: Any) -> Any:
        """Refuse true and false for numbers, because True equals 1 in Python."""
        for name, info in cls.model_fields.items() if isinstance(values, dict) else ():
            if isinstance(values.get(name), bool) and not _accepts_bool(info):
                raise ValueError(f"{name} = {values[name]}: true and false are not valid here")
        return values

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the values that were set, to the same bytes in every process.

        Metaflow compares the artifacts of a gang's nodes by their pickled bytes, and pydantic's pickles
        contain a set of names, whose order differs between processes.
        """
        return type(self).model_validate_json, (self.model_dump_json(exclude_unset=True),)


class Optimizer(Section):
    """Optimizer and its constants."""

    name: LaunchedOptimizer = "adamw"
    """Optimizer: AdamW, AdamW with 8-bit states, AdamW with states paged to host memory (bitsandbytes),
    Adafactor, Muon for matrices with AdamW for the rest, or SGD with momentum 0.9."""
    lr: PositiveFloat | Auto = "auto"
    """Peak learning rate. auto: 2e-5 for full, 2e-4 for low-rank adapters, 1e-3 for LLaMA-Adapters;
    for tiny-llama 7e-4, 5e-3, and 1e-1 (adapter-v1) or 2e-2 (adapter-v2). Preference tasks: 1e-6 for full,
    1e-5 for adapters. Task reward: 1e-5 for full, 1e-4 for adapters."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    betas: tuple[Average, Average] = (0.9, 0.95)
    """AdamW's running-average coefficients."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    in_backward: bool = False
    """Apply the optimizer during the backward pass and free each gradient immediately (torchtune, full).
    Excludes gradient accumulation and norm clipping."""


class Schedule(Section):
    """Learning rate schedule."""

    name: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape of the learning rate after the warm-up; wsd stays at the peak and falls linearly at the end."""
    warmup_steps: NonNegative | None = None
    """Optimizer steps of linear warm-up. Empty: 5, or `warmup_ratio` if set."""
    warmup_ratio: float | None = Field(default=None, ge=0, le=1)
    """Warm-up as a share of all steps, instead of `warmup_steps`."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Final learning rate of cosine, linear and wsd, as a share of the peak."""
    decay_ratio: float = Field(default=0.1, gt=0, le=1)
    """Share of all steps in the final decay of wsd."""

    @model_validator(mode="after")
    def _check(self) -> Schedule:
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError("warmup_steps and warmup_ratio exclude each other: set one of them")
        return self


class Lora(Section):
    """LoRA adapters."""

    rank: Positive = 8
    """Rank of the adapters."""
    alpha: float = Field(default=16.0, gt=0)
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (rsLoRA), which keeps the output's magnitude at high ranks."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the input of the adapters."""
    targets: tuple[Projection, ...] | Literal["all-linear"] = PROJECTIONS
    """Linear layers that get adapters, by Llama's names. all-linear, or all seven names: every linear
    layer of the blocks in any model family, except routers and experts."""
    experts: bool = False
    """Apply LoRA to experts too (method lora, engine fsdp2). The adapter is exported without merging."""
    quantization: LaunchedQuantization = "nf4-double"
    """Quantization of the frozen base model of qlora: NF4 with 8-bit or 32-bit scales, or int8."""
    modules_to_save: tuple[TrainedModule, ...] = ()
    """Modules trained in full next to the adapters: embedding, head, norms over the hidden size. Tied
    embedding and head stay tied."""

    @property
    def all_linear(self) -> bool:
        """Whether all linear layers are targeted, also in families whose layers differ from Llama's seven."""
        return self.targets == "all-linear" or set(self.targets) == set(PROJECTIONS)

    @model_validator(mode="after")
    def _check(self) -> Lora:
        if self.experts and self.dropout:
            raise ValueError(
                "lora.experts does not support lora.dropout: PEFT adds these adapters to the weights"
            )
        return self


class Adapter(Section):
    """LLaMA-Adapters (methods adapter-v1 and adapter-v2)."""

    prompt_length: Positive = 10
    """Prompt vectors per block."""
    start_layer: NonNegative = 2
    """First block with a prompt, counted from 0."""


class Zero(Section):
    """Sharding with DeepSpeed ZeRO."""

    stage: Literal[0, 1, 2, 3] | Auto = "auto"
    """DeepSpeed's ZeRO stage. auto: the fastest that fits."""
    offload: Offload = "none"
    """Device that holds the optimizer's states with DeepSpeed; cpu: host memory."""
    config: str | None = None
    """Path of a DeepSpeed JSON file, read and merged into the settings: batch sizes, stage, offload and
    clipping become the corresponding settings, the rest `engine_options`."""


class Fsdp(Section):
    """Sharding with FSDP2."""

    sharding: FsdpSharding | Auto = "auto"
    """full: gather each block's weights only while they are used. grad-op: keep them gathered from the
    forward pass to the end of the backward pass. auto: the fastest that fits."""
    replicas: Positive | Auto = "auto"
    """Copies of the model, each sharded over an equal part of the GPUs. Equal to the number of GPUs: no
    sharding, as with DDP. auto: one, or one per node."""
    offload: Offload = "none"
    """cpu: keep weights, gradients and optimizer states in host memory, and update them there."""


class Recompute(Section):
    """Activations that activation checkpointing recomputes."""

    what: vocabulary.Recompute | Auto = "auto"
    """full: recompute whole blocks. selective: keep the results of attention and of every second matrix
    product (deepspeed, fsdp2). auto: with `activation_checkpointing: auto` the fastest by prediction,
    otherwise full."""
    every: Positive | Auto = "auto"
    """Recompute one of every N blocks (deepspeed, fsdp2). auto: chosen together with `what`,
    otherwise 1."""


class Preference(Section):
    """Losses of preference tasks."""

    beta: PositiveFloat | Auto = "auto"
    """Strength of the preference: the factor before the sigmoid in DPO and SimPO, the weight of the odds
    ratio in ORPO. auto: 0.1, or 2.0 for simpo."""
    margin: float = Field(default=1.0, ge=0)
    """Target reward margin of SimPO (gamma)."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Assumed share of pairs with swapped labels (dpo, simpo)."""

    def beta_of(self, task: str) -> float:
        """Return ``beta``, with ``auto`` resolved for a task.

        0.1: Rafailov et al. 2023 (arXiv:2305.18290), appendix B; Hong et al. 2024 (arXiv:2403.07691), for
        Mistral. 2.0 with a margin of 1.0: Meng et al. 2024 (arXiv:2405.14734), for Llama 3 Base.
        """
        if self.beta != "auto":
            return self.beta
        return 2.0 if task == "simpo" else 0.1


class Rejection(Section):
    """Rejection sampling."""

    score: str | None = None
    """Scorer of the answers: a function, `path/file.py:function` or `package.module:function`, called with
    prompt and answer as strings; or a reward model, in any form of `model`."""
    answers: int = Field(default=4, ge=2)
    """Answers per prompt, 2 or more; the best one is kept."""
    prompts: Positive | None = None
    """Number of prompts, from the first rows of the dataset. Empty: all rows."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature of the answers."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: sample from the most likely tokens with this total probability."""
    max_new_tokens: Positive = 256
    """Longest answer in tokens; longer ones are cut there."""
    generator: Literal["transformers", "vllm"] = "transformers"
    """Sampler of the answers: `generate` of transformers, or vLLM, which is many times faster on GPUs and is
    installed by the extra `vllm` or in a separate environment (`generator_python`)."""
    generator_python: str | None = None
    """Python of an environment with vLLM, as a path on the sampling machines, such as
    `/srv/vllm/bin/python`. Empty: the Python of the run."""
    nodes: Positive | None = None
    """Nodes that sample answers in parallel, each a share of the prompts. Empty: as planned."""
    min_score: float | None = None
    """Minimum score of a kept answer."""
    top_share: float = Field(default=1.0, gt=0, le=1)
    """Share of the best answers to keep, by highest score."""

    @model_validator(mode="after")
    def _check(self) -> Rejection:
        if self.generator_python is not None and self.generator != "vllm":
            raise ValueError("rejection.generator_python applies only to rejection.generator=vllm")
        return self


class Rl(Section):
    """Reinforcement learning on sampled answers (task grpo)."""

    reward: str | None = None
    """Reward of a sampled answer: a function, `path/file.py:function` or `package.module:function`, called
    with prompt and answer as strings; or a reward model, in any form of `model`."""
    group_size: int = Field(default=8, ge=2)
    """Answers per prompt that are compared with each other (G). `global_batch_size` counts answers."""
    beta: NonNegativeFloat | Auto = "auto"
    """Weight of the KL divergence from the reference model. auto: 0.04 with adapters; 0 for full, which
    would need a second model in memory."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature of the answers."""
    max_completion_length: Positive | None = None
    """Maximum answer length in tokens; longer answers are truncated. Empty: 256, or half of `seq_len` if
    that is less. The remaining tokens of `seq_len` are for the prompt, which is truncated at its
    beginning."""
    loss: Literal["grpo", "dapo", "dr_grpo"] = "dapo"
    """Normalization of the loss over tokens: mean of each answer, then over answers (grpo); over all
    tokens of the step (dapo); or by the maximum length (dr_grpo)."""

    def beta_of(self, method: str) -> float:
        """Return ``beta``, with ``auto`` resolved for a method.

        0.04: Shao et al. 2024 (arXiv:2402.03300), section 4.2.
        """
        if self.beta != "auto":
            return self.beta
        return 0.04 if METHODS[method].adapters else 0.0

    def answer_tokens(self, seq_len: int) -> int:
        """Return the maximum answer length in tokens."""
        return self.max_completion_length or default_answer_len(seq_len)


DEFAULT_ANSWERS = 3


class Evaluation(Section):
    """Held-out data, evaluation during training, and sample answers."""

    fraction: float = Field(default=0.05, ge=0, lt=1)
    """Share of the rows held out (at least 1 row, at most 256) when no held-out file is given."""
    dataset: str | None = None
    """Separate held-out dataset, in any form of `dataset`."""
    generations: NonNegative | Auto = "auto"
    """Number of held-out prompts that the base and the finished model answer. For task sft, answers equal to
    the expected ones (exact match) are counted. auto: 3, or all rows of support-tickets."""
    max_new_tokens: Positive = 64
    """Maximum length of these held-out answers in tokens."""
    every_steps: Positive | None = None
    """Optimizer steps between evaluations of the held-out loss during training; the last step is always
    evaluated. Empty: evaluate only before and after the run."""
    every_minutes: PositiveFloat | None = None
    """Minutes of training between evaluations, instead of `every_steps`."""
    keep_best: bool | None = None
    """Export the step with the lowest held-out loss instead of the last step. Empty: only if `patience` is
    set."""
    patience: Positive | None = None
    """Stop early after this many evaluations in a row without a lower loss."""
    min_delta: float = Field(default=0.0, ge=0)
    """Minimum improvement of the loss that resets `patience`."""

    @property
    def answers(self) -> int:
        """``generations``, with ``auto`` resolved to the default for users' datasets."""
        return DEFAULT_ANSWERS if self.generations == "auto" else self.generations

    @property
    def in_training(self) -> bool:
        """Whether the held-out loss is measured during training."""
        return self.every_steps is not None or self.every_minutes is not None

    @property
    def keeps_best(self) -> bool:
        """``keep_best`` with its empty value resolved."""
        return self.patience is not None if self.keep_best is None else self.keep_best

    @model_validator(mode="after")
    def _check(self) -> Evaluation:
        if self.every_steps is not None and self.every_minutes is not None:
            raise ValueError("evaluation.every_steps and every_minutes exclude each other: set one of them")
        dependent = {
            "patience": self.patience is not None,
            "keep_best": bool(self.keep_best),
            "min_delta": self.min_delta > 0,
        }
        for name, is_set in dependent.items():
            if is_set and not self.in_training:
                raise ValueError(
                    f"evaluation.{name} needs evaluations during training: set evaluation.every_steps too"
                )
        if self.min_delta and self.patience is None:
            raise ValueError("evaluation.min_delta applies to evaluation.patience: set that too")
        if self.in_training and self.dataset is None and self.fraction == 0:
            raise ValueError(
                "evaluation.fraction = 0 leaves no held-out rows for evaluation during training: "
                "set evaluation.dataset"
            )
        return self


MAX_PROFILED_STEPS = 20  # traces of more steps have hundreds of MB, too much for trace viewers


class ProfileWindow(Section):
    """Steps and ranks to profile."""

    steps: str | None = None
    """Optimizer steps to profile: first and last (20:23), or one (20); at most 20 steps. Empty: none."""
    ranks: tuple[NonNegative, ...] = (0,)
    """Ranks to profile; each writes its own trace."""

    @field_validator("steps", mode="before")
    @classmethod
    def _number_to_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("steps")
    @classmethod
    def _check(cls, steps: str | None) -> str | None:
        if steps is None:
            return None
        if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", steps):
            raise ValueError("the first and the last step, such as 20:23")
        first, last = _bounds(steps)
        if last < first:
            raise ValueError(f"the first step before the last, such as {last}:{first}")
        if last - first >= MAX_PROFILED_STEPS:
            raise ValueError(f"at most {MAX_PROFILED_STEPS} steps, such as {first}:{first + 3}")
        return steps

    @field_validator("ranks")
    @classmethod
    def _check_ranks(cls, ranks: tuple[int, ...]) -> tuple[int, ...]:
        if not ranks:
            raise ValueError("at least one rank, such as 0")
        return ranks

    @property
    def window(self) -> tuple[int, int] | None:
        """First and last step to profile; None: no profile."""
        return None if self.steps is None else _bounds(self.steps)


def _bounds(steps: str) -> tuple[int, int]:
    first, _, last = steps.partition(":")
    return int(first), int(last or first)


class Resources(Section):
    """Hardware of a run."""

    nodes: Positive | None = None
    """Number of nodes. Empty: as planned."""
    gpus: Positive | None = None
    """GPUs per node (on CPUs: processes per node). Empty: as planned."""
    gpu: str | None = None
    """GPU model, by a name from `finetune gpus`. Empty: as planned."""
    instance_type: str | None = None
    """Instance type of a cloud, by a name from `finetune gpus`. Empty: as planned."""
    cloud: str | None = None
    """Cloud provider to plan for (aws, gcp, azure, lambda)."""
    from_catalogue: bool = False
    """Plan for the instance types of the catalogue, without querying Kubernetes or AWS Batch."""
    capacity: Capacity = "usual"
    """Rank instance types with poor on-demand availability last (usual), or treat all equally (any)."""
    tight: bool = False
    """Rank plans with a risk of 2 to 20 % of running out of memory like others."""
    spot: bool = False
    """Use spot instances on Kubernetes or AWS Batch, at spot prices."""
    interruption_rate: PositiveFloat | None = None
    """Spot interruptions per node and hour, such as 0.05. Empty: the value of the catalogue for the instance
    type, or unknown."""
    device: RequestedDevice = "auto"
    """Training device. auto: GPUs if there are any; CPUs only for models up to 0.5 billion parameters."""
    queue: str | None = None
    """AWS Batch job queue, or on Kubernetes a queue of Kueue, Volcano or KAI. Empty: by GPU model from
    `queues`, else the queue in Metaflow's configuration."""
    queues: dict[str, str] = Field(default_factory=dict)
    """Queue per GPU model, used if `queue` is not set."""
    queue_system: Literal["auto", "kueue", "volcano", "kai"] = "auto"
    """Queueing system on Kubernetes. auto: the one that has a queue of this name, else Kueue."""
    team: str | None = None
    """Team of the run: a label of its jobs and pods, a tag on AWS Batch, and a group of
    `finetune costs --by team`."""
    priority: str | None = None
    """Kueue WorkloadPriorityClass of the run. Empty: Kueue uses `priority_class`."""
    priority_class: str | None = None
    """PriorityClass of the run's pods on Kubernetes. Empty: the cluster's default."""
    zone: str | None = None
    """Availability zone of all nodes. Empty: on Kubernetes, a zone with enough nodes, if there is one."""
    pending_timeout: PositiveFloat = 30.0
    """Minutes that a step waits for its next node, or for its image, before the run fails."""
    fabric: Literal["auto", "efa", "infiniband", "roce", "tcpx", "tcpxo", "none"] = "auto"
    """Network fabric between nodes on Kubernetes. auto: what the nodes offer. none: TCP."""
    pod_template: dict[str, Any] | str | None = None
    """Strategic merge patch of the training pods on Kubernetes, inline or as the path of a YAML file. The
    training container is called `main`."""
    max_disruptions: NonNegative = 20
    """Maximum number of disruptions of a run: pods deleted, evicted, preempted, or lost with their node, or
    machines lost on AWS Batch. Disruptions do not count as attempts of a step."""
    termination_grace_s: NonNegative = 60
    """Grace period of a training pod in seconds, in which all nodes store a checkpoint after the same step.
    On Slurm it starts with SIGUSR1. 0: none."""
    hang_timeout_s: Positive = 900
    """Seconds without a step, a checkpoint or any other sign of life before a run counts as hung; four
    times as long while a model is loaded or saved."""
