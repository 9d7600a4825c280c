"""A rank's micro batches on its device; a step's first one is prepared during the step before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from launchers.dataset.prepared import Prepared
from launchers.engines.loop.outcome import StepCounts
from launchers.engines.loop.tasks import Task
from launchers.gang.job import TrainJob


class Feed:
    """Reads the micro batches and counts of each step. Step 0 is the first.

    On a GPU, batches are copied from page-locked memory without blocking, so that the CPU runs ahead of the
    GPU. :meth:`prepare` uses the time at the end of a step in which the CPU would wait for the loss.
    """

    def __init__(self, task: Task, data: Prepared, job: TrainJob, rank: int, device: torch.device) -> None:
        self._task, self._data, self._device, self._rank = task, data, device, rank
        self._layout, self._total_steps = job.plan.layout, job.total_steps
        self._prepared: tuple[int, StepCounts, Any, Iterator[Any]] | None = None

    def prepare(self, step: int) -> None:
        """Prepare the counts and the first micro batch of a future step."""
        if self._device.type == "cpu" or step >= self._total_steps:
            return
        batches = self._task.batches(self._data, self._layout, step, self._rank)
        self._prepared = (step, self._counts(step), next(batches).to(self._device), batches)

    def step(self, step: int) -> tuple[StepCounts, Iterator[Any]]:
        """Return a step's counts, and its micro batches on the device."""
        if self._prepared is not None and self._prepared[0] == step:
            _, counts, first, remaining = self._prepared
            self._prepared = None
            return counts, self._on_device(remaining, first)
        batches = self._task.batches(self._data, self._layout, step, self._rank)
        return self._counts(step), self._on_device(batches)

    def _counts(self, step: int) -> StepCounts:
        return self._task.counts(self._data, step, self._layout.global_batch_size)

    def _on_device(self, batches: Iterator[Any], first: Any = None) -> Iterator[Any]:
        if first is not None:
            yield first
        for batch in batches:
            yield batch.to(self._device)
