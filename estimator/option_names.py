"""Names of settings as command-line options, and names that other tools give to the same settings.

``finetune``, the flows and ``python -m launchers`` accept the same options. Messages name options literally
(``--lora-rank 8``); they use :func:`option_name` only where the setting is a variable.
"""

from __future__ import annotations

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
    "replicas": "--fsdp-replicas",
    "recompute": "--recompute-what",
    "trained_modules": "--modules-to-save",
}
"""Options with another name than their setting, or their field of a Job."""


def option_name(setting: str) -> str:
    """Return the command-line option of a setting: ``--lora-rank`` for ``lora.rank``."""
    name = setting.removeprefix("resources.").replace(".", "-").replace("_", "-")
    return SHORT_OPTIONS.get(setting, f"--{name}")


def option_arguments(setting: str, value: object) -> tuple[str, ...]:
    """Return the command-line words that give a setting this value; ``--no-NAME`` for False."""
    name = option_name(setting)
    if isinstance(value, bool):
        return (name if value else f"--no-{name[2:]}",)
    return name, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


ALIASES = {
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
"""Names of settings in other fine-tuning tools, with the setting here."""


def setting_for_alias(name: str) -> str | None:
    """Return the setting that other tools call ``name`` (``--batch-size``, ``batch_size``), or None."""
    return ALIASES.get(name.removeprefix("--").replace("-", "_"))
