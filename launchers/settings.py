"""Settings: every knob of a run, with its default. The YAML file, the flags and ``--set`` all end here."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from estimator import token_counts
from estimator.changes import meant_by
from estimator.errors import UserError
from estimator.setup import LLAMA_ADAPTERS, PAIR_TASKS, drawn_answer
from launchers import deepspeed_file

SCHEMA_FILE = Path(__file__).with_name("settings.schema.json")
Auto = Literal["auto"]
Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROJECTIONS: tuple[Projection, ...] = get_args(Projection)


def _count_tokens(value: Any) -> int:
    """A number of tokens, also as people write it: 1B, 300M."""
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


def _is_list(section: type[BaseModel], name: str, word: str) -> bool:
    """Whether a setting is a list, and the word no choice beside it."""
    info = section.model_fields.get(name)
    kinds = get_args(info.annotation) if info and get_origin(info.annotation) is not tuple else ()
    kinds = kinds or ((info.annotation,) if info else ())
    choices = {choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)}
    return any(get_origin(kind) is tuple for kind in kinds) and word not in choices


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, defer_build=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _take_words_for_lists(cls, values: Any) -> Any:
        """A single word is a list of one, where it is none of the words that stand for a choice."""
        if not isinstance(values, dict):
            return values
        words = {name: value for name, value in values.items() if isinstance(value, str)}
        lists = {name: [value] for name, value in words.items() if _is_list(cls, name, value)}
        return {**values, **lists}

    def __reduce__(self) -> tuple[Any, ...]:
        """By its values alone: Metaflow compares the artifacts of a gang's nodes by their pickled bytes.

        pydantic itself also pickles which fields were given, as a set, whose order differs between processes.
        """
        return type(self).model_validate_json, (self.model_dump_json(),)


class Optimizer(_Section):
    name: Literal["adamw", "adamw8bit", "paged-adamw", "paged-adamw8bit", "adafactor", "muon", "sgd"] = (
        "adamw"
    )
    """AdamW, with states in 8 bits or in memory that the host lends (bitsandbytes); Adafactor; Muon for
    matrices and AdamW for the rest; or plain SGD with momentum 0.9."""
    lr: PositiveFloat | Auto = "auto"
    """Peak learning rate. auto: 2e-5 for full, 2e-4 for low-rank adapters, 1e-3 for
    LLaMA-Adapters; tiny-llama 3e-3, 5e-3, and 1e-1 (v1) or 2e-2. Preferences: 1e-6 for full, 1e-5 for
    adapters; rewards: 1e-5, 1e-4."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's running-average coefficients."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    in_backward: bool = False
    """Use each gradient, and free it, as soon as the backward pass has it (torchtune, full). Nothing is
    accumulated, and no norm is clipped."""


class Schedule(_Section):
    name: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape of the learning rate after the warm-up; wsd stays at the peak and falls linearly at the end."""
    warmup_steps: NonNegative | None = None
    """Optimizer steps of linear warm-up. Empty: 5, or as `warmup_ratio` says."""
    warmup_ratio: float | None = Field(default=None, ge=0, le=1)
    """Warm-up as a share of all steps, instead of `warmup_steps`."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Where cosine, linear and wsd end, as a share of the peak."""
    decay_ratio: float = Field(default=0.1, gt=0, le=1)
    """Share of all steps over which wsd falls, at the end."""

    @model_validator(mode="after")
    def _check(self) -> Schedule:
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError("warmup_steps and warmup_ratio say the same thing twice: give one of them")
        return self


