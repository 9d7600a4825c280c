"""A plan as arguments of other trainers: transformers and TRL, DeepSpeed, Accelerate, Lightning.

The arguments are plain values, so none of these packages must be installed. Values that a plan does not
decide (learning rate, epochs, dataset) are left to the user.
"""

from __future__ import annotations

from typing import Any, Protocol

from estimator.errors import UserError
from estimator.vocabulary import SHARDINGS, Device, LaunchedPrecision, Offload, Sharding, product_type


class Layout(Protocol):
    """Fields of a plan's layout that other trainers are configured by."""

    @property
    def device(self) -> Device: ...

    @property
    def nodes(self) -> int: ...

    @property
    def processes_per_node(self) -> int: ...

    @property
    def sharding(self) -> Sharding: ...

    @property
    def micro_batch_size(self) -> int: ...

    @property
    def accumulation(self) -> int: ...

    @property
    def seq_len(self) -> int: ...

    @property
    def activation_checkpointing(self) -> bool: ...

    @property
    def precision(self) -> LaunchedPrecision: ...

    @property
    def optimizer(self) -> str: ...

    @property
    def offload(self) -> Offload: ...

    @property
    def world_size(self) -> int:
        """Processes of all nodes."""

    @property
    def data_parallel(self) -> int:
        """Processes that see different sequences."""


# Names of transformers.training_args.OptimizerNames in transformers 5.23
_TRANSFORMERS_OPTIMIZERS = {
    "adamw": "adamw_torch",
    "adamw8bit": "adamw_bnb_8bit",
    "paged-adamw": "paged_adamw_32bit",
    "paged-adamw8bit": "paged_adamw_8bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
}
_LIGHTNING_PRECISIONS = {
    "bf16": "bf16-true",
    "bf16-mixed": "bf16-mixed",
    "fp16-mixed": "16-mixed",
    "fp32": "32-true",
}


def to_transformers(layout: Layout, *, sft: bool = False) -> dict[str, Any]:
    """Return keyword arguments for ``transformers.TrainingArguments``, or for ``trl.SFTConfig`` with ``sft``.

    Raises UserError for an optimizer or a parallelism that transformers' Trainer does not have.
    """
    _check_data_parallel(layout, "transformers' Trainer")
    if layout.optimizer not in _TRANSFORMERS_OPTIMIZERS:
        raise UserError(
            f"transformers' Trainer does not have the plan's optimizer {layout.optimizer}.",
            f"Plan with one of {', '.join(_TRANSFORMERS_OPTIMIZERS)}.",
        )
    values: dict[str, Any] = {
        "per_device_train_batch_size": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.accumulation,
        "gradient_checkpointing": layout.activation_checkpointing,
        "bf16": product_type(layout.precision) == "bf16",
        "fp16": product_type(layout.precision) == "fp16",
        "optim": _TRANSFORMERS_OPTIMIZERS[layout.optimizer],
        "use_cpu": layout.device == "cpu",
    }
    if layout.activation_checkpointing:
        values["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    if SHARDINGS[layout.sharding].zero_stage is not None:
        values["deepspeed"] = to_deepspeed(layout)
    elif SHARDINGS[layout.sharding].fsdp:
        # With FSDP its own activation checkpointing gathers each block's weights once less
        values["gradient_checkpointing"] = False
        values.pop("gradient_checkpointing_kwargs", None)
        values["fsdp"] = True
        values["fsdp_config"] = {
            "version": 2,
            "reshard_after_forward": layout.sharding == "fsdp",
            "activation_checkpointing": layout.activation_checkpointing,
            "cpu_offload": layout.offload == "cpu",
        }
    if sft:
        values["max_length"] = layout.seq_len
    return values


def to_deepspeed(layout: Layout) -> dict[str, Any]:
    """Return a DeepSpeed configuration with the plan's ZeRO stage, offload, batch and precision.

    Raises UserError if the plan shards in a way that is no ZeRO stage.
    """
    _check_data_parallel(layout, "this configuration")
    sharding = SHARDINGS[layout.sharding]
    if sharding.zero_stage is None and sharding.divides:
        raise UserError(
            f"DeepSpeed does not have the plan's sharding {layout.sharding}.", "Plan with engine deepspeed."
        )
    zero: dict[str, Any] = {
        "stage": sharding.zero_stage or 0,
        "overlap_comm": layout.device == "cuda",
        "contiguous_gradients": True,
    }
    if zero["stage"] and layout.offload == "cpu":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": layout.device == "cuda"}
    return {
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.accumulation,
        "zero_optimization": zero,
        "bf16": {"enabled": product_type(layout.precision) == "bf16"},
        "fp16": {"enabled": product_type(layout.precision) == "fp16"},
    }


def to_accelerate(layout: Layout) -> dict[str, Any]:
    """Return keyword arguments for ``accelerate.Accelerator``.

    ``fsdp_plugin`` and ``deepspeed_plugin``, where the plan shards, hold the keyword arguments of
    ``FullyShardedDataParallelPlugin`` and ``DeepSpeedPlugin``. Raises UserError if the plan splits the model.
    """
    _check_data_parallel(layout, "Accelerate")
    values: dict[str, Any] = {
        "mixed_precision": "no" if layout.precision == "fp32" else product_type(layout.precision),
        "gradient_accumulation_steps": layout.accumulation,
        "cpu": layout.device == "cpu",
    }
    sharding = SHARDINGS[layout.sharding]
    if sharding.zero_stage is not None:
        values["deepspeed_plugin"] = {"hf_ds_config": to_deepspeed(layout)}
    elif sharding.fsdp:
        values["fsdp_plugin"] = {
            "fsdp_version": 2,
            "reshard_after_forward": layout.sharding == "fsdp",
            "activation_checkpointing": layout.activation_checkpointing,
            "cpu_offload": layout.offload == "cpu",
            "auto_wrap_policy": "transformer_based_wrap",
        }
    return values


def to_lightning(layout: Layout) -> dict[str, Any]:
    """Return keyword arguments for ``lightning.Trainer``.

    Raises UserError if the plan shards with FSDP2, for which Lightning needs a function of the model.
    """
    _check_data_parallel(layout, "Lightning")
    sharding = SHARDINGS[layout.sharding]
    if sharding.fsdp:
        raise UserError(
            "The plan shards with FSDP2, for which Lightning needs a function of the model.",
            "Plan with engine deepspeed.",
        )
    strategy = "auto" if layout.world_size == 1 else "ddp"
    if sharding.zero_stage:
        strategy = f"deepspeed_stage_{sharding.zero_stage}" + ("_offload" if layout.offload == "cpu" else "")
    return {
        "accelerator": "gpu" if layout.device == "cuda" else "cpu",
        "devices": layout.processes_per_node,
        "num_nodes": layout.nodes,
        "precision": _LIGHTNING_PRECISIONS[layout.precision],
        "accumulate_grad_batches": layout.accumulation,
        "strategy": strategy,
    }


def _check_data_parallel(layout: Layout, trainer: str) -> None:
    if layout.data_parallel != layout.world_size:
        raise UserError(
            f"{trainer} supports data parallelism only; the plan splits the model over processes.",
            "Plan with a tensor, context and pipeline parallelism of 1.",
        )
