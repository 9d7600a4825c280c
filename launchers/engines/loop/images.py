"""Text to image: the mean squared error of the noise that a UNet predicts from noisy latents.

An image's random values (its latent, the noise, the time step, whether its caption is dropped) depend only on
the seed and on the image's position in the order of the run. So a run that resumes from a checkpoint draws
the same values, with any number of processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from estimator.plan import Layout
from launchers.dataset.batches import copy_to_device, step_rows
from launchers.dataset.prepared import Prepared
from launchers.dataset.seeding import random_stream
from launchers.engines.loop.outcome import Outcome, StepCounts
from launchers.engines.loop.sharding import Answering
from launchers.engines.loop.unet import has_texts
from launchers.images.prepared import PreparedImages
from launchers.precompute.latents import Latent, Latents
from launchers.settings import Settings

# Metrics by quarter of the time steps: the unweighted mean squared error
QUARTERS = ("loss at least noise", "loss at less noise", "loss at more noise", "loss at most noise")


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentBatch:
    """Images of one size, along the first dimension of each tensor."""

    clean: torch.Tensor  # latents without noise, scaled for the UNet: [images, 4, height / 8, width / 8]
    noise: torch.Tensor  # of the same shape
    steps: torch.Tensor  # int64 [images]: time steps, 0 to 999
    text: torch.Tensor  # embeddings [images, 77, width], zeros where the caption is dropped
    summary: torch.Tensor  # pooled embeddings [images, width], zeros there, too
    captions: torch.Tensor  # int64 [images, 2, 77]: tokens, for text encoders that are trained
    kept: torch.Tensor  # [images]: 0 where the caption is dropped, 1 elsewhere
    time_ids: torch.Tensor  # [images, 6]: original size, crop, target size

    @property
    def tokens(self) -> int:
        """Number of positions of all latents."""
        return self.clean.shape[0] * self.clean.shape[2] * self.clean.shape[3]

    def split(self) -> list[LatentBatch]:
        """Return each image as a separate batch."""
        indices = range(self.clean.shape[0])
        names = [field.name for field in dataclasses.fields(self)]
        return [LatentBatch(**{name: getattr(self, name)[i : i + 1] for name in names}) for i in indices]

    def to(self, device: torch.device) -> LatentBatch:
        """Copy to ``device``, as MicroBatch does."""
        tensors = {
            field.name: copy_to_device(getattr(self, field.name), device)
            for field in dataclasses.fields(self)
        }
        return LatentBatch(**tensors)


class TextToImage:
    """Task of training on images; ``latents``: folder written by launchers/precompute/latents.py."""

    metrics: ClassVar[tuple[str, ...]] = QUARTERS

    def __init__(self, settings: Settings, latents: Path) -> None:
        self._settings, self._seed = settings.images, settings.seed
        self._latents = Latents(latents)
        self.noise = NoiseSchedule(self._latents.noise["scheduler"])

    def check(self, model: Answering, data: Prepared, /) -> None:
        """Raise ValueError if the texts' width differs from the UNet's."""
        unet_width, text_width = model.module.config.cross_attention_dim, self._latents.row(0).text.shape[-1]
        if unet_width != text_width:
            raise ValueError(
                f"the UNet takes texts of width {unet_width}, and the encoders give {text_width}"
            )
        if len(data) == 0:
            raise ValueError("there is no image to train on")

    def begin(self, *_: object) -> None:
        """Do nothing: micro batches are independent."""

    def counts(self, _data: Prepared, step: int, global_batch_size: int) -> StepCounts:
        positions = range(step * global_batch_size, (step + 1) * global_batch_size)
        steps = torch.stack([self._generator(position)[1] for position in positions])
        quarters = torch.bincount(self._quarters(steps), minlength=len(QUARTERS)).tolist()
        return StepCounts(divisor=global_batch_size, quarters=tuple(quarters))

    def batches(self, data: Prepared, layout: Layout, step: int, rank: int) -> Iterator[LatentBatch]:
        """Iterate over a rank's micro batches of a step; images go round-robin to the ranks."""
        pictures = PreparedImages(data.folder)
        rows = step_rows(data, step, layout.global_batch_size)
        rank_rows = range(rank, len(rows), layout.data_parallel)
        for first in range(0, len(rank_rows), layout.micro_batch_size):
            positions = rank_rows[first : first + layout.micro_batch_size]
            yield _concatenate(
                [
                    self._draw(pictures, int(rows[position]), step * layout.global_batch_size + position)
                    for position in positions
                ]
            )

    def outcome(self, model: Answering, batch: LatentBatch, counts: StepCounts, /) -> Outcome:
        errors = noise_errors(model.module, batch, self.noise)
        gamma = self._settings.min_snr_gamma
        weighted = errors if gamma is None else errors * self.noise.weights(batch.steps, gamma)
        quarters, detached = self._quarters(batch.steps), errors.detach()
        # A quarter's mean is over its own images, but the caller divides by the number of all images:
        # rescale. A quarter without an image in the step has no mean: NaN.
        metrics = {
            name: torch.where(quarters == number, detached, 0).sum()
            * (counts.divisor / count if count else float("nan"))
            for number, (name, count) in enumerate(zip(QUARTERS, counts.quarters, strict=True))
        }
        return Outcome(loss=weighted.sum(), metrics=metrics)

    def _quarters(self, steps: torch.Tensor) -> torch.Tensor:
        """Return [images]: index in QUARTERS of each time step."""
        return steps * len(QUARTERS) // self.noise.count

    def _draw(self, pictures: PreparedImages, row: int, position: int) -> LatentBatch:
        """Draw the random values of one image for its position in the run's order."""
        latent = self._latents.row(row)
        generator, step = self._generator(position)
        shape = latent.mean.shape
        clean = latent.mean + latent.std * torch.randn(shape, generator=generator)
        noise = torch.randn(shape, generator=generator)
        if self._settings.noise_offset:
            noise += self._settings.noise_offset * torch.randn((shape[0], 1, 1), generator=generator)
        keep_prompt = float(torch.rand(1, generator=generator) >= self._settings.prompt_dropout)
        return LatentBatch(
            clean=(clean * self._latents.noise["scaling_factor"])[None],
            noise=noise[None],
            steps=step[None],
            text=(latent.text.float() * keep_prompt)[None],
            summary=(latent.summary.float() * keep_prompt)[None],
            captions=latent.tokens[None],
            kept=torch.tensor([keep_prompt]),
            time_ids=torch.tensor(pictures.time_ids(row), dtype=torch.float32)[None],
        )

    def _generator(self, position: int) -> tuple[torch.Generator, torch.Tensor]:
        """Return the generator for a position in the order of the run, and the time step, its first draw."""
        generator = torch.Generator()
        generator.manual_seed(int(random_stream(self._seed, "noise", position).integers(2**63)))
        return generator, torch.randint(0, self.noise.count, (), generator=generator)


