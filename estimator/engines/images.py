"""Limits of training image pipelines, each as one clause."""

from __future__ import annotations

from dataclasses import replace

from estimator.errors import UserError
from estimator.job import Job
from estimator.models import PROJECTIONS, DiffusionSpec, ModelSpec
from estimator.models.diffusion import check_resolution
from estimator.models.unet import ADAPTED
from estimator.setup import default_seq_len
from estimator.vocabulary import ENGINES, IMAGE_TASK, LAUNCHED_ENGINES, TASKS

ENGINE = next(name for name in LAUNCHED_ENGINES if IMAGE_TASK in ENGINES[name].tasks)


def task_for(model: ModelSpec, task: str) -> str:
    """Return the image task for an image pipeline with the default task, otherwise ``task`` unchanged.

    Raises UserError for a task of the other kind of model.
    """
    if isinstance(model, DiffusionSpec):
        if task != "sft" and task in TASKS and not TASKS[task].images:
            raise UserError(f"--task {task}: {model.name} generates images.", "Remove --task.")
        return IMAGE_TASK if task == "sft" else task
    if task == IMAGE_TASK:
        raise UserError(
            f"--task {task}: {model.name} does not generate images.",
            "Choose an image pipeline such as stable-diffusion-xl, or another task.",
        )
    return task


def trained_model(
    model: ModelSpec, resolution: int | None, *, average: bool = False, encoders: bool = False
) -> ModelSpec:
    """Return the model changed by options of image training, or unchanged without any.

    ``average``: with a moving average of its weights; ``encoders``: with VAE and text encoders in memory.
    Raises UserError for a language model with such an option, and for an invalid resolution.
    """
    if isinstance(model, DiffusionSpec):
        side = model.resolution if resolution is None else resolution
        check_resolution(side)
        return replace(model, resolution=side, keeps_average=average, loads_encoders=encoders)
    options = {f"--resolution {resolution}": resolution is not None, "--ema": average, "--encoders": encoders}
    if image_options := [name for name, is_given in options.items() if is_given]:
        raise UserError(f"{image_options[0]}: {model.name} does not generate images.", "Remove it.")
    return model


def length_of(model: ModelSpec, seq_len: int | None) -> int:
    """Return the sequence length in tokens. Raises UserError if ``seq_len`` is set for an image pipeline."""
    if seq_len is None:
        return default_seq_len(model)
    if isinstance(model, DiffusionSpec):
        raise UserError(
            f"--seq-len {seq_len}: {model.name} generates images, which have no tokens.",
            "Use --resolution, or remove it.",
        )
    return seq_len


def unsupported(engine: str, job: Job, processes: int) -> str | None:
    """Return the reason why an engine cannot train a model on images, or an image pipeline, or None."""
    model = job.model
    if not isinstance(model, DiffusionSpec):
        return f"task {IMAGE_TASK} trains pipelines such as stable-diffusion-xl, not {model.name}"
    if not TASKS[job.task].images:
        return f"task {job.task} is for language models, and {model.name} generates images"
    methods = TASKS[IMAGE_TASK].methods
    if job.method not in methods:
        return f"method {job.method}: {model.name} supports {' or '.join(methods)} here"
    if (reason := _training(engine, job, processes)) is not None:
        return reason
    return None if engine == ENGINE else f"{model.name} is trained by {ENGINE} here"


def _training(engine: str, job: Job, processes: int) -> str | None:
    model = job.model
    if job.has_zero_options(engine):
        return "ZeRO needs engine deepspeed"
    if job.packing:
        return "packing: images are not packed"
    if job.liger:
        return f"liger: its kernels are for language models, and {model.name} generates images"
    if job.fp8 != "none":
        return f"fp8 {job.fp8}: float8 is not tested with a UNet"
    if job.compile:
        return "compile: a UNet has images of several shapes, and is not tested compiled"
    if job.recomputes_parts:
        return "activation checkpointing of a UNet recomputes complete blocks, and all of them"
    if job.new_tokens or job.trained_modules:
        setting = "new_tokens" if job.new_tokens else "lora.modules_to_save"
        return f"{setting}: {model.name}'s text encoders are not trained"
    if job.lora_experts:
        return f"lora.experts: {model.name} has no experts"
    if job.optimizer_in_backward:
        return f"optimizer.in_backward: {ENGINE} applies the optimizer after the backward pass"
    if job.method == "lora" and set(job.lora_targets) not in (set(ADAPTED), set(PROJECTIONS)):
        return f"lora.targets: {model.name} supports adapters on {', '.join(ADAPTED)} of all attention layers"
    return _optimizer(job, processes)


def _optimizer(job: Job, processes: int) -> str | None:
    name, optimizers = job.optimizer, TASKS[IMAGE_TASK].optimizers
    if name not in optimizers:
        return f"optimizer {name}: a UNet supports {', '.join(optimizers)} here"
    if name == "adafactor" and processes > 1:
        return f"optimizer {name}: torch 2.13's in-place norms do not support weights sharded by FSDP2"
    return None
