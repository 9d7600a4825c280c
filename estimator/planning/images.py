"""Limits of training image pipelines, each as one clause."""

from __future__ import annotations

from estimator.errors import UserError
from estimator.models import PROJECTIONS, DiffusionSpec, ModelSpec
from estimator.models.diffusion import positions_of
from estimator.models.unet import ADAPTED
from estimator.planning.training import Training
from estimator.setup import default_seq_len
from estimator.vocabulary import ENGINES, IMAGE_TASK, LAUNCHED_ENGINES, TASKS

ENGINE = next(name for name in LAUNCHED_ENGINES if IMAGE_TASK in ENGINES[name].tasks)


def task_for(model: ModelSpec, task: str) -> str:
    """The task that is meant: a pipeline that makes images learns from images, where no task is asked for."""
    return IMAGE_TASK if isinstance(model, DiffusionSpec) and task == "sft" else task


def length_of(model: ModelSpec, seq_len: int | None, resolution: int | None) -> int:
    """The sequence's length that is asked for: tokens, or an image's positions.

    Raises UserError for what is of the other kind of model.
    """
    if not isinstance(model, DiffusionSpec):
        if resolution is not None:
            raise UserError(
                f"--resolution {resolution}: {model.name} makes no images.",
                "Use --seq-len, or leave it out.",
            )
        return default_seq_len(model) if seq_len is None else seq_len
    if seq_len is not None:
        raise UserError(
            f"--seq-len {seq_len}: {model.name} makes images, which have no tokens.",
            "Use --resolution, or leave it out.",
        )
    return positions_of(model.resolution if resolution is None else resolution)


def unsupported(engine: str, model: ModelSpec, training: Training) -> str | None:
    """Return the reason why an engine cannot train an image pipeline, or a language model for images; or
    None.
    """
    if not isinstance(model, DiffusionSpec):
        return f"task {IMAGE_TASK} trains pipelines such as stable-diffusion-xl, and {model.name} is none"
    if not TASKS[training.task].images:
        return f"task {training.task} is of language models, and {model.name} makes images"
    methods = TASKS[IMAGE_TASK].methods
    if training.method not in methods:
        return f"method {training.method}: {model.name} is trained by {' or '.join(methods)} here"
    if (reason := _training(model, training)) is not None:
        return reason
    return None if engine == ENGINE else f"{model.name} is trained by {ENGINE} here"


def _training(model: ModelSpec, training: Training) -> str | None:
    if training.zero:
        return "ZeRO is DeepSpeed's"
    if training.packing:
        return "packing: an image is a row of its own"
    if training.liger:
        return f"liger: its kernels are of language models, and {model.name} makes images"
    if training.fp8 != "none":
        return f"fp8 {training.fp8}: a UNet's products were not tried in float8 here"
    if training.compile:
        return "compile: a UNet's blocks see images of several shapes, and were not tried compiled"
    if training.part_recomputed:
        return "a UNet's blocks are recomputed whole, and all of them"
    if training.new_tokens or training.trained_modules:
        what = "new_tokens" if training.new_tokens else "lora.modules_to_save"
        return f"{what}: {model.name}'s text encoders are not trained"
    if training.lora_experts:
        return f"lora.experts: {model.name} has no experts"
    if training.optimizer_in_backward:
        return f"optimizer.in_backward: {ENGINE} steps after the whole backward pass"
    if training.method == "lora" and set(training.lora_targets) not in (set(ADAPTED), set(PROJECTIONS)):
        return f"lora.targets: adapters are on {', '.join(ADAPTED)} of all of {model.name}'s attentions"
    return _optimizer(training)


def _optimizer(training: Training) -> str | None:
    name, optimizers = training.optimizer, TASKS[IMAGE_TASK].optimizers
    if name not in optimizers:
        return f"optimizer {name}: a UNet is stepped by {', '.join(optimizers)} here"
    if name == "adafactor" and training.processes > 1:
        return f"optimizer {name}: torch 2.13's squares norms in place, which weights divided by FSDP2 can't"
    return None
