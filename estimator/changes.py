"""Options that advice names, as data: each front door spells them as it takes them.

An option is named as in a run's settings (``seq_len``, ``zero.stage``, ``resources.gpus``); goals of
``finetune plan`` by their field (``budget_usd``), Metaflow's backend as ``with``.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol


@dataclass(frozen=True, slots=True)
class Change:
    """Another value for an option. Without a value: the option by its name, or left out of a command."""

    option: str
    value: object = None


Text = str | tuple[str | Change, ...]
"""A sentence in which options stand as data."""

Suggestion = tuple[Change, ...]
"""Changes that belong together: what would work when all of them are made."""


class Spelling(Protocol):
    """Spelling of options on one command line."""

    def name(self, option: str) -> str:
        """The option alone, as in a sentence."""
        ...

    def words(self, change: Change) -> tuple[str, ...]:
        """Return the words added to the command line; none if the option is to be left out."""
        ...


SHORT_OPTIONS = {
    "optimizer.name": "--optimizer",
    "optimizer.lr": "--lr",
    "lora.quantization": "--quantization",
    "lora.modules_to_save": "--modules-to-save",
    "evaluation.every_steps": "--eval-every",
    "harness.tasks": "--eval-harness",
    "images.resolution": "--resolution",
    "export.adapter_only": "--adapter-only",
    "export.push": "--push",
    "rejection.score": "--score",
    "rejection.answers": "--answers",
    "tensor_parallel": "--tp",
    "context_parallel": "--cp",
    "pipeline_parallel": "--pp",
    "expert_parallel": "--ep",
}
"""Options that are shorter than their setting's name."""


def option_of(setting: str) -> str:
    """The option of a setting on every command line: ``lora.rank`` is ``--lora-rank``."""
    plain = setting.removeprefix("resources.").replace(".", "-").replace("_", "-")
    return SHORT_OPTIONS.get(setting, f"--{plain}")


class FinetuneOptions:
    """The options of ``finetune``, which are also those of a Job."""

    _NAMES: ClassVar = {
        "resources.from_catalogue": "no --from-cluster",
        "with": "--no-here",  # a plan for other machines than this one
    }

    def name(self, option: str) -> str:
        return self._NAMES.get(option, option_of(option))

    def words(self, change: Change) -> tuple[str, ...]:
        name = self.name(change.option)
        if change.value is None:
            return ()
        if change.option == "with":
            return (name,)
        if isinstance(change.value, bool):
            return (name if change.value else f"--no-{name.removeprefix('--')}",)
        return (name, str(change.value))


FINETUNE: Spelling = FinetuneOptions()


def in_words(text: Text, spelling: Spelling) -> str:
    """The sentence as one front door says it."""
    if isinstance(text, str):
        return text
    return "".join(part if isinstance(part, str) else _spelled(part, spelling) for part in text)


def suggestion_in_words(suggestion: Suggestion, spelling: Spelling) -> str:
    """The changes of one suggestion, as one front door writes them: "--method qlora --engine torchtune"."""
    added = [shlex.join(words) for change in suggestion if (words := spelling.words(change))]
    left_out = [spelling.name(change.option) for change in suggestion if not spelling.words(change)]
    return " ".join([*added, *(f"{'and ' if added else ''}no {name}" for name in left_out)])


def command_with(command: Sequence[str], suggestion: Suggestion, spelling: Spelling) -> list[str]:
    """The words of a command line with the changes made in it, and what contradicts them left out."""
    changed = {change.option for change in suggestion}
    dropped = {spelling.name(option) for option in (*changed, *contradicting(suggestion))}
    kept: list[str] = []
    number = 0
    while number < len(command):
        name, equals, value = command[number].partition("=")
        apart = not equals and command[number + 1 : number + 2]
        if name == "--set":
            value = command[number + 1] if apart else value
            drop = value.partition("=")[0] in changed
        else:
            drop = name in dropped
        width = 2 if apart and (name == "--set" or (drop and not apart[0].startswith("--"))) else 1
        if not drop:
            kept += command[number : number + width]
        number += width
    return kept + [word for change in suggestion for word in spelling.words(change)]


def _spelled(change: Change, spelling: Spelling) -> str:
    if change.value is None:
        return spelling.name(change.option)
    return shlex.join(spelling.words(change))


# Options that say something else than the one that is changed
_CONTRADICTS = {
    "resources.instance_type": (
        "resources.gpu",
        "resources.gpus",
        "resources.cloud",
        "max_nodes",
        "max_gpus",
    ),
    "resources.gpus": ("max_gpus", "max_nodes"),
    "with": ("here",),
}


