"""What of a run is its own where images are learnt: settings, learning rates, checks, and laying out data."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from estimator.errors import Change, UserError
from estimator.models import DiffusionSpec, ModelSpec
from estimator.models.diffusion import TINY, positions_of
from estimator.planning.images import task_for
from estimator.vocabulary import IMAGE_TASK, LAUNCHED_METHODS, TASKS
from launchers import clip_score
from launchers.dataset import mixture, sources
from launchers.dataset.picture import Picture
from launchers.dataset.preferences import Sample
from launchers.dataset.prepared import PreparedInfo
from launchers.settings import Settings

PACKAGES = ("diffusers", "PIL")
LEAST_SIDE = 2  # by so much a side may be shorter than the resolution: such an image is enlarged
# examples/text_to_image/README_sdxl.md of diffusers 0.42.1, for all weights and for LoRA
_RATES = {"full": 1e-6, "lora": 1e-4}
_TINY_RATES = {"full": 1e-3, "lora": 1e-2}  # from random weights


def apply_defaults(settings: Settings, spec: DiffusionSpec) -> Settings:
    """Fill in task, dataset and resolution of a run on images.

    Raises UserError for a resolution that can't be, and for options of language models.
    """
    task = task_for(spec, settings.task)
    if task != IMAGE_TASK:
        return settings  # the engine says why it can't
    side = settings.images.resolution or spec.resolution
    if settings.seq_len not in (None, positions_of(side)):
        raise UserError(
            (Change("seq_len", settings.seq_len), f": {spec.name} makes images, which have no tokens."),
            ("Use ", Change("images.resolution", side), ", or leave it out."),
        )
    images = settings.images.model_copy(update={"resolution": side})
    changes: dict[str, object] = {"task": task, "images": images}
    if settings.images.text_encoders and settings.method == "auto":
        changes["method"] = "lora"
    if settings.dataset == sources.DEFAULT:
        changes["dataset"] = sources.IMAGES_BUILT_IN
    return settings.model_copy(update=changes)


def rates(spec: ModelSpec) -> dict[str, float]:
    """Learning rates by method, where none is asked for."""
    known = _TINY_RATES if spec.name == TINY else _RATES
    return dict.fromkeys(LAUNCHED_METHODS, known["lora"]) | known  # a method that can't be is refused later


def check(settings: Settings) -> None:
    """Raise UserError where packages are missing, or for what isn't done with images."""
    if not TASKS[settings.task].images:
        return
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"Models that make images need {' and '.join(missing)}, which is not installed.",
            "pip install 'metaflow-finetune[diffusion]', with Python 3.11 or newer.",
        )
    if settings.images.text_encoders and settings.method != "lora":
        raise UserError(
            (Change("images.text_encoders", True), f": with {settings.method} the UNet alone is trained."),
            ("Use ", Change("method", "lora"), ", or leave it out."),
        )
    if settings.images.clip_model is not None:
        clip_score.check(settings.images.clip_model)
    if settings.harness.tasks:
        raise UserError((Change("harness.tasks"), ": its tasks are of language models."), "Leave it out.")


def least_side(settings: Settings) -> int:
    """Pixels that an image's shorter side has at least: half of the resolution's."""
    return settings.images.side // LEAST_SIDE


def prepare(
    samples: Sequence[Sample],
    held_out: Sequence[Sample] | None,
    settings: Settings,
    folder: Path,
) -> PreparedInfo:
    """Lay out images in ``folder``, once for all ranks, and say in which buckets they are.

    ``held_out``: images of the user's own; None: some of the others are held out.
    """
    from launchers.dataset.prepare import split
    from launchers.images import prepare as images

    train, drawn = split(samples, settings)
    if settings.mixture:
        train = mixture.weighted(train, settings)
        print(mixture.summary(train, settings))
    info = images.prepare(
        cast("Sequence[Picture]", train),
        folder,
        settings=settings,
        model_name_or_fingerprint=settings.model,
        resolution=settings.images.side,
        held_out=cast("Sequence[Picture]", held_out or drawn),
    )
    print(images.summary(info, folder, " + ".join(mixture.names(settings))), flush=True)
    return info
