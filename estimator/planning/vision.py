"""Support of training on rows with images (setting ``vision``)."""

from __future__ import annotations

from estimator.models import ModelSpec
from estimator.planning.training import Training

METHODS = ("full", "lora")  # with which a vision-language model is trained


def unsupported(model: ModelSpec, training: Training) -> str | None:
    """Return the reason why the loop cannot train this model on images, as one clause; None if it can."""
    asked = f"vision {training.vision}"
    if not model.sees_images:
        return f"{asked}: {model.name} sees no images"
    if training.task != "sft":
        return f"{asked}: images are part of the rows of task sft alone, not of {training.task}"
    if training.method not in METHODS:
        return f"{asked}: rows with images are trained with methods {' and '.join(METHODS)}"
    needed = {"lora": "lora", "full": "full"}.get(training.vision or "")
    if needed is not None and training.method != needed:
        return f"{asked} belongs to method {needed}; with {training.method} use vision frozen"
    for name, used in (
        ("packing", training.packing),
        ("liger", training.liger),
        ("compile", training.compile),
        ("fp8", training.fp8 != "none"),
        ("new_tokens", training.new_tokens > 0),
        ("lora.modules_to_save", bool(training.trained_modules)),
        ("lora.experts", training.lora_experts),
    ):
        if used:
            return f"{name}: not supported with images (vision)"
    return None
