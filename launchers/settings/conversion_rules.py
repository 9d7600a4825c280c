"""Rules by which keys of axolotl, LLaMA-Factory, TRL and torchtune become settings.

``RULES`` is the only table of supported keys: the conversion, its tests and docs/convert.md are derived from
it. Functions that translate a value raise UntranslatableError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from estimator.models.architectures import PROJECTIONS

Tool = Literal["axolotl", "LLaMA-Factory", "TRL", "torchtune"]


class UntranslatableError(Exception):
    """Raised for a value that the setting does not support; the message is the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Translation of one key to ``setting``; "" if the key needs no setting, with the reason in ``note``."""

    setting: str
    translate: Callable[[Any], Any] = lambda value: value
    note: str = ""
    false_is_default: bool = False  # whether a value of false is ignored


def _number(value: Any) -> float:
    try:
        return float(value)  # YAML reads 1e-5 as text
    except (TypeError, ValueError):
        raise UntranslatableError("not a number") from None


def _positive(value: Any) -> float:
    if (number := _number(value)) <= 0:
        raise UntranslatableError("0 or less means that it is off")
    return number


def _count(value: Any) -> int:
    number = _positive(value)
    if number != int(number):
        raise UntranslatableError("not a whole number")
    return int(number)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise UntranslatableError("neither true nor false")
    return value


def _name(table: Mapping[str, str]) -> Callable[[Any], str]:
    """Return a function that translates a name by ``table``, ignoring case and enclosing packages."""

    def translate(value: Any) -> str:
        choice = table.get(str(value).lower().rpartition(".")[2]) or table.get(str(value).lower())
        if choice is None:
            raise UntranslatableError("this package has no such choice")
        return choice

    return translate


_optimizer = _name(
    {
        "adamw": "adamw",
        "adamw_torch": "adamw",
        "adamw_torch_fused": "adamw",
        "adamw_hf": "adamw",
        "adamw_8bit": "adamw8bit",
        "adamw_bnb_8bit": "adamw8bit",
        "adamw8bit": "adamw8bit",
        "paged_adamw": "paged-adamw",
        "paged_adamw_32bit": "paged-adamw",
        "pagedadamw": "paged-adamw",
        "paged_adamw_8bit": "paged-adamw8bit",
        "pagedadamw8bit": "paged-adamw8bit",
        "adafactor": "adafactor",
        "muon": "muon",
        "sgd": "sgd",
    }
)
_schedule = _name(
    {
        "cosine": "cosine",
        "linear": "linear",
        "constant": "constant",
        "constant_with_warmup": "constant",
        "warmup_stable_decay": "wsd",
        "get_cosine_schedule_with_warmup": "cosine",
    }
)
_task = _name(
    {
        "sft": "sft",
        "pt": "pretrain",
        "dpo": "dpo",
        "kto": "kto",
        "orpo": "orpo",
        "simpo": "simpo",
        "rm": "reward",
        "grpo": "grpo",
    }
)
_method = _name({"full": "full", "lora": "lora", "qlora": "qlora"})
_precision = _name(
    {**dict.fromkeys(("bf16", "bfloat16", "fp16", "float16", "auto", "true"), "auto"), "fp32": "fp32"}
)
_tracker = _name({"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"})
_PROJECTION_NAMES = {"output_proj": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def _trackers(value: Any) -> list[str]:
    """Translate one tracker or a list of them; "none" is omitted."""
    names = value if isinstance(value, list) else [value]
    return [_tracker(name) for name in names if str(name).lower() != "none"]


def _targets(value: Any) -> list[str] | str:
    """Translate LoRA target modules, a list or separated by commas, to names of this package."""
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, list):
        raise UntranslatableError("not a list of projections")
    if names in (["all"], ["all-linear"]):
        return "all-linear"
    names = [_PROJECTION_NAMES.get(str(name), str(name)) for name in names]
    if unknown := [name for name in names if name not in PROJECTIONS]:
        raise UntranslatableError(f"{', '.join(unknown)}: not a supported target")
    return names


def _datasets(value: Any) -> str:
    """Return the only dataset of a list. These formats have no weights for several datasets."""
    entries = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    if len(entries) > 1:
        raise UntranslatableError("several datasets: list them with weights in mixture")
    path = entries[0].get("path") if isinstance(entries[0], dict) else entries[0]
    if not isinstance(path, str) or not path:
        raise UntranslatableError("does not name a dataset")
    return path


def _mixture(value: Any) -> dict[str, float]:
    """Return datasets with weights, from the format of the alignment handbook."""
    entries = value.get("datasets", value) if isinstance(value, dict) else value
    if isinstance(entries, dict):
        return {str(name): _positive(weight) for name, weight in entries.items()}
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and "id" in entry for entry in entries
    ):
        raise UntranslatableError("list the datasets in mixture")
    return {str(entry["id"]): _positive(entry.get("weight", 1)) for entry in entries}


_UNNEEDED = "set by the plan, or always done"
_CACHE = "caches and workers need no setting"
_HUB = "export.push names the repository"
_ALWAYS_WRITTEN = "logs and reports are always written"


def _rules_without_setting(note: str, *keys: str) -> dict[str, Rule]:
    """Return rules for keys that need no setting, for the reason ``note``."""
    return {key: Rule(setting="", note=note) for key in keys}


# Keys of transformers' TrainingArguments; TRL and LLaMA-Factory support them, axolotl some of them
_TRAINER: dict[str, Rule] = {
    "model_name_or_path": Rule(setting="model"),
    "learning_rate": Rule(setting="optimizer.lr", translate=_positive),
    "weight_decay": Rule(setting="optimizer.weight_decay", translate=_number),
    "adam_epsilon": Rule(setting="optimizer.eps", translate=_positive),
    "optim": Rule(setting="optimizer.name", translate=_optimizer),
    "lr_scheduler_type": Rule(setting="schedule.name", translate=_schedule),
    "warmup_ratio": Rule(setting="schedule.warmup_ratio", translate=_number),
    "warmup_steps": Rule(setting="schedule.warmup_steps", translate=_count),
    "num_train_epochs": Rule(setting="epochs", translate=_count),
    "max_steps": Rule(setting="max_steps", translate=_count),
    "max_grad_norm": Rule(setting="clip_grad_norm", translate=_positive),
    "per_device_train_batch_size": Rule(setting="micro_batch_size", translate=_count),
    "seed": Rule(setting="seed", translate=_count),
    "bf16": Rule(setting="precision", translate=_precision, note="bf16 where the GPU has it"),
    "fp16": Rule(setting="precision", translate=_precision, note="bf16, or fp16 where the GPU has no bf16"),
    "torch_dtype": Rule(setting="precision", translate=_precision),
    "dtype": Rule(setting="precision", translate=_precision),
    "gradient_checkpointing": Rule(setting="activation_checkpointing", translate=_flag),
    "torch_compile": Rule(setting="compile", translate=_flag),
    "use_liger_kernel": Rule(setting="liger", translate=_flag),
    "neftune_noise_alpha": Rule(setting="neftune_alpha", translate=_positive),
    "group_by_length": Rule(setting="group_by_length", translate=_flag),
    "packing": Rule(setting="packing", translate=_flag),
    "max_length": Rule(setting="seq_len", translate=_count),
    "max_seq_length": Rule(setting="seq_len", translate=_count),
    "logging_steps": Rule(setting="log_every", translate=_count),
    "save_steps": Rule(setting="checkpoint_every", translate=_count),
    "eval_steps": Rule(setting="evaluation.every_steps", translate=_count),
    "save_total_limit": Rule(setting="keep_checkpoints", translate=_count),
    "load_best_model_at_end": Rule(setting="evaluation.keep_best", translate=_flag),
    "early_stopping_patience": Rule(setting="evaluation.patience", translate=_count),
    "report_to": Rule(setting="tracker", translate=_trackers),
    "output_dir": Rule(setting="output_dir"),
    "hub_model_id": Rule(setting="export.push"),
    "chat_template": Rule(setting="chat_template"),
    "beta": Rule(setting="preference.beta", translate=_positive),
    "label_smoothing": Rule(setting="preference.label_smoothing", translate=_number),
    "lora_alpha": Rule(setting="lora.alpha", translate=_positive),
    "lora_dropout": Rule(setting="lora.dropout", translate=_number),
    "use_rslora": Rule(setting="lora.rslora", translate=_flag),
    **_rules_without_setting(
        _UNNEEDED,
        *("ddp_timeout", "ddp_find_unused_parameters", "attn_implementation", "use_cache", "tf32"),
        *("remove_unused_columns", "do_train", "do_eval", "gradient_checkpointing_kwargs", "use_peft"),
        *("flash_attn", "flash_attention", "average_tokens_across_devices", "per_device_eval_batch_size"),
        *(
            "log_level",
            "logging_strategy",
            "save_strategy",
            "overwrite_output_dir",
            "gradient_accumulation_steps",
        ),
        *("logging_first_step", "pad_to_multiple_of", "padding_free"),
    ),
    **_rules_without_setting(
        _CACHE, "dataset_num_proc", "preprocessing_num_workers", "dataloader_num_workers"
    ),
    **_rules_without_setting(
        _CACHE, "overwrite_cache", "dataloader_prefetch_factor", "dataloader_pin_memory"
    ),
    **_rules_without_setting(_HUB, "push_to_hub", "hub_strategy"),
    **_rules_without_setting(
        _ALWAYS_WRITTEN, "plot_loss", "include_tokens_per_second", "include_num_input_tokens_seen"
    ),
}
RULES: dict[Tool, dict[str, Rule]] = {
    "TRL": _TRAINER
    | {
        "dataset_name": Rule(setting="dataset"),
        "dataset_mixture": Rule(setting="mixture", translate=_mixture),
        "dataset_mixer": Rule(setting="mixture", translate=_mixture),
        "lora_r": Rule(setting="lora.rank", translate=_count),
        "lora_target_modules": Rule(setting="lora.targets", translate=_targets),
    },
    "LLaMA-Factory": _TRAINER
    | {
        "stage": Rule(setting="task", translate=_task),
        "finetuning_type": Rule(setting="method", translate=_method),
        "dataset": Rule(setting="dataset", translate=_datasets),
        "cutoff_len": Rule(setting="seq_len", translate=_count),
        "model": Rule(setting="model"),
        "train_dataset": Rule(setting="dataset", translate=_datasets),
        "micro_batch_size": Rule(setting="micro_batch_size", translate=_count),
        "global_batch_size": Rule(setting="global_batch_size", translate=_count),
        "peft_config.name": Rule(setting="method", translate=_method),
        "peft_config.r": Rule(setting="lora.rank", translate=_count),
        "peft_config.lora_alpha": Rule(setting="lora.alpha", translate=_positive),
        "peft_config.lora_dropout": Rule(setting="lora.dropout", translate=_number),
        "peft_config.target_modules": Rule(setting="lora.targets", translate=_targets),
        "lora_rank": Rule(setting="lora.rank", translate=_count),
        "lora_target": Rule(setting="lora.targets", translate=_targets),
        "pref_beta": Rule(setting="preference.beta", translate=_positive),
        "val_size": Rule(setting="evaluation.fraction", translate=_number),
        "train_on_prompt": Rule(setting="train_on_prompt", translate=_flag),
        "enable_liger_kernel": Rule(setting="liger", translate=_flag),
        "use_swanlab": Rule(setting="", note="tracker has tensorboard, wandb and mlflow"),
        "template": Rule(setting="", note="the model's own chat template is used; chat_template replaces it"),
    },
    "axolotl": _TRAINER
    | {
        "base_model": Rule(setting="model"),
        "datasets": Rule(setting="dataset", translate=_datasets),
        "pretraining_dataset": Rule(setting="dataset", translate=_datasets),
        "adapter": Rule(setting="method", translate=_method),
        "rl": Rule(setting="task", translate=_task),
        "sequence_len": Rule(setting="seq_len", translate=_count),
        "sample_packing": Rule(setting="packing", translate=_flag),
        "micro_batch_size": Rule(setting="micro_batch_size", translate=_count),
        "num_epochs": Rule(setting="epochs", translate=_count),
        "optimizer": Rule(setting="optimizer.name", translate=_optimizer),
        "lr_scheduler": Rule(setting="schedule.name", translate=_schedule),
        "cosine_min_lr_ratio": Rule(setting="schedule.min_lr_ratio", translate=_number),
        "val_set_size": Rule(setting="evaluation.fraction", translate=_number),
        "train_on_inputs": Rule(setting="train_on_prompt", translate=_flag),
        "lora_r": Rule(setting="lora.rank", translate=_count),
        "lora_target_modules": Rule(setting="lora.targets", translate=_targets),
        "lora_target_linear": Rule(
            setting="lora.targets", translate=lambda _: "all-linear", false_is_default=True
        ),
        "chat_template": Rule(
            setting="", note="the model's own chat template is used; chat_template replaces it"
        ),
        **_rules_without_setting(_CACHE, "dataset_prepared_path", "dataset_processes"),
        **_rules_without_setting(
            _UNNEEDED, "model_type", "tokenizer_type", "processor_type", "eval_sample_packing"
        ),
        **_rules_without_setting(
            _UNNEEDED,
            "pad_to_sequence_len",
            "flash_attention",
            "xformers_attention",
            "is_llama_derived_model",
        ),
    },
    "torchtune": {
        "checkpointer.checkpoint_dir": Rule(setting="model"),
        "model.lora_rank": Rule(setting="lora.rank", translate=_count),
        "model.lora_alpha": Rule(setting="lora.alpha", translate=_positive),
        "model.lora_dropout": Rule(setting="lora.dropout", translate=_number),
        "model.lora_attn_modules": Rule(setting="lora.targets", translate=_targets),
        "tokenizer.max_seq_len": Rule(setting="seq_len", translate=_count),
        "dataset.packed": Rule(setting="packing", translate=_flag),
        "dataset.source": Rule(setting="dataset"),
        "dataset.train_on_input": Rule(setting="train_on_prompt", translate=_flag),
        "optimizer._component_": Rule(setting="optimizer.name", translate=_optimizer),
        "optimizer.lr": Rule(setting="optimizer.lr", translate=_positive),
        "optimizer.weight_decay": Rule(setting="optimizer.weight_decay", translate=_number),
        "optimizer.eps": Rule(setting="optimizer.eps", translate=_positive),
        "optimizer_in_bwd": Rule(setting="optimizer.in_backward", translate=_flag),
        "lr_scheduler._component_": Rule(setting="schedule.name", translate=_schedule),
        "lr_scheduler.num_warmup_steps": Rule(setting="schedule.warmup_steps", translate=_count),
        "loss.beta": Rule(setting="preference.beta", translate=_positive),
        "loss.label_smoothing": Rule(setting="preference.label_smoothing", translate=_number),
        "batch_size": Rule(setting="micro_batch_size", translate=_count),
        "epochs": Rule(setting="epochs", translate=_count),
        "max_steps_per_epoch": Rule(setting="max_steps", translate=_count),
        "clip_grad_norm": Rule(setting="clip_grad_norm", translate=_positive),
        "seed": Rule(setting="seed", translate=_count),
        "dtype": Rule(setting="precision", translate=_precision),
        "compile": Rule(setting="compile", translate=_flag),
        "enable_activation_checkpointing": Rule(setting="activation_checkpointing", translate=_flag),
        "run_val_every_n_steps": Rule(setting="evaluation.every_steps", translate=_count),
        "log_every_n_steps": Rule(setting="log_every", translate=_count),
        "output_dir": Rule(setting="output_dir"),
        **_rules_without_setting(
            _UNNEEDED, "device", "shuffle", "gradient_accumulation_steps", "optimizer.fused"
        ),
        **_rules_without_setting(_UNNEEDED, "loss._component_", "tokenizer._component_", "model._component_"),
        **_rules_without_setting(_UNNEEDED, "checkpointer._component_", "checkpointer.checkpoint_files"),
        **_rules_without_setting(
            _UNNEEDED, "checkpointer.output_dir", "checkpointer.model_type", "tokenizer.path"
        ),
        **_rules_without_setting(
            _UNNEEDED, "tokenizer.merges_file", "batch_size_val", "dataset_val._component_"
        ),
        **_rules_without_setting(
            _ALWAYS_WRITTEN, "log_level", "log_peak_memory_stats", "metric_logger._component_"
        ),
        **_rules_without_setting(_ALWAYS_WRITTEN, "metric_logger.log_dir", "metric_logger.filename"),
    },
}
REASONS = {  # reasons reported for keys without a counterpart
    "dataset._component_": "name the dataset in dataset",
    "trust_remote_code": "set it here only for a model that transformers has no class for",
    "special_tokens": "new_tokens adds tokens; the tokenizer's own special tokens stay",
    "loss_type": "set task: dpo, orpo, simpo or kto",
    "fsdp_config": "engine: fsdp2, and the plan shards",
    "saves_per_epoch": "set checkpoint_every, in steps",
    "evals_per_epoch": "set evaluation.every_steps",
    "plugins": "extensions of axolotl",
    "model_revision": "the main revision is used",
    "max_samples": "write a smaller dataset",
}
