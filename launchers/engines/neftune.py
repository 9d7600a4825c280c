"""NEFTune: noise on the embeddings during training, the same for any number of processes."""

from __future__ import annotations

import math
from typing import Any

import torch

from launchers.dataset.prepared import Prepared
from launchers.dataset.seeding import random_stream
from launchers.gang.job import TrainJob
from launchers.gang.rank import RankEnv


class EmbeddingNoise:
    """Adds uniform noise from -s to s to each embedding during training.

    s = alpha / sqrt(L d), for L tokens of a document and d dimensions: Jain et al. 2023 (arXiv:2310.05914),
    algorithm 1. Unlike transformers (integrations/neftune.py), L excludes padding, which gets no noise, so a
    document has the same noise whether it is packed or not.

    The noise depends only on the seed and on the row's position in the order of the run, so a resumed run has
    the same noise on any number of processes.
    """

    def __init__(self, embedding: Any, job: TrainJob, env: RankEnv, data: Prepared) -> None:
        self._alpha, self._seed = job.settings.neftune_alpha or 0.0, job.settings.seed
        self._layout, self._rank, self._data = job.plan.layout, env.rank, data
        self._positions: range = range(0)  # positions of this rank's rows of the step, in the run's order
        self._batches_done = 0
        if self._alpha:
            embedding.register_forward_hook(self._add_noise)

    def begin(self, step: int) -> None:
        """Start ``step``; step 1 is the first."""
        first, last = ((step - steps_back) * self._layout.global_batch_size for steps_back in (1, 0))
        self._positions = range(first + self._rank, last, self._layout.data_parallel)
        self._batches_done = 0

    def _add_noise(self, embedding: torch.nn.Module, _: Any, embedded: torch.Tensor) -> torch.Tensor | None:
        """Add noise to the step's next micro batch: [sequences, positions, dimensions].

        A padding-free batch contains all rows in one sequence.
        """
        if not (embedding.training and torch.is_grad_enabled()):
            return None
        first = self._batches_done * self._layout.micro_batch_size
        positions = self._positions[first : first + self._layout.micro_batch_size]
        self._batches_done += 1
        noise = torch.zeros_like(embedded)
        padded, tokens = len(embedded) == len(positions), noise.flatten(0, 1)
        generator, start = torch.Generator(embedded.device), 0
        for number, position in enumerate(positions):
            generator.manual_seed(int(random_stream(self._seed, "neftune", position).integers(2**63)))
            start = number * embedded.shape[1] if padded else start
            for length in self._data.row(self._data.order[position]).lengths.tolist():
                scale = self._alpha / math.sqrt(length * embedded.shape[-1])
                tokens[start : start + length].uniform_(-scale, scale, generator=generator)
                start += length
        return embedded + noise