class Lora(_Section):
    rank: Positive = 8
    """Rank of the adapters."""
    alpha: float = Field(default=16.0, gt=0)
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    rslora: bool = False
    """Multiply it by alpha / sqrt(rank) instead (rsLoRA), which keeps its size at high ranks."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout before the adapters."""
    targets: tuple[Projection, ...] | Literal["all-linear"] = PROJECTIONS
    """The linear layers that get adapters, by Llama's names; all-linear, or all seven: every linear layer of
    the blocks, whatever the model's family calls it, without routers and experts."""
    experts: bool = False
    """Adapters on the experts too, for method lora: fsdp2 trains them, and the adapter isn't merged."""
    quantization: Literal["nf4-double", "nf4", "int8"] = "nf4-double"
    """How method qlora keeps the base: in 4 bits (NF4) with scales in 8 bits or in 32, or in 8 bits."""
    modules_to_save: tuple[Literal["embed_tokens", "lm_head", "norms"], ...] = ()
    """What is trained whole beside the adapters: the embedding, the head, all norms over the hidden size.
    Embedding and head that are one matrix stay one."""

    @property
    def all_linear(self) -> bool:
        """Whether every linear layer is meant. Not every family has all of Llama's seven, or no others."""
        return self.targets == "all-linear" or set(self.targets) == set(PROJECTIONS)

    @model_validator(mode="after")
    def _check(self) -> Lora:
        if self.experts and self.dropout:
            raise ValueError(
                "lora.experts goes without lora.dropout: PEFT adds these adapters to the weights"
            )
        return self


class Adapter(_Section):
    prompt_length: Positive = 10
    """Prompt vectors of each block."""
    start_layer: NonNegative = 2
    """The first block with a prompt, counted from 0: the lower ones have none."""


class Zero(_Section):
    stage: Literal[0, 1, 2, 3] | Auto = "auto"
    """DeepSpeed's ZeRO stage. auto: the lowest that fits."""
    offload: Literal["none", "cpu"] = "none"
    """Where DeepSpeed keeps the optimizer's states."""
    config: str | None = None
    """A DeepSpeed JSON file of your own. It is read with the settings and becomes part of them: batch sizes,
    stage, offload and clipping those that they are here, all else `engine_options`."""


class Fsdp(_Section):
    sharding: Literal["full", "grad-op"] | Auto = "auto"
    """full: FSDP2 gathers each block's weights when they are used. grad-op: they stay gathered from the
    forward pass to the end of the backward pass. auto: the faster that fits."""
    replicas: Positive | Auto = "auto"
    """Copies of the model, each divided over an equal part of the GPUs. auto: one, or one for each node."""
    offload: Literal["none", "cpu"] = "none"
    """cpu: weights, gradients and optimizer states wait in host memory, and are updated there."""


class Recompute(_Section):
    what: Literal["full", "selective"] = "full"
    """full: all of a block. selective: what lies between its matrix products, of which every second one's
    result is kept, and attention's (deepspeed, fsdp2)."""
    every: Positive = 1
    """One block out of so many is recomputed, the others keep their activations (deepspeed, fsdp2)."""


WEIGHED = {  # what of Preference the losses of a task have
    "dpo": ("beta", "label_smoothing"),
    "orpo": ("beta",),
    "simpo": ("beta", "margin", "label_smoothing"),
    "kto": ("beta",),
}


class Preference(_Section):
    beta: PositiveFloat | Auto = "auto"
    """How much a preference weighs: DPO's and SimPO's factor before the sigmoid, ORPO's weight of the odds
    ratio. auto: 0.1, and 2.0 for simpo."""
    margin: float = Field(default=1.0, ge=0)
    """SimPO's target reward margin (gamma): what the chosen answer should be ahead."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of the pairs that are taken to be labelled the wrong way round (dpo, simpo)."""

    def beta_of(self, task: str) -> float:
        """``beta``, with ``auto`` decided.

        0.1: Rafailov et al. 2023 (arXiv:2305.18290), appendix B; Hong et al. 2024 (arXiv:2403.07691), for
        Mistral. 2.0 with a margin of 1.0: Meng et al. 2024 (arXiv:2405.14734), for Llama 3 Base.
        """
        if self.beta != "auto":
            return self.beta
        return 2.0 if task == "simpo" else 0.1


