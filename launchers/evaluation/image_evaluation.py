"""Evaluation of diffusion models on held-out images, before and after training: noise error and samples.

The error is measured at four time steps of each image, the middles of the quarters from little to much noise,
with the same noise for both models. Errors are not weighted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launchers.base.imports import collector_paused
from launchers.evaluation.held_out import Score
from launchers.images import clip_score, drawing
from launchers.precompute.latents import Encoders, Latent

if TYPE_CHECKING:
    import torch

    from launchers.images.prepared import PreparedImages

CLIP_SCORE = "CLIP score"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pictures:
    """Images that both models generate from a held-out caption with the same seed: PNG files in base64."""

    prompt: str
    base: str
    finetuned: str


def measure(
    base_dir: Path,
    model_dir: Path,
    data: PreparedImages | None,
    *,
    rows: int,
    captions: int,
    device: str,
    clip_model: str | None = None,
    on_stage: Callable[[str], Any] = lambda _: None,
) -> tuple[Score | None, Score | None, tuple[Pictures, ...]]:
    """Score both models on the first ``rows`` held-out images, and generate images of ``held_out`` captions.

    ``model_dir`` is a complete pipeline, or a folder of LoRA weights for the base's. Without ``data`` the
    scores are None. ``on_stage`` receives the name of the model that is measured next. With ``clip_model``
    the metrics contain "CLIP score" (clip_score.py).
    """
    if data is None:
        return None, None, ()
    count = min(rows, len(data))
    encoders = Encoders(base_dir, device)
    tensors = encoders.encode(data, range(count))
    prompts = [data.caption(row) for row in range(min(captions, count))]
    scores, generated = [], []
    for name, folder in (("the base model", base_dir), ("the finished model", model_dir)):
        on_stage(name)
        pipeline = _load(folder, base_dir, device)
        if folder == model_dir:  # its text encoders may be trained too
            encoders.replace_text_encoders(pipeline.text_encoder, pipeline.text_encoder_2)
            tensors |= encoders.encode_texts(data, range(count))
        score = _score(pipeline, data, tensors, count)
        images = [
            _generate_image(pipeline, prompt, row, data.target(row)) for row, prompt in enumerate(prompts)
        ]
        if clip_model is not None and images:
            score.metrics[CLIP_SCORE] = clip_score.score(clip_model, images, prompts, device)
        scores.append(score)
        generated.append([drawing.encoded(image) for image in images])
    pictures = tuple(
        Pictures(prompt=prompt, base=base_picture, finetuned=finetuned_picture)
        for prompt, base_picture, finetuned_picture in zip(prompts, *generated, strict=True)
    )
    return scores[0], scores[1], pictures


def _load(folder: Path, base: Path, device: str) -> Any:
    """Load a folder's pipeline as a user would, in bf16 on GPUs and fp32 on CPUs."""
    with collector_paused():
        import torch
        from diffusers import StableDiffusionXLPipeline

    is_pipeline = (folder / "model_index.json").is_file()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    pipeline = StableDiffusionXLPipeline.from_pretrained(folder if is_pipeline else base, torch_dtype=dtype)
    if not is_pipeline:
        pipeline.load_lora_weights(folder, weight_name="pytorch_lora_weights.safetensors")
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(device)


def _score(pipeline: Any, data: PreparedImages, encoded: dict[str, torch.Tensor], count: int) -> Score:
    """Return the mean squared errors at four noise levels, and their mean."""
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


def _generate_image(pipeline: Any, prompt: str, seed: int, size: tuple[int, int]) -> Any:
    """Generate the image (PIL) of a caption from a seed. ``size``: height and width."""
    import torch

    height, width = size
    return pipeline(
        prompt,
        height=height,
        width=width,
        num_inference_steps=drawing.INFERENCE_STEPS,
        generator=torch.Generator().manual_seed(seed),
    ).images[0]
