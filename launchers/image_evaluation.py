"""How well a pipeline finds noise on held-out images, and what it makes of their captions, before and after.

The error is measured at four time steps of each image, with the same noise for both models: the middles of
the quarters from little noise to much. Nothing is weighed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launchers import clip_score, drawing
from launchers.held_out import Score
from launchers.imports import collector_paused
from launchers.latents import Encoders, Latent

if TYPE_CHECKING:
    import torch

    from launchers.images.prepared import PreparedImages

CLIP_SCORE = "CLIP score"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pictures:
    """What both models make of a held-out caption, from the same seed: PNG files in base64."""

    prompt: str
    base: str
    finetuned: str


def measure(
    base_dir: Path,
    model_dir: Path,
    data: PreparedImages | None,
    *,
    rows: int,
    drawn: int,
    device: str,
    clip_model: str | None = None,
    on_stage: Callable[[str], Any] = lambda _: None,
) -> tuple[Score | None, Score | None, tuple[Pictures, ...]]:
    """Both models' scores on the first ``rows`` held-out images, and pictures of ``drawn`` captions.

    ``model_dir`` is a whole pipeline, or a folder of LoRA for the base's. Without ``data`` nothing is known.
    ``on_stage`` is told which model comes next. With ``clip_model`` a score has "CLIP score" (clip_score.py).
    """
    if data is None:
        return None, None, ()
    count = min(rows, len(data))
    encoders = Encoders(base_dir, device)
    encoded = encoders.encode(data, range(count))
    prompts = [data.caption(row) for row in range(min(drawn, count))]
    scores, drawings = [], []
    for name, folder in (("the base model", base_dir), ("the finished model", model_dir)):
        on_stage(name)
        pipeline = _load(folder, base_dir, device)
        if folder == model_dir:  # whose text encoders may be trained, too
            encoders.use(pipeline.text_encoder, pipeline.text_encoder_2)
            encoded |= encoders.encode_texts(data, range(count))
        score = _score(pipeline, data, encoded, count)
        images = [_draw(pipeline, prompt, row, data.target(row)) for row, prompt in enumerate(prompts)]
        if clip_model is not None and images:
            score.metrics[CLIP_SCORE] = clip_score.score(clip_model, images, prompts, device)
        scores.append(score)
        drawings.append([drawing.encoded(image) for image in images])
    pictures = tuple(
        Pictures(prompt=prompt, base=before, finetuned=after)
        for prompt, before, after in zip(prompts, *drawings, strict=True)
    )
    return scores[0], scores[1], pictures


def _load(folder: Path, base: Path, device: str) -> Any:
    """The pipeline of a folder, in bf16 on GPUs and fp32 on CPUs, as a user would load it."""
    with collector_paused():
        import torch
        from diffusers import StableDiffusionXLPipeline

    whole = (folder / "model_index.json").is_file()
    kind = torch.bfloat16 if device == "cuda" else torch.float32
    pipeline = StableDiffusionXLPipeline.from_pretrained(folder if whole else base, torch_dtype=kind)
    if not whole:
        pipeline.load_lora_weights(folder, weight_name="pytorch_lora_weights.safetensors")
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(device)


def _score(pipeline: Any, data: PreparedImages, encoded: dict[str, torch.Tensor], count: int) -> Score:
    """The mean squared errors at four levels of noise, and their mean."""
    import torch

    from launchers.engines.loop.images import QUARTERS, NoiseSchedule, noise_errors, noisy_quarters

    schedule, scale = NoiseSchedule(dict(pipeline.scheduler.config)), pipeline.vae.config.scaling_factor
    summed = torch.zeros(len(QUARTERS), dtype=torch.float64)
    with torch.inference_mode():
        for row in range(count):
            latent = Latent.of(encoded.__getitem__, row)
            batch = noisy_quarters(latent, data.time_ids(row), row, schedule, scale)
            summed += noise_errors(pipeline.unet, batch.to(pipeline.unet.device), schedule).double().cpu()
    means = (summed / count).tolist()
    metrics = dict(zip(QUARTERS, means, strict=True))
    return Score(loss=sum(means) / len(means), labels=0, rows=count, metrics=metrics)


def _draw(pipeline: Any, prompt: str, seed: int, size: tuple[int, int]) -> Any:
    """The picture of a caption, from a seed, as PIL has it. ``size``: height and width."""
    import torch

    height, width = size
    return pipeline(
        prompt,
        height=height,
        width=width,
        num_inference_steps=drawing.INFERENCE_STEPS,
        generator=torch.Generator().manual_seed(seed),
    ).images[0]