class Rejection(_Section):
    score: str | None = None
    """What gives an answer its score: a function of your own, `path/file.py:function` or
    `package.module:function`, called with the prompt and the answer as texts; or a reward model, in any of
    the forms of `model`."""
    answers: int = Field(default=4, json_schema_extra={"minimum": 2})
    """Answers to each prompt, of which the best is kept."""
    prompts: Positive | None = None
    """The first so many rows of the dataset give prompts. Empty: all of them."""
    temperature: PositiveFloat = 1.0
    """Temperature that the answers are drawn at."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Draw each token from the likeliest ones that together have this probability."""
    max_new_tokens: Positive = 256
    """Longest answer in tokens; longer ones are cut there."""
    nodes: Positive | None = None
    """Nodes that draw answers at the same time, each with its share of the prompts. Empty: as planned."""
    min_score: float | None = None
    """The best answer to a prompt is kept only with this score or a higher one."""
    top_share: float = Field(default=1.0, gt=0, le=1)
    """Of the best answers to all prompts, this share with the highest scores is kept."""

    @field_validator("answers")
    @classmethod
    def _check_answers(cls, value: int) -> int:
        if value < 2:
            raise ValueError("2 or more: one answer leaves nothing to choose from")
        return value


class Rl(_Section):
    reward: str | None = None
    """What gives a drawn answer its reward: a function of your own, `path/file.py:function` or
    `package.module:function`, called with the prompt and the answer as texts; or a reward model, in any of
    the forms of `model`."""
    group_size: int = Field(default=8, json_schema_extra={"minimum": 2})
    """Answers to each prompt, which are compared with each other (G). `global_batch_size` counts answers."""
    beta: float | Auto = Field(default="auto")
    """Weight of the divergence from the model as it was (the KL term). auto: 0.04 with adapters, and 0 for
    full, which would hold a second model for it."""
    temperature: PositiveFloat = 1.0
    """Temperature that the answers are drawn at."""
    max_completion_length: Positive | None = None
    """Longest answer in tokens; longer ones are cut there. Empty: 256, or half of `seq_len` if that is less.
    What is left of `seq_len` is for the prompt, of which the end is kept."""
    loss: Literal["grpo", "dapo", "dr_grpo"] = "dapo"
    """How tokens are averaged: over each answer and then over answers (grpo), over all tokens of the step
    (dapo), or by the longest length (dr_grpo)."""

    @field_validator("group_size")
    @classmethod
    def _check_group_size(cls, value: int) -> int:
        if value < 2:
            raise ValueError("2 or more: the answers to a prompt are compared with each other")
        return value

    @field_validator("beta")
    @classmethod
    def _check_beta(cls, value: float | str) -> float | str:
        if not isinstance(value, str) and value < 0:
            raise ValueError("0 or more")
        return value

    def beta_of(self, method: str) -> float:
        """``beta``, with ``auto`` decided. 0.04: Shao et al. 2024 (arXiv:2402.03300), section 4.2."""
        if self.beta != "auto":
            return self.beta
        return 0.0 if method == "full" else 0.04

    def answer_tokens(self, seq_len: int) -> int:
        """The longest answer in tokens."""
        return self.max_completion_length or drawn_answer(seq_len)


class Evaluation(_Section):
    fraction: float = Field(default=0.05, ge=0, lt=1)
    """Share of the rows held out (at least 1 row, at most 256) when no held-out file is given."""
    dataset: str | None = None
    """A held-out dataset of its own, in any of the forms of `dataset`."""
    generations: int = Field(default=3, ge=0)
    """How many held-out prompts are answered by the model after training."""
    max_new_tokens: Positive = 64
    """Length of those answers."""