def noise_errors(unet: Any, batch: LatentBatch, schedule: NoiseSchedule) -> torch.Tensor:
    """Return [images]: each image's mean squared error of the noise, or of the velocity."""
    kind = unet.dtype if unet.dtype.is_floating_point else torch.float32
    noisy, time_ids = schedule.add(batch.clean, batch.noise, batch.steps).to(kind), batch.time_ids.to(kind)
    conditions: dict[str, Any]
    if has_texts(unet):
        conditions = {"tokens": batch.captions, "kept": batch.kept, "time_ids": time_ids}
    else:
        added_cond_kwargs = {"text_embeds": batch.summary.to(kind), "time_ids": time_ids}
        conditions = {"encoder_hidden_states": batch.text.to(kind), "added_cond_kwargs": added_cond_kwargs}
    prediction = unet(noisy, batch.steps, **conditions).sample.float()
    target = schedule.target(batch.clean, batch.noise, batch.steps)
    errors: torch.Tensor = (prediction - target).square().mean(dim=(1, 2, 3))
    return errors


def noisy_quarters(
    latent: Latent, time_ids: NDArray[np.int32], row: int, schedule: NoiseSchedule, scaling_factor: float
) -> LatentBatch:
    """Return a held-out image four times: at the middle time step of each of QUARTERS, with the same noise.

    The noise depends only on ``row``, so that models can be compared.
    """
    count = len(QUARTERS)
    generator = torch.Generator()
    generator.manual_seed(int(random_stream(0, "held-out noise", row).integers(2**63)))
    noise = torch.randn(latent.mean.shape, generator=generator)
    sample = LatentBatch(
        clean=(latent.mean * scaling_factor)[None],
        noise=noise[None],
        steps=torch.zeros(1, dtype=torch.int64),
        text=latent.text.float()[None],
        summary=latent.summary.float()[None],
        captions=latent.tokens[None],
        kept=torch.ones(1),
        time_ids=torch.tensor(time_ids, dtype=torch.float32)[None],
    )
    steps = (torch.arange(count) * 2 + 1) * schedule.count // (2 * count)
    return dataclasses.replace(_concatenate([sample] * count), steps=steps)


def _concatenate(images: list[LatentBatch]) -> LatentBatch:
    names = [field.name for field in dataclasses.fields(LatentBatch)]
    return LatentBatch(**{name: torch.cat([getattr(image, name) for image in images]) for name in names})


class NoiseSchedule:
    """DDPM's noise schedule with the betas of the pipeline's scheduler."""

    def __init__(self, scheduler: dict[str, Any]) -> None:
        from diffusers import DDPMScheduler

        noise_scheduler = DDPMScheduler.from_config(scheduler)
        self.count: int = noise_scheduler.config.num_train_timesteps
        self.prediction: str = noise_scheduler.config.prediction_type
        if self.prediction not in ("epsilon", "v_prediction"):
            raise ValueError(f"prediction_type {self.prediction} is not trained here")
        # [time steps], fp32: share of the signal in the total power
        self._alphas_cumprod: torch.Tensor = noise_scheduler.alphas_cumprod

    def add(self, clean: torch.Tensor, noise: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """Return the noisy latents: Ho et al. 2020 (arXiv:2006.11239), equation 4."""
        signal_amplitude, noise_amplitude = self._amplitudes(steps)
        return signal_amplitude * clean + noise_amplitude * noise

    def target(self, clean: torch.Tensor, noise: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """Return the UNet's target: the noise, or the velocity (Salimans and Ho 2022, arXiv:2202.00512)."""
        if self.prediction == "epsilon":
            return noise
        signal_amplitude, noise_amplitude = self._amplitudes(steps)
        return signal_amplitude * noise - noise_amplitude * clean

    def weights(self, steps: torch.Tensor, gamma: float) -> torch.Tensor:
        """Return [images]: min-SNR weights; for velocities over SNR + 1 (arXiv:2303.09556, section 3.4)."""
        alphas_cumprod = self._signal(steps)
        ratio = alphas_cumprod / (1 - alphas_cumprod)
        return ratio.clamp(max=gamma) / (ratio if self.prediction == "epsilon" else ratio + 1)

    def _amplitudes(self, steps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        alphas_cumprod = self._signal(steps)[:, None, None, None]
        return alphas_cumprod.sqrt(), (1 - alphas_cumprod).sqrt()

    def _signal(self, steps: torch.Tensor) -> torch.Tensor:
        """Return [images]: share of the signal in the total power; the table moves to their device once."""
        self._alphas_cumprod = self._alphas_cumprod.to(steps.device)
        return self._alphas_cumprod[steps]
