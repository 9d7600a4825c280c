"""The transformers model of a job, with what is trained of it."""

from __future__ import annotations

from typing import Any

import torch

from estimator.errors import UserError
from estimator.models import LATENT_PROJECTIONS, PROJECTIONS
from estimator.models.architectures import own_names
from launchers.engines.loop import quantised
from launchers.engines.loop.families import blocks
from launchers.engines.loop.recompute import recompute
from launchers.gang.job import TrainJob
from launchers.imports import collector_paused
from launchers.models import causal
from launchers.settings import Settings


def dtype_of(job: TrainJob) -> torch.dtype:
    """The type that the model computes in."""
    return torch.float32 if job.plan.layout.precision == "fp32" else torch.bfloat16


def pretrained(job: TrainJob, *, dtype: torch.dtype, device: torch.device, **options: Any) -> Any:
    """The job's model with its weights; ``options`` are from_pretrained's.

    A base that is to be quantised is so on ``device``, a matrix at a time, wherever the model is put.
    """
    if kind := quantised.kind_of(job):
        with collector_paused():
            from launchers.engines.loop.quantised_loading import LoopQuantization

        options["quantization_config"] = LoopQuantization(kind, device)
    return causal.load(job.model_dir, dtype=dtype, **options)


def made_trainable(model: Any, job: TrainJob, *, adapters_in_fp32: bool = False) -> Any:
    """The model in training mode, with adapters and activation checkpointing where the job has them.

    Adapters are of the base's type, or in fp32.
    """
    if job.plan.method != "full":
        model = _with_adapters(model, job, in_fp32=adapters_in_fp32)
    recompute(blocks(model), job)
    model.train()
    return model


def _with_adapters(model: Any, job: TrainJob, *, in_fp32: bool) -> Any:
    from peft import LoraConfig, get_peft_model

    settings, lora = job.settings, job.settings.lora
    torch.manual_seed(settings.seed)
    adapted = get_peft_model(
        model,
        LoraConfig(
            r=lora.rank,
            lora_alpha=int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=adapted_layers(model, settings),
            use_rslora=lora.rslora,
            use_dora=job.plan.method == "dora",
            task_type="CAUSAL_LM",
        ),
        autocast_adapter_dtype=in_fp32,  # DeepSpeed wants one type, and its optimizer keeps them in fp32
    )
    for parameter in adapted.parameters():
        if parameter.requires_grad:  # PEFT leaves those on the meta device in fp32
            parameter.data = parameter.data.to(torch.float32 if in_fp32 else dtype_of(job))
    return adapted


def adapted_layers(model: Any, settings: Settings) -> list[str]:
    """What ``lora.targets`` is called in this model: families have names of their own, and join matrices.

    Routers, heads and experts are never among them: PEFT's own "all-linear" takes Llama 4's routers too,
    which then fail, as their class is a linear layer that returns more than its product.
    """
    targets = settings.lora.targets
    linear = {name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    generic = (*PROJECTIONS, *LATENT_PROJECTIONS) if settings.lora.all_linear else targets
    found = [name for name in own_names(model.config.get_text_config().model_type, generic) if name in linear]
    if not found:
        wanted = targets if isinstance(targets, str) else ", ".join(targets)
        raise UserError(
            f"lora.targets = {wanted}: {settings.model} has no such linear layers.",
            f"Its linear layers are {', '.join(sorted(linear))}.",
        )
    return found