class Resources(_Section):
    nodes: Positive | None = None
    """Nodes. Empty: as planned."""
    gpus: Positive | None = None
    """GPUs for each node (on CPUs: processes for each node). Empty: as planned."""
    gpu: str | None = None
    """GPU type, a name of the GPU table. Empty: as planned."""
    instance_type: str | None = None
    """Cloud machine, a name of the instance table. Empty: as planned."""
    cloud: str | None = None
    """Plan on this cloud's machines only (aws, gcp, azure, lambda)."""
    from_catalogue: bool = False
    """Plan a run on Kubernetes or AWS Batch with the tables' machines, without asking what is there."""
    capacity: Literal["usual", "any"] = "usual"
    """usual: machines that can rarely be had on demand come after all others. any: they compete like them."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: GPUs where there are any; the CPU only for models of up to 0.5 billion parameters."""
    queue: str | None = None
    """AWS Batch job queue, or Kueue LocalQueue on Kubernetes. Empty: by GPU type as in `queues`, else what
    Metaflow is configured with."""
    queues: dict[str, str] = Field(default_factory=dict)
    """Queues by GPU type, as names of the GPU table, for where no `queue` is given."""
    priority: str | None = None
    """Kueue WorkloadPriorityClass of the run."""
    zone: str | None = None
    """Availability zone of all nodes. Empty: on Kubernetes one that has enough of them, where one is seen."""
    pending_timeout: PositiveFloat = 30.0
    """Minutes that a step may wait for its nodes, or for its image, before the run gives up."""
    hang_timeout_s: Positive = 900
    """Seconds without a step, a checkpoint or any other sign of life before a run counts as hung; four
    times as long while a model is loaded or saved."""


