"""Image runs (task text-to-image): defaults, learning rates, checks, and data preparation."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from estimator.engines.images import task_for
from estimator.errors import UserError
from estimator.models import DiffusionSpec, ModelSpec
from estimator.models.diffusion import TINY, check_resolution
from estimator.terminal import print
from estimator.vocabulary import IMAGE_TASK, LAUNCHED_METHODS, TASKS
from launchers.dataset import mixture, sources
from launchers.dataset.picture import Picture
from launchers.dataset.preferences import Sample
from launchers.dataset.prepared import PreparedInfo
from launchers.images import clip_score
from launchers.settings import Settings

PACKAGES = ("diffusers", "PIL")
MAX_ENLARGEMENT = 2  # largest factor by which a small image is scaled up to the resolution
# examples/text_to_image/README_sdxl.md in diffusers 0.42.1, for full fine-tuning and for LoRA
_RATES = {"full": 1e-6, "lora": 1e-4}
_TINY_RATES = {"full": 1e-3, "lora": 1e-2}  # from random weights


def apply_defaults(settings: Settings, spec: DiffusionSpec) -> Settings:
    """Fill in task, dataset and resolution of a run on images.

    Raises UserError for an invalid resolution, and for options of language models.
    """
    task = task_for(spec, settings.task)
    if task != IMAGE_TASK:
        return settings  # rejected later, with the engine's reason
    side = settings.images.resolution or spec.resolution
    check_resolution(side)
    if settings.seq_len not in (None, spec.max_seq_len):
        raise UserError(
            f"--seq-len {settings.seq_len}: {spec.name} generates images, which have no tokens.",
            f"Use --resolution {side}, or remove it.",
        )
    images = settings.images.model_copy(update={"resolution": side})
    changes: dict[str, object] = {"task": task, "images": images}
    if settings.images.text_encoders and settings.method == "auto":
        changes["method"] = "lora"
    if settings.dataset == sources.DEFAULT:
        changes["dataset"] = sources.IMAGES_BUILT_IN
    return settings.model_copy(update=changes)


def rates(spec: ModelSpec) -> dict[str, float]:
    """Return the default learning rates by method."""
    supported = _TINY_RATES if spec.name == TINY else _RATES
    return dict.fromkeys(LAUNCHED_METHODS, supported["lora"]) | supported  # other methods are rejected later


def check(settings: Settings) -> None:
    """Raise UserError for missing packages and for options that images do not support."""
    if not TASKS[settings.task].images:
        return
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"Image models need {' and '.join(missing)}, which is not installed.",
            "pip install 'metaflow-finetune[diffusion]', with Python 3.11 or newer.",
        )
    if settings.images.text_encoders and settings.method != "lora":
        raise UserError(
            f"--images-text-encoders: method {settings.method} trains only the UNet.",
            "Use --method lora, or remove it.",
        )
    if settings.images.clip_model is not None:
        clip_score.check(settings.images.clip_model)
    if settings.harness.tasks:
        raise UserError("--eval-harness: supports only language models.", "Remove it.")


def min_side(settings: Settings) -> int:
    """Return the minimum pixels of an image's shorter side: half of the resolution."""
    return settings.images.side // MAX_ENLARGEMENT


def prepare(
    samples: Sequence[Sample],
    held_out: Sequence[Sample] | None,
    settings: Settings,
    folder: Path,
) -> PreparedInfo:
    """Write the prepared images into ``folder``, once for all ranks, and print their buckets.

    ``held_out``: images of a separate held-out dataset; None: hold out a part of ``samples``.
    """
    from launchers.dataset.prepare import split
    from launchers.images import prepare as images

    train, split_off = split(samples, settings)
    if settings.mixture:
        train = mixture.weighted(train, settings)
        print(mixture.summary(train, settings))
    info = images.prepare(
        cast("Sequence[Picture]", train),
        folder,
        settings=settings,
        model_name_or_fingerprint=settings.model,
        resolution=settings.images.side,
        held_out=cast("Sequence[Picture]", held_out or split_off),
    )
    print(images.summary(info, folder, " + ".join(mixture.names(settings))), flush=True)
    return info
