"""Support of training on rows with images (setting ``vision``)."""

from __future__ import annotations

from estimator.errors import UserError
from estimator.job import Job
from estimator.models import ModelSpec

METHODS = ("full", "lora")  # with which a vision-language model is trained


def reasons(job: Job) -> list[str]:
    """Explain image tokens and the vision tower's part in memory; empty for text alone."""
    if job.vision is None:
        return []
    tower = job.model.vision
    if tower is None:
        return [
            f"vision {job.vision}: {job.model.name}'s tower is not in the memory, as the model table has no "
            "shape of it; a folder with the model's config.json has"
        ]
    tokens = tower.tokens_of(job.image_size, job.image_size)
    total = job.images_per_row * tokens
    excess = "" if total < job.seq_len else f", more than seq_len {job.seq_len:,}"
    return [
        f"vision {job.vision}: tower {tower.parameters / 1e6:,.1f} M and projector "
        f"{tower.projector_parameters / 1e6:,.1f} M parameters; an image of {job.image_size} x "
        f"{job.image_size} pixels is about {tokens:,} tokens, {job.images_per_row} in a row {total:,}{excess}"
        "; speed leaves the tower out"
    ]


def check_model(vision: str | None, model: ModelSpec) -> None:
    """Raise UserError if images are to be trained on with a model that sees none."""
    if vision is not None and not model.sees_images:
        raise UserError(
            f"--vision {vision}: {model.name} sees no images.",
            "Remove --vision, or choose a vision-language model.",
        )


def unsupported(job: Job) -> str | None:
    """Return the reason why the loop cannot train this model on images, as one clause; None if it can."""
    model = job.model
    setting = f"vision {job.vision}"
    if not model.sees_images:
        return f"{setting}: {model.name} sees no images"
    if job.task != "sft":
        return f"{setting}: only rows of task sft have images, not those of {job.task}"
    if job.method not in METHODS:
        return f"{setting}: rows with images are trained with methods {' and '.join(METHODS)}"
    mode = {"lora": "lora", "full": "full"}.get(job.vision or "")
    if mode is not None and job.method != mode:
        return f"{setting} belongs to method {mode}; with {job.method} use vision frozen"
    for name, value in (
        ("packing", job.packing),
        ("liger", job.liger),
        ("compile", job.compile),
        ("fp8", job.fp8 != "none"),
        ("new_tokens", job.new_tokens > 0),
        ("lora.modules_to_save", bool(job.trained_modules)),
        ("lora.experts", job.lora_experts),
    ):
        if value:
            return f"{name}: not supported with images (vision)"
    return None