class Settings(_Section):
    """Every knob of a run. Unknown names are refused."""

    model: str = "tiny-llama"
    """A name of the model table, a Hugging Face id, s3://bucket/path or a local directory."""
    method: Literal["full", "lora", "qlora", "dora", "adapter-v1", "adapter-v2", "auto"] = "full"
    """What is trained: all weights; adapters; adapters on a quantised base; adapters and the length of each
    row (DoRA); prompts before the upper blocks' attention (LLaMA-Adapter); those, norms, and a scale and a
    bias for each linear layer's outputs (v2). auto: the first of full, lora and qlora that fits."""
    task: Literal["sft", "pretrain", "dpo", "orpo", "simpo", "kto", "reward", "grpo"] = "sft"
    """What is learnt: answers (sft), plain text (pretrain), or from pairs of a better and a worse answer to
    prefer the better one: dpo beside the model as it was, orpo and simpo without it. kto: the same from
    single answers that are called good or bad. reward: a model that gives a better answer a higher number.
    grpo: to draw answers of its own that score higher (`rl`)."""
    engine: Literal["torchtune", "deepspeed", "fsdp2", "trl"] | Auto = "auto"
    """The training engine. auto: torchtune, or deepspeed, or fsdp2, or for task grpo trl: the first that can
    train the model that way."""
    dataset: str = "python-docs"
    """JSONL, JSON, CSV or Parquet of chat messages, instruction/response or text, for preferences of pairs,
    for pretrain of text (also .txt): a local path, a folder of save_to_disk, s3://, a Hugging Face id, or
    python-docs (made from the running Python's documentation). NAME#SPLIT names a split."""
    mixture: dict[str, Weight] = Field(default_factory=dict)
    """More datasets beside `dataset`, with weights: how often an epoch has the rows of each. 2: twice; 0.5: a
    drawn half."""
    seq_len: Positive | None = None
    """Longest sequence in tokens; longer rows are cut, those of pretrain split. Empty: 2048 (tiny-llama:
    256), or the model's limit if lower."""
    packing: bool = False
    """Put several short rows into one sequence (attention stays within each row)."""
    longest_first: bool = True
    """Begin the first epoch with the longest rows, so that memory is reserved once, and a run that does not
    fit fails in its first step. Packed rows stay as they are."""
    expandable_segments: bool = True
    """On NVIDIA GPUs add expandable_segments:True to PYTORCH_CUDA_ALLOC_CONF, unless that variable says
    otherwise: batches of other lengths then use freed memory again."""
    trial: NonNegative = 0
    """Before the run, try the three best plans on its own machines for so many steps each, and keep the
    fastest. 0: go by the prediction."""
    train_on_prompt: bool = False
    """Count the prompt's tokens in the loss too."""
    chat_template: str | None = None
    """A Jinja chat template to use instead of the tokenizer's."""
    new_tokens: tuple[str, ...] = ()
    """Tokens that are added to the tokenizer. Their embeddings begin as the mean of all others' and are
    trained: embedding and head are trained whole beside adapters then. Needs deepspeed or fsdp2."""
    epochs: Positive = 1
    """Passes over the data."""
    max_steps: Positive | None = None
    """Stop after this many optimizer steps."""
    tokens: Tokens | None = None
    """Stop with the step that reaches this many tokens (20000, 300M, 1B), padding not counted. The data is
    gone through as often as that needs. Instead of `epochs` and `max_steps`."""
    global_batch_size: Positive = 16
    """Global batch: sequences for each optimizer step, over all GPUs."""
    micro_batch_size: Positive | None = None
    """Sequences for each GPU and forward pass. Empty: the largest that fits."""
    precision: Literal["auto", "bf16", "bf16-mixed", "fp32"] = "auto"
    """auto: fp32 on CPUs; on GPUs bf16 with torchtune, bf16 with fp32 master weights with the others."""
    fp8: Literal[
        "none", "tensorwise", "rowwise", "te", "mxfp8", "nvfp4", "msamp-o1", "msamp-o2", "msamp-o3"
    ] = "none"
    """Matrix products in float8, with one scale for a tensor or for each row (fsdp2). The others are planned
    only."""
    activation_checkpointing: bool | Auto = "auto"
    """Recompute activations in the backward pass. auto: only where memory needs it."""
    recompute: Recompute = Recompute()
    """What activation checkpointing recomputes."""
    compile: bool = False
    """torch.compile the model's blocks (torchtune, fsdp2)."""
    clip_grad_norm: float | None = Field(default=1.0, gt=0)
    """Largest gradient norm. Empty: no clipping."""
    seed: int = Field(default=0, ge=0)
    """Seeds the order of the data and the adapters' initial weights."""
    optimizer: Optimizer = Optimizer()
    """The optimizer and its constants."""
    schedule: Schedule = Schedule()
    """The learning rate over the steps."""
    lora: Lora = Lora()
    """Adapters, for methods lora, qlora and dora."""
    adapter: Adapter = Adapter()
    """LLaMA-Adapters, for methods adapter-v1 and adapter-v2."""
    preference: Preference = Preference()
    """The losses of preferences, for tasks dpo, orpo, simpo and kto."""
    rl: Rl = Rl()
    """Rewards for answers of the model's own, for task grpo."""
    zero: Zero = Zero()
    """DeepSpeed's sharding."""
    fsdp: Fsdp = Fsdp()
    """FSDP2's sharding."""
    rejection: Rejection = Rejection()
    """Answers of the model itself to train on, for flows/rejection_flow.py."""
    evaluation: Evaluation = Evaluation()
    """Held-out data and sample answers."""
    resources: Resources = Resources()
    """Hardware; empty values are planned."""
    checkpoint_every: int = Field(default=0, ge=0)
    """Optimizer steps between checkpoints. 0: every tenth of the run, but no fewer than 10 steps."""
    keep_checkpoints: Positive = 2
    """How many of the newest checkpoints are kept."""
    log_every: Positive = 1
    """Steps from one line to the next, where the output is no terminal (on one, a line is renewed)."""
    tracker: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    """Experiment trackers that get every step's metrics."""
    output_dir: str = "finetuned"
    """Local runs put the finished model into a folder of the run's id below this one."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Raw values laid over the engine's own configuration (torchtune YAML, DeepSpeed JSON), last."""

    @property
    def unused(self) -> tuple[str, ...]:
        """What is set, by its dotted name, and has no part in the task."""
        found = ["train_on_prompt"] if self.train_on_prompt and self.task != "sft" else []
        weighed = WEIGHED.get(self.task, ())
        for name, default in Preference():
            if getattr(self.preference, name) != default and name not in weighed:
                found.append(f"preference.{name}")
        if self.task != "grpo":
            found += [f"rl.{name}" for name, default in Rl() if getattr(self.rl, name) != default]
        return tuple(found)

    @property
    def rows_per_step(self) -> int:
        """Rows of the data that an optimizer step takes: of grpo prompts, each with a group of answers."""
        return self.global_batch_size // (self.rl.group_size if self.task == "grpo" else 1)

    @property
    def trains_on_pairs(self) -> bool:
        """Whether a row of the data is a better and a worse answer to one prompt."""
        return self.task in PAIR_TASKS

    def merges(self, method: str) -> bool:
        """Whether what ``method`` trains is handed over as a whole model, not as an adapter on its own."""
        return method not in LLAMA_ADAPTERS and not (method == "lora" and self.lora.experts)

    @property
    def trained_modules(self) -> tuple[str, ...]:
        """What is trained whole beside LoRA's adapters: as asked for, and what new tokens need."""
        needed: tuple[str, ...] = ()
        if self.new_tokens:  # the head of a reward model has no row for a token
            needed = ("embed_tokens",) if self.task == "reward" else ("embed_tokens", "lm_head")
        return tuple(dict.fromkeys((*self.lora.modules_to_save, *needed)))

    @model_validator(mode="before")
    @classmethod
    def _leave_out_clipping(cls, values: Any) -> Any:
        """An optimizer in the backward pass has no gradient left when the norm of all is known."""
        optimizer = values.get("optimizer") if isinstance(values, dict) else None
        if not (isinstance(optimizer, dict) and optimizer.get("in_backward") is True):
            return values
        if values.get("clip_grad_norm") is not None:
            raise ValueError("clip_grad_norm can't be had with optimizer.in_backward: leave one of them out")
        return {**values, "clip_grad_norm": None}

    @model_validator(mode="after")
    def _check(self) -> Settings:
        if self.micro_batch_size is not None and self.global_batch_size % self.micro_batch_size:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} can't be divided by "
                f"micro_batch_size {self.micro_batch_size}"
            )
        if self.tokens is not None and (self.max_steps is not None or self.epochs > 1):
            other = "epochs" if self.max_steps is None else "max_steps"
            raise ValueError(f"tokens and {other} both say how long to train: give one of them")
        if self.task == "grpo" and self.global_batch_size % self.rl.group_size:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} counts answers, and is no multiple of "
                f"rl.group_size {self.rl.group_size}"
            )
        if self.task == "grpo" and self.tokens is not None:
            raise ValueError("tokens: how many grpo draws is not known before; give max_steps or epochs")
        if self.dataset in self.mixture:
            raise ValueError(
                f"mixture holds {self.dataset}, which is `dataset` already: leave one of them out"
            )
        return self


