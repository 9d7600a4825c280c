"""Settings: every knob of a run, with its default. The YAML file, the flags and ``--set`` all end here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    Field,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

from estimator.changes import meant_by
from estimator.errors import UserError
from estimator.formatting import format_list
from estimator.models import DiffusionSpec, ModelSpec
from estimator.models.diffusion import positions_of
from estimator.names import did_you_mean
from estimator.setup import default_seq_len
from estimator.vocabulary import (
    AUTOMATIC_METHODS,
    LAUNCHED_METHODS,
    METHODS,
    TASKS,
    LaunchedEngine,
    LaunchedFp8,
    RequestedMethod,
    RequestedPrecision,
    Task,
)
from launchers import deepspeed_file
from launchers.handover_sections import Export, Harness
from launchers.image_sections import Images
from launchers.sections import (
    Adapter,
    Auto,
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

SCHEMA_FILE = Path(__file__).with_name("settings.schema.json")

_METHODS_HELP = (
    "Training method. "
    + " ".join(f"{name}: {METHODS[name].description}." for name in LAUNCHED_METHODS)
    + f" auto: the first of {format_list(AUTOMATIC_METHODS)} that fits."
)


class Settings(Section):
    """Every knob of a run. Unknown names are refused."""

    model: str = Field(default="tiny-llama", min_length=1)
    """A name of the model table, a Hugging Face id, s3://bucket/path or a local directory."""
    method: RequestedMethod = Field(default="full", description=_METHODS_HELP)
    task: Task = "sft"
    """Training task. sft: supervised fine-tuning on answers. pretrain: plain text. dpo, orpo, simpo:
    preferences from pairs of a better and a worse answer, dpo with a reference model, the others without.
    kto: preferences from single answers marked good or bad. reward: a reward model. grpo: reinforcement
    learning on sampled answers (`rl`). text-to-image: images from captions (`images`)."""
    engine: LaunchedEngine | Auto = "auto"
    """Training engine. auto: the first of torchtune, deepspeed and fsdp2 that supports the job; trl for
    task grpo."""
    dataset: str = Field(default="support-tickets", min_length=1)
    """JSONL, JSON, CSV or Parquet of chat messages, instruction/response or text, for preferences of pairs,
    for pretrain of text (also .txt): a local path, a folder of save_to_disk, s3://, a Hugging Face id,
    support-tickets (generated: messages and the JSON record of each), or python-docs (generated: the running
    Python's documentation). NAME#SPLIT names a split."""
    mixture: dict[str, Weight] = Field(default_factory=dict)
    """Additional datasets with weights: how often one epoch repeats the rows of each. 2: twice; 0.5: a random
    half."""
    seq_len: Positive | None = None
    """Longest sequence in tokens; longer rows are cut, those of pretrain split. Empty: 2048 (tiny-llama:
    256), or the model's limit if lower."""
    packing: bool = False
    """Put several short rows into one sequence (attention stays within each row)."""
    group_by_length: bool = False
    """Group rows of similar length into a batch to reduce padding. Rows move by at most 50 steps; the order
    of the batches stays random."""
    longest_first: bool = True
    """Begin the first epoch with the longest rows, so that memory is reserved once, and a run that does not
    fit fails in its first step. Packed rows stay as they are."""
    expandable_segments: bool = True
    """On NVIDIA GPUs add expandable_segments:True to PYTORCH_CUDA_ALLOC_CONF, unless that variable says
    otherwise: batches of other lengths then use freed memory again."""
    neftune_alpha: PositiveFloat | None = None
    """NEFTune: noise on the embeddings in training, up to this by the root of a document's tokens times
    dimensions; its authors take 5, 10 or 15 (tasks sft and pretrain). Empty: none."""
    trial: NonNegative = 0
    """Number of steps for which the three best plans are tried on the run's machines before training; the
    fastest is used. 0: use the best predicted plan."""
    train_on_prompt: bool = False
    """Count the prompt's tokens in the loss too."""
    chat_template: str | None = None
    """A Jinja chat template to use instead of the tokenizer's."""
    new_tokens: tuple[NotEmpty, ...] = ()
    """Tokens to add to the tokenizer. Their embeddings start as the mean of all embeddings; embedding and
    head are then trained in full next to adapters. Needs deepspeed or fsdp2."""
    epochs: Positive = 1
    """Passes over the data."""
    max_steps: Positive | None = None
    """Stop after this many optimizer steps."""
    tokens: Tokens | None = None
    """Stop after this many training tokens (20000, 300M, 1B), without padding. The data is repeated as often
    as needed. Instead of `epochs` and `max_steps`."""
    global_batch_size: Positive = 16
    """Sequences per optimizer step, summed over all GPUs."""
    micro_batch_size: Positive | None = None
    """Sequences per GPU and forward pass. Empty: the largest that fits."""
    precision: RequestedPrecision = "auto"
    """auto: fp32 on CPUs; on GPUs bf16 with torchtune, bf16 with fp32 master weights with the others."""
    fp8: LaunchedFp8 = "none"
    """Matrix products in float8, with one scale per tensor or per row (fsdp2)."""
    activation_checkpointing: bool | Auto = "auto"
    """Recompute activations in the backward pass. auto: only where memory needs it."""
    recompute: Recompute = Recompute()
    """What activation checkpointing recomputes."""
    compile: bool = False
    """torch.compile the model's blocks (torchtune, fsdp2)."""
    liger: bool = False
    """Liger-Kernel's kernels for norms, MLPs, rotation and the loss, for which no logits are kept
    (deepspeed, fsdp2, on GPUs; needs the package liger-kernel). With `compile` or `fp8`: for the loss."""
    clip_grad_norm: float | None = Field(default=1.0, gt=0)
    """Largest gradient norm. Empty: no clipping."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Random seed of the data order and of the adapters' initial weights."""
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
    images: Images = Images()
    """Images with captions, for task text-to-image."""
    zero: Zero = Zero()
    """DeepSpeed's sharding."""
    fsdp: Fsdp = Fsdp()
    """FSDP2's sharding."""
    rejection: Rejection = Rejection()
    """Answers of the model itself to train on, for flows/rejection_flow.py."""
    evaluation: Evaluation = Evaluation()
    """Held-out data and sample answers."""
    harness: Harness = Harness()
    """Task metrics of base and result, by lm-evaluation-harness."""
    export: Export = Export()
    """What is handed over, and where to."""
    resources: Resources = Resources()
    """Hardware; empty values are planned."""
    checkpoint_every: int = Field(default=0, ge=0)
    """Optimizer steps between checkpoints. 0: every tenth of the run, but no fewer than 10 steps; on spot as
    often as loses least by interruptions, where their rate is known."""
    keep_checkpoints: Positive = 2
    """How many of the newest checkpoints are kept."""
    log_every: Positive | Auto = "auto"
    """Optimizer steps between two lines of the log. auto: a tenth of the run, but at most one line per second
    and at least one per minute. On a terminal, one line is updated in place."""
    profile: ProfileWindow = ProfileWindow()
    """A few steps' time and memory in full."""
    tracker: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    """Experiment trackers that get every step's metrics."""
    output_dir: str = Field(default="finetuned", min_length=1)
    """Local runs put the finished model into a folder of the run's id below this one."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Raw values laid over the engine's own configuration (torchtune YAML, DeepSpeed JSON), last."""

    @property
    def unused(self) -> tuple[str, ...]:
        """What is set, by its dotted name, and has no part in the task."""
        found = ["train_on_prompt"] if self.train_on_prompt and self.task != "sft" else []
        if self.neftune_alpha is not None and not TASKS[self.task].next_token:
            found.append("neftune_alpha")
        weighed = TASKS[self.task].preference_settings
        for name, default in Preference():
            if getattr(self.preference, name) != default and name not in weighed:
                found.append(f"preference.{name}")
        if not TASKS[self.task].draws_answers:
            found += [f"rl.{name}" for name, default in Rl() if getattr(self.rl, name) != default]
        if not TASKS[self.task].images:
            found += [f"images.{name}" for name, each in Images() if getattr(self.images, name) != each]
        return tuple(found)

    @property
    def unused_by_method(self) -> tuple[str, ...]:
        """What is set of the sections of adapters, by its dotted name, and has no part in the method."""
        if self.method == "auto":
            return tuple(self._set_of_adapters())
        method, found = METHODS[self.method], []
        if not method.low_rank:
            found = [f"lora.{name}" for name, default in Lora() if getattr(self.lora, name) != default]
        elif not method.quantized and self.lora.quantization != Lora().quantization:
            found = ["lora.quantization"]
        return (*found, *(() if method.llama_adapter else self._set_of_adapters()))

    def _set_of_adapters(self) -> list[str]:
        return [f"adapter.{name}" for name, each in Adapter() if getattr(self.adapter, name) != each]

    def sequence_length(self, spec: ModelSpec) -> int:
        """Tokens of the longest sequence; of images, positions of the latents of a square one."""
        if isinstance(spec, DiffusionSpec):
            return positions_of(self.images.resolution or spec.resolution)
        return default_seq_len(spec) if self.seq_len is None else self.seq_len

    @property
    def rows_per_step(self) -> int:
        """Rows of the data that an optimizer step takes: of grpo prompts, each with a group of answers."""
        return self.global_batch_size // (self.rl.group_size if TASKS[self.task].draws_answers else 1)

    @property
    def trains_on_pairs(self) -> bool:
        """Whether a row of the data is a better and a worse answer to one prompt."""
        return TASKS[self.task].pairs

    def merges(self, method: str) -> bool:
        """Whether what ``method`` trains is handed over as a whole model, not as an adapter on its own."""
        spec = METHODS[method]
        alone = self.export.adapter_only or (method == "lora" and self.lora.experts)
        return not spec.adapters or (spec.low_rank and not alone)

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
        if self.tokens is not None and (self.max_steps is not None or self.epochs > 1):
            other = "epochs" if self.max_steps is None else "max_steps"
            raise ValueError(f"tokens and {other} both say how long to train: give one of them")
        if TASKS[self.task].draws_answers and self.global_batch_size % self.rl.group_size:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} counts answers, and is no multiple of "
                f"rl.group_size {self.rl.group_size}"
            )
        window = self.profile.window
        if window is not None and self.max_steps is not None and window[1] > self.max_steps:
            raise ValueError(f"profile.steps {self.profile.steps}: max_steps is {self.max_steps}")
        every = self.evaluation.every_steps
        if every is not None and self.max_steps is not None and every > self.max_steps:
            raise ValueError(f"evaluation.every_steps {every}: max_steps is {self.max_steps}")
        if TASKS[self.task].draws_answers and self.evaluation.in_training:
            raise ValueError(
                "evaluation.every_steps: grpo is evaluated before and after the run alone; its mean reward "
                "is in every step's line"
            )
        if TASKS[self.task].draws_answers and self.tokens is not None:
            raise ValueError("tokens: how many grpo draws is not known before; give max_steps or epochs")
        if self.group_by_length and self.packing:
            raise ValueError(
                "group_by_length and packing: packed sequences are full already; leave one of them out"
            )
        if self.dataset in self.mixture:
            raise ValueError(
                f"mixture holds {self.dataset}, which is `dataset` already: leave one of them out"
            )
        return self


