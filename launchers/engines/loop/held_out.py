"""Held-out rows that a rank measures during training, in batches that are distributed over the ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from estimator.vocabulary import TASKS
from launchers.dataset.batches import MicroBatch, collate, collate_pairs, token_multiple
from launchers.dataset.measured import MAX_BATCH_TOKENS, MAX_ROWS, batches_by_length
from launchers.dataset.prepared import Prepared
from launchers.dataset.render import load_tokenizer
from launchers.engines.loop import varlen
from launchers.engines.loop.outcome import Outcome, StepCounts
from launchers.engines.loop.sharding import Answering
from launchers.engines.loop.tasks import TextTask, text_task_of
from launchers.gang.job import TrainJob
from launchers.gang.rank import RankEnv


class HeldOut(Protocol):
    """Measurement on held-out rows, for any task."""

    count: int  # rows of all ranks
    passes: int  # batches per rank
    metrics: tuple[str, ...]  # names of the figures in addition to the loss
    divisor: int  # divides the summed loss and figures
    captions: tuple[str, ...]  # captions to draw pictures of

    def batches(self) -> Iterator[tuple[Any, bool]]:
        """Iterate over this rank's batches, and whether each counts; fillers equalize the ranks' numbers."""
        ...

    def outcome(self, model: Answering, batch: Any, /) -> Outcome:
        """Run the forward pass or passes of one batch."""
        ...

    def draw(self, model: Answering, /) -> tuple[str, ...]:
        """Draw a picture of each of :attr:`captions`, as PNG in base64; called by all ranks."""
        ...


class TextRows:
    """Rows of tokens, measured by the task's own loss."""

    captions: tuple[str, ...] = ()

    def __init__(self, job: TrainJob, env: RankEnv) -> None:
        self._data = Prepared(job.held_out_dir)
        self._pairs = job.settings.trains_on_pairs
        self._reference = None if job.held_out_reference is None else np.load(job.held_out_reference)
        self.count = min(MAX_ROWS, len(self._data))
        padding_free = varlen.applies(job)
        # not the training's task object, because KTO's holds state of a step
        self._task: TextTask = text_task_of(job.settings, padding_free=padding_free)
        vision = job.settings.vision is not None
        self._images = load_tokenizer(job.model_dir, job.settings) if vision else None
        self._multiple = token_multiple(self._data, padding_free=padding_free)
        self._counts: StepCounts = self._task.counts(self._data, 0, self.count)
        self.metrics, self.divisor = self._task.metrics, self._counts.divisor
        tokens = MAX_BATCH_TOKENS[job.plan.layout.device]
        # batches are no larger than in training, so they need no more memory
        all_batches = list(
            batches_by_length(self._data, range(self.count), tokens, job.plan.layout.micro_batch_size)
        )
        self._rank_batches = all_batches[env.rank :: env.world_size]
        self.passes = -(-len(all_batches) // env.world_size)
        self._filler = all_batches[-1]

    def batches(self) -> Iterator[tuple[MicroBatch, bool]]:
        for number in range(self.passes):
            counts = number < len(self._rank_batches)
            yield self._batch(self._rank_batches[number] if counts else self._filler), counts

    def outcome(self, model: Answering, batch: MicroBatch, /) -> Outcome:
        return self._task.outcome(model, batch, self._counts)

    def draw(self, _model: Answering, /) -> tuple[str, ...]:
        return ()

    def _batch(self, indices: list[int]) -> MicroBatch:
        collate_rows = collate_pairs if self._pairs else partial(collate, images=self._images)
        batch = collate_rows(
            [self._data.row(index) for index in indices], self._data.info.pad_id, self._multiple
        )
        if self._reference is None:
            return batch
        return dataclasses.replace(batch, reference=torch.from_numpy(self._reference[indices]))


def held_out_of(job: TrainJob, env: RankEnv) -> HeldOut:
    """Return a job's held-out rows."""
    if TASKS[job.settings.task].images:
        from launchers.engines.loop.held_out_images import HeldOutImages  # which needs diffusers

        return HeldOutImages(job, env)
    return TextRows(job, env)
