"""The transformers model of a job, with what is trained of it."""

from __future__ import annotations

from typing import Any

import torch

from estimator.errors import UserError
from launchers.gang.job import TrainJob
from launchers.imports import collector_paused
from launchers.settings import Lora, Settings


def dtype_of(job: TrainJob) -> torch.dtype:
    """The type that the model computes in."""
    return torch.float32 if job.plan.layout.precision == "fp32" else torch.bfloat16


def pretrained(job: TrainJob, *, dtype: torch.dtype, **options: Any) -> Any:
    """The job's model with its weights; ``options`` are from_pretrained's."""
    with collector_paused():
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(  # imports the model's own code
            job.model_dir, dtype=dtype, **options
        )


def made_trainable(model: Any, job: TrainJob, *, adapters_in_fp32: bool = False) -> Any:
    """The model in training mode, with adapters and activation checkpointing where the job has them.

    Adapters are of the base's type, or in fp32.
    """
    if job.plan.layout.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if job.plan.method != "full":
        model = _with_adapters(model, job.settings, in_fp32=adapters_in_fp32)
    model.train()
    return model


def _with_adapters(model: Any, settings: Settings, *, in_fp32: bool) -> Any:
    from peft import LoraConfig, get_peft_model

    lora: Lora = settings.lora
    linear = {name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    targets = [name for name in lora.targets if name in linear]
    if not targets:
        raise UserError(
            f"lora.targets = {', '.join(lora.targets)}: {settings.model} has no such linear layers.",
            f"Its linear layers are {', '.join(sorted(linear))}.",
        )
    torch.manual_seed(settings.seed)
    return get_peft_model(
        model,
        LoraConfig(
            r=lora.rank,
            lora_alpha=int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=targets,
            task_type="CAUSAL_LM",
        ),
        autocast_adapter_dtype=in_fp32,  # DeepSpeed wants one type, and its optimizer keeps them in fp32
    )