class _Plain(yaml.SafeLoader):
    """Leaves 20:23 a text, which YAML 1.1 takes for a number to the base of 60."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        tag = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        number = tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        if number and isinstance(value, str) and ":" in value and implicit != (False, False):
            return "tag:yaml.org,2002:str"
        return tag


class _Unique(_Plain):
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
        if not (separator and name.strip()):
            missing = "nothing before its `=`" if separator else "no `=` in it"
            raise UserError(f"--set {override}: {missing}.", "Write --set optimizer.lr=2e-5")
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
        value = _Plain(text).get_single_data() if text.strip() else None
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
        path = list(map(str, item["loc"]))
        # Between the names are pydantic's own words for the type that it has tried.
        named = (part for part in path if part.isalnum() or part.isidentifier())
        name = ".".join(part for part in named if part not in ("bool", "float", "int", "str"))
        if item["type"] == "extra_forbidden":
            name = ".".join(path)
            meant = meant_by(name)
            wrong[f"there is no `{name}`"] = []
            advice = f"Did you mean {meant}?" if meant else did_you_mean(name, dotted_names())
        elif item["type"] == "missing":  # of a list; no setting has to be given
            wrong[f"{name.rpartition('.')[0]} = {item['input']!r} has too few values"] = []
        elif not name or (item["type"] == "value_error" and isinstance(item["input"], dict)):  # of a section
            wrong[f"{name}: {item['msg']}".removeprefix(": ").replace("Value error, ", "")] = []
        else:
            message = item["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
            if item["type"] in ("model_type", "dataclass_type"):
                keys = [each for each in dotted_names() if each.startswith(f"{name}.")]
                message = f"a section, with {', '.join(keys)}"
            elif item["type"] == "string_too_short":
                message = "a text that is not empty"
            wrong.setdefault(f"{name} = {item['input']!r}", []).append(message.split(", unable")[0])
    lines = [f"{what}: should be {' or '.join(rules)}" if rules else what for what, rules in wrong.items()]
    return f"settings: {'; '.join(lines)}.", advice


if __name__ == "__main__":
    SCHEMA_FILE.write_text(json.dumps(json_schema(), indent=2) + "\n")