def contradicting(changes: Iterable[Change]) -> set[str]:
    """Options that say something else than those that are changed, and are left out next to them."""
    given = {change.option for change in changes}
    return {other for option in given for other in _CONTRADICTS.get(option, ())} - given


# What an option is called in older notes of this package's and in other tools: our name for it
OTHER_NAMES = {
    "launcher": "engine",
    "batch": "global_batch_size",
    "batch_size": "global_batch_size",
    "global_batch": "global_batch_size",
    "train_batch_size": "global_batch_size",
    "micro_batch": "micro_batch_size",
    "per_device_train_batch_size": "micro_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "global_batch_size",
    "lr": "optimizer.lr",
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "adam_epsilon": "optimizer.eps",
    "optim": "optimizer.name",
    "optimizer_in_bwd": "optimizer.in_backward",
    "lr_scheduler": "schedule.name",
    "lr_scheduler_type": "schedule.name",
    "warmup_ratio": "schedule.warmup_ratio",
    "warmup_steps": "schedule.warmup_steps",
    "num_warmup_steps": "schedule.warmup_steps",
    "num_epochs": "epochs",
    "max_grad_norm": "clip_grad_norm",
    "max_steps_per_epoch": "max_steps",
    "save_steps": "checkpoint_every",
    "eval_steps": "evaluation.every_steps",
    "eval_strategy": "evaluation.every_steps",
    "evaluation_strategy": "evaluation.every_steps",
    "early_stopping": "evaluation.patience",
    "early_stopping_patience": "evaluation.patience",
    "early_stopping_threshold": "evaluation.min_delta",
    "load_best_model_at_end": "evaluation.keep_best",
    "save_total_limit": "keep_checkpoints",
    "logging_steps": "log_every",
    "data_seed": "seed",
    "torch_compile": "compile",
    "bf16": "precision",
    "fp16": "precision",
    "dtype": "precision",
    "torch_dtype": "precision",
    "report_to": "tracker",
    "metric_logger": "tracker",
    "model_name": "model",
    "model_name_or_path": "model",
    "base_model": "model",
    "dataset_name": "dataset",
    "train_file": "dataset",
    "val_set_size": "evaluation.fraction",
    "val_size": "evaluation.fraction",
    "train_on_input": "train_on_prompt",
    "train_on_inputs": "train_on_prompt",
    "beta": "preference.beta",
    "label_smoothing": "preference.label_smoothing",
    "r": "lora.rank",
    "lora_r": "lora.rank",
    "lora_rank": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "use_rslora": "lora.rslora",
    "use_dora": "method",
    "adapter": "method",
    "finetuning_type": "method",
    "stage": "task",
    "target_modules": "lora.targets",
    "lora_target": "lora.targets",
    "lora_target_modules": "lora.targets",
    "lora_attn_modules": "lora.targets",
    "modules_to_save": "lora.modules_to_save",
    "deepspeed": "zero.config",
    "num_train_epochs": "epochs",
    "max_length": "seq_len",
    "cutoff_len": "seq_len",
    "sequence_len": "seq_len",
    "max_seq_len": "seq_len",
    "max_seq_length": "seq_len",
    "gradient_checkpointing": "activation_checkpointing",
    "enable_activation_checkpointing": "activation_checkpointing",
    "enable_gradient_checkpointing": "activation_checkpointing",
    "sample_packing": "packing",
    "packed": "packing",
    "neftune": "neftune_alpha",
    "neftune_noise_alpha": "neftune_alpha",
    "noise_alpha": "neftune_alpha",
    "use_liger_kernel": "liger",
    "use_liger": "liger",
    "liger_kernel": "liger",
    "enable_liger_kernel": "liger",
    "length_grouped": "group_by_length",
    "train_sampling_strategy": "group_by_length",
    "checkpointing": "activation_checkpointing",
    "use_gradient_checkpointing": "activation_checkpointing",
    "activation_checkpoint": "activation_checkpointing",
    "disable_gradient_checkpointing": "activation_checkpointing",
    "bnb_4bit_quant_type": "lora.quantization",
    "load_in_4bit": "lora.quantization",
    "load_in_8bit": "lora.quantization",
    "quantization_bit": "lora.quantization",
    "nproc_per_node": "resources.gpus",
    "num_gpus": "resources.gpus",
    "nnodes": "resources.nodes",
    "num_nodes": "resources.nodes",
}


def meant_by(name: str) -> str | None:
    """The option that someone means who calls it so (``--batch-size``, ``batch_size``); None: not known."""
    return OTHER_NAMES.get(name.removeprefix("--").replace("-", "_"))
