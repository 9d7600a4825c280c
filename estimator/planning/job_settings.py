"""Settings of a run that correspond to fields of a job, if they differ from the defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from estimator.job import Job
from estimator.models import PROJECTIONS, DiffusionSpec
from estimator.setup import LlamaAdapter
from estimator.vocabulary import ENGINES, IMAGE_TASK, METHODS


def changed_settings(job: Job) -> Iterator[tuple[str, object]]:
    """Yield the settings of a job that differ from their defaults.

    Not among them are the batch size, packing, compile and liger, which the plan contains. ``job``: with
    method and engine decided.
    """
    if isinstance(job.model, DiffusionSpec):
        yield "images.resolution", job.model.resolution
    else:
        yield "seq_len", job.seq_len
    if job.task not in ("sft", IMAGE_TASK):
        yield "task", job.task
    if job.micro_batch_size is not None:
        yield "micro_batch_size", job.micro_batch_size
    if job.precision != "auto":
        yield "precision", job.precision
    if job.optimizer != "adamw":
        yield "optimizer.name", job.optimizer
    if job.optimizer_in_backward:
        yield "optimizer.in_backward", True
    if job.activation_checkpointing is not None:
        yield "activation_checkpointing", job.activation_checkpointing
    if job.variable_length is not None:
        yield "variable_length", job.variable_length
    if job.fp8 != "none":
        yield "fp8", job.fp8
    if job.recompute is not None:
        yield "recompute.what", job.recompute
    if job.recompute_every is not None:
        yield "recompute.every", job.recompute_every
    if job.vision is not None:
        yield "vision", job.vision
    method = METHODS[job.method]
    if method.llama_adapter:
        for field in dataclasses.fields(LlamaAdapter):
            if (value := getattr(job.llama_adapter, field.name)) != field.default:
                yield f"adapter.{field.name}", value
    low_rank = method.low_rank
    if low_rank and job.lora_rank != 8:
        yield "lora.rank", job.lora_rank
    if method.quantized and job.quantization != "nf4-double":
        yield "lora.quantization", job.quantization
    targets = set(job.lora_targets)
    if low_rank and targets != set(PROJECTIONS):
        everything = targets in (set(job.model.projections), set(job.model.all_linear))
        yield "lora.targets", "all-linear" if everything else tuple(job.lora_targets)
    if low_rank and job.lora_experts:
        yield "lora.experts", True
    if method.adapters and job.adapter_only:
        yield "export.adapter_only", True
    if low_rank and job.trained_modules:
        yield "lora.modules_to_save", tuple(job.trained_modules)
    if job.zero_stage is not None:
        yield "zero.stage", job.zero_stage
    if job.fsdp_sharding is not None:
        yield "fsdp.sharding", job.fsdp_sharding
    if job.replicas is not None:
        yield "fsdp.replicas", job.replicas
    if job.offload != "none":
        yield f"{ENGINES[job.engine].sharding_options}.offload", job.offload
