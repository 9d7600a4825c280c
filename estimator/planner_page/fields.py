"""Form of the planner page: fields, and parsing of their texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from estimator import hardware, models, token_counts
from estimator.errors import UserError
from estimator.models import diffusion
from estimator.models.vision import IMAGE_SIDE
from estimator.option_names import option_name
from estimator.planning.goals import PREFERENCES
from estimator.vocabulary import (
    LAUNCHED_OPTIMIZERS,
    PLANNED_ENGINES,
    Capacity,
    Offload,
    RequestedMethod,
    RequestedPrecision,
    Task,
    Vision,
)

BOOLEAN_TEXTS = ("on", "off")
_MANY = "any; several with commas"

Kind = Literal["text", "whole", "number", "tokens", "choice", "flag", "names", "document"]


@dataclass(frozen=True, slots=True)
class Field:
    """One field of the form. Its text is empty if nothing is chosen."""

    name: str
    label: str
    kind: Kind = "text"
    choices: tuple[str, ...] = ()
    """All values of a ``choice``; suggestions of a ``text`` or of ``names``."""
    hint: str = ""
    """Default value of an empty field, or an example."""

    @property
    def option(self) -> str:
        """Option of ``finetune plan``; for a document, the option that replaces it in a command."""
        return _DOCUMENTS.get(self.name) or option_name(self.name)


_DOCUMENTS = {"config": "--model", "cluster": "--from-cluster"}
KUBECTL = "kubectl get nodes,pods -A -o json"

GROUPS: Mapping[str, tuple[Field, ...]] = {
    "Training": (
        Field("model", "Model", "text", (*models.names(), *diffusion.MODELS), "llama-8b"),
        Field("config", "Or a config.json", "document", (), "Paste that of a model in Hugging Face's layout"),
        Field("task", "Task", "choice", get_args(Task), "sft"),
        Field("method", "Method", "choice", get_args(RequestedMethod), "auto"),
        Field("seq_len", "Sequence length", "whole", (), "2048 tokens"),
        Field("resolution", "Image resolution", "whole", (), "as published"),
        Field("vision", "Images: vision tower", "choice", get_args(Vision), "text alone"),
        Field("images_per_row", "Images in a sequence", "whole", (), "1"),
        Field("image_size", "Side of an image in pixels", "whole", (), str(IMAGE_SIDE)),
        Field("global_batch_size", "Global batch size", "whole", (), "16 sequences"),
        Field("lora_rank", "LoRA rank", "whole", (), "8"),
    ),
    "Where": (
        Field("gpu", "GPU", "text", tuple(gpu.name for gpu in hardware.gpus()), "any"),
        Field("instance_type", "Instance types", "names", tuple(i.name for i in hardware.instances()), _MANY),
        Field("cloud", "Clouds", "names", tuple(hardware.clouds()), _MANY),
        Field("nodes", "Nodes", "whole", (), "as planned"),
        Field("gpus", "GPUs per node", "whole", (), "as planned"),
        Field("max_gpus", "Maximum number of GPUs", "whole", (), "no limit"),
        Field("capacity", "Low availability", "choice", get_args(Capacity), "usual: ranked last"),
        Field("spot", "Spot instances", "flag"),
        Field("cluster", "Your cluster", "document", (), f"Paste what `{KUBECTL}` prints; it stays here"),
    ),
    "Goals": (
        Field("tokens", "Training tokens", "tokens", (), "250M, 1.5B"),
        Field("deadline_hours", "Deadline in hours", "number", (), "no limit"),
        Field("budget_usd", "Budget in USD", "number", (), "no limit"),
        Field("prefer", "Rank by", "choice", PREFERENCES, "price"),
    ),
    "How": (
        Field("engine", "Engine", "choice", ("auto", *PLANNED_ENGINES), "auto"),
        Field("precision", "Precision", "choice", get_args(RequestedPrecision), "auto"),
        Field("optimizer", "Optimizer", "choice", LAUNCHED_OPTIMIZERS, "adamw"),
        Field("micro_batch_size", "Micro batch size", "whole", (), "as planned"),
        Field("activation_checkpointing", "Activation checkpointing", "choice", BOOLEAN_TEXTS, "as planned"),
        Field("zero_offload", "Offload with DeepSpeed", "choice", get_args(Offload), "none"),
        Field("fsdp_offload", "Offload with FSDP2", "choice", get_args(Offload), "none"),
        Field("packing", "Packing", "choice", BOOLEAN_TEXTS, "as planned"),
    ),
}
FIELDS = tuple(field for group in GROUPS.values() for field in group)
OF_NAME: Mapping[str, Field] = {field.name: field for field in FIELDS}


def as_values() -> list[dict[str, Any]]:
    """Return the groups with their fields as plain values."""
    return [
        {"group": group, "fields": [asdict(field) | {"option": field.option} for field in members]}
        for group, members in GROUPS.items()
    ]


def read(form: Mapping[str, str]) -> dict[str, Any]:
    """Parse the values by field name; empty fields are omitted.

    Raises UserError for an unknown field and for an invalid text.
    """
    values = {}
    for name, text in form.items():
        if name not in OF_NAME:
            raise UserError(f"The form has no field {name}.", "Choose again, from an empty form.")
        if text.strip():
            values[name] = _value(OF_NAME[name], text.strip())
    return values


def command_options(form: Mapping[str, str]) -> list[str]:
    """Return the equivalent options of ``finetune plan``; a pasted model becomes the folder MY_MODEL."""
    arguments: list[str] = []
    for field in FIELDS:
        text = form.get(field.name, "").strip()
        if not text or (field.name == "model" and form.get("config", "").strip()):
            continue
        if field.name == "config":
            arguments += [field.option, MY_MODEL]
        elif field.kind in ("flag", "document"):
            arguments.append(field.option)
        elif field.kind == "names":
            arguments += [argument for name in _names(text) for argument in (field.option, name)]
        elif field.choices == BOOLEAN_TEXTS:
            arguments.append(field.option if text == "on" else f"--no-{field.option.removeprefix('--')}")
        else:
            arguments += [field.option, text]
    return arguments


MY_MODEL = "./my-model"
"""Folder in commands for a model whose config.json was pasted."""


def _value(field: Field, text: str) -> Any:
    if field.kind == "whole":
        return _integer(field, text)
    if field.kind == "number":
        return _number(field, text)
    if field.kind == "tokens":
        value = token_counts.parse(text)
        if value is None:
            raise UserError(f"{field.option} {text} is not a number of tokens.", "Write 250M, 1.5B or 1e9.")
        return round(value)
    if field.kind == "flag":
        return text == "on"
    if field.kind == "names":
        return _names(text)
    if field.choices == BOOLEAN_TEXTS:
        return text == "on"
    return text


def _integer(field: Field, text: str) -> int:
    digits = text.replace(",", "").replace("_", "")
    if not digits.isascii() or not digits.isdigit() or int(digits) == 0:
        raise UserError(f"{field.option} {text} is not a whole number above 0.", f"Correct {field.label}.")
    return int(digits)


def _number(field: Field, text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        raise UserError(f"{field.option} {text} is not a number.", f"Correct {field.label}.") from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