class _Unique(yaml.SafeLoader):
    """Refuses a key that is there twice, of which YAML would take the last one without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.value in seen:
                raise UserError(
                    f"The settings file has `{key.value}` twice, in lines {seen[key.value]} and {line}.",
                    "Remove one of them.",
                )
            seen[str(key.value)] = line
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> dict[str, Any]:
    """Read a settings file's text and fill in the defaults; raises UserError naming the bad key."""
    try:
        values = _Unique(text).get_single_data() or {}
    except yaml.YAMLError as error:
        raise UserError("The settings file is not YAML: " + " ".join(str(error).split())) from None
    if not isinstance(values, dict):
        raise UserError("The settings file must hold `key: value` lines at its top level.")
    return build(values).model_dump(mode="json")


def build(
    values: Mapping[str, Any],
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> Settings:
    """Settings from a (nested) mapping, then ``flags`` by dotted name, then ``a.b=value`` overrides.

    Later ones win. Raises UserError with one line for each wrong key or value.
    """
    merged: dict[str, Any] = json.loads(json.dumps(values, default=str))  # YAML has dates, settings have none
    merged = overlaid(_of_deepspeed_file(merged), merged)
    given: dict[str, Any] = {}
    for name, value in (flags or {}).items():
        _assign(given, name.split("."), value)
    for override in overrides:
        name, separator, text = override.partition("=")
        if not separator:
            raise UserError(f"--set {override}: no `=` in it.", "Write --set optimizer.lr=2e-5")
        _assign(given, name.strip().split("."), _scalar(override, text))
    merged = overlaid(overlaid(merged, _of_deepspeed_file(given)), given)
    try:
        return Settings.model_validate(merged)
    except ValidationError as error:
        raise UserError(*_explain(error)) from None


def overlaid(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """``top`` laid over ``base``, section by section."""
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        both = isinstance(below, dict) and isinstance(value, dict)
        merged[key] = overlaid(below, value) if both else value  # type: ignore[arg-type]
    return merged


def _of_deepspeed_file(values: dict[str, Any]) -> dict[str, Any]:
    """The settings that `zero.config` of these values says; the name is taken out of them."""
    zero = values.get("zero")
    path = zero.pop("config", None) if isinstance(zero, dict) else None
    return deepspeed_file.settings_of(str(path)) if path else {}


def dotted_names() -> list[str]:
    """Every settable name, as ``--set`` takes it."""

    def walk(section: type[BaseModel], prefix: str) -> list[str]:
        names: list[str] = []
        for name, info in section.model_fields.items():
            kind = info.annotation
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                names += walk(kind, f"{prefix}{name}.")
            else:
                names.append(prefix + name)
        return names

    return walk(Settings, "")


def flat(settings: Settings) -> dict[str, str]:
    """Every setting's value by its dotted name, in the words of ``--set``."""

    def value_of(name: str) -> str:
        value: Any = settings
        for part in name.split("."):
            value = getattr(value, part)
        return value if isinstance(value, str) else json.dumps(value, default=str)

    return {name: value_of(name) for name in dotted_names()}


def help_of(name: str) -> str:
    """The one-paragraph help of a setting, by its dotted name."""
    return " ".join((_field(name).description or "").split())


def choices_of(name: str) -> tuple[str, ...]:
    """The values of a setting that is a closed set, by its dotted name; empty for all others."""
    kind = _field(name).annotation
    return tuple(map(str, get_args(kind))) if get_origin(kind) is Literal else ()


def _field(name: str) -> FieldInfo:
    section: Any = Settings
    *sections, last = name.split(".")
    for part in sections:
        section = section.model_fields[part].annotation
    info: FieldInfo = section.model_fields[last]
    return info


def json_schema() -> dict[str, Any]:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Settings.model_json_schema(),
    }


def _scalar(override: str, text: str) -> Any:
    try:
        value = yaml.safe_load(text) if text.strip() else None
    except yaml.YAMLError as error:
        what = " ".join(str(getattr(error, "problem", error)).split())
        raise UserError(
            f"--set {override}: the value can't be read as YAML: {what}.",
            "Close its brackets, or put quotes around a text.",
        ) from None
    if isinstance(value, str):  # YAML 1.1 reads 2e-5 as text
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _assign(values: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        values = values.setdefault(key, {})
        if not isinstance(values, dict):
            raise UserError(f"--set {'.'.join(path)}: {key} is a value, not a section.")
    values[path[-1]] = value


def _explain(error: ValidationError) -> tuple[str, str]:
    wrong: dict[str, list[str]] = {}  # by name and value; a union of types has one complaint each
    advice = ""
    for item in error.errors():
        name = ".".join(part for part in map(str, item["loc"]) if part.isalnum() or part.isidentifier())
        if item["type"] == "extra_forbidden":
            meant = meant_by(name)
            near = [meant] if meant else difflib.get_close_matches(name, dotted_names(), n=3, cutoff=0.5)
            wrong[f"there is no `{name}`"] = []
            advice = f"Did you mean {', '.join(near)}?" if near else ""
        elif item["type"] == "missing":  # of a list; no setting has to be given
            wrong[f"{name.rpartition('.')[0]} = {item['input']!r} has too few values"] = []
        elif not name:
            wrong[item["msg"].removeprefix("Value error, ")] = []
        else:
            message = item["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
            if item["type"] in ("model_type", "dataclass_type"):
                keys = [each for each in dotted_names() if each.startswith(f"{name}.")]
                message = f"a section, with {', '.join(keys)}"
            wrong.setdefault(f"{name} = {item['input']!r}", []).append(message.split(", unable")[0])
    lines = [f"{what}: should be {' or '.join(rules)}" if rules else what for what, rules in wrong.items()]
    return f"settings: {'; '.join(lines)}.", advice


if __name__ == "__main__":
    SCHEMA_FILE.write_text(json.dumps(json_schema(), indent=2) + "\n")
