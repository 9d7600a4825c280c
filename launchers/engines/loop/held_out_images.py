"""Evaluation of a UNet during training: errors of held-out images at four noise levels, drawn pictures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from launchers.dataset.measured import MAX_ROWS
from launchers.engines.gathering import gather_json
from launchers.engines.loop.images import QUARTERS, LatentBatch, NoiseSchedule, noise_errors, noisy_quarters
from launchers.engines.loop.outcome import Outcome
from launchers.engines.loop.sharding import Answering
from launchers.engines.loop.unet import has_texts
from launchers.gang.job import TrainJob
from launchers.gang.rank import RankEnv
from launchers.images import drawing
from launchers.images.prepared import PreparedImages
from launchers.precompute.latents import Latents


class HeldOutImages:
    """Held-out images, measured as in launchers.evaluation.image_evaluation; see held_out.HeldOut.

    Images and captions are distributed round-robin over the ranks.
    """

    metrics: tuple[str, ...] = QUARTERS

    def __init__(self, job: TrainJob, env: RankEnv) -> None:
        if job.held_out_reference is None:
            raise ValueError("a run that is evaluated has latents of its held-out images, and there are none")
        self._job, self._env = job, env
        self._data = PreparedImages(job.held_out_dir)
        self._latents = Latents(job.held_out_reference)
        self._schedule = NoiseSchedule(self._latents.noise["scheduler"])
        self.count = self.divisor = min(MAX_ROWS, len(self._data))
        rows = range(min(job.settings.evaluation.answers, self.count))
        self.captions = tuple(self._data.caption(row) for row in rows)
        self.passes = -(-self.count // env.world_size)

    def batches(self) -> Iterator[tuple[LatentBatch, bool]]:
        for row, counts in self._rows_of_rank(self.count):
            yield (
                noisy_quarters(
                    self._latents.row(row),
                    self._data.time_ids(row),
                    row,
                    self._schedule,
                    self._latents.noise["scaling_factor"],
                ),
                counts,
            )

    def outcome(self, model: Answering, batch: LatentBatch, /) -> Outcome:
        # one image at a time, so that it needs no more memory than training
        errors = torch.cat([noise_errors(model.module, image, self._schedule) for image in batch.split()])
        return Outcome(loss=errors.mean(), metrics=dict(zip(QUARTERS, errors, strict=True)))

    def draw(self, model: Answering, /) -> tuple[str, ...]:
        pictures: dict[int, str] = {}
        vae = drawing.decoder(self._job.model_dir, model.device)
        for row, counts in self._rows_of_rank(len(self.captions)):
            picture = self._picture(model.module, vae, row)
            if counts:
                pictures[row] = picture
        gathered = gather_json(list(pictures.items()), model.device)
        by_row = {row: picture for of_rank in gathered for row, picture in of_rank}
        return tuple(picture for _, picture in sorted(by_row.items()))

    def _picture(self, unet: Any, vae: nn.Module, row: int) -> str:
        """Draw the caption of ``row`` with the current UNet; the seed is the row's number."""
        latent = self._latents.row(row)
        text, summary = latent.text, latent.summary
        if has_texts(unet):
            text, summary = (embedding[0] for embedding in unet(tokens=latent.tokens[None].to(unet.device)))
        image = drawing.draw(
            unet,
            vae,
            self._job.model_dir,
            text=text,
            summary=summary,
            size=self._data.target(row),
            seed=row,
        )
        return drawing.encoded(image)

    def _rows_of_rank(self, count: int) -> Iterator[tuple[int, bool]]:
        """Iterate over this rank's share of ``count`` rows, and whether each counts; all shares are equal."""
        world = self._env.world_size
        for first in range(0, count, world):
            row = first + self._env.rank
            yield min(row, count - 1), row < count
