"""Interface of the libraries that shard a model over the ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from launchers.gang.job import TrainJob
from launchers.gang.rank import RankEnv


class Answering(Protocol):
    """A model that is asked, whatever trains it."""

    device: torch.device

    @property
    def module(self) -> Any:
        """Model with ``disable_adapter``: the transformers (or PEFT) model."""
        ...

    def logits(self, **inputs: torch.Tensor) -> torch.Tensor:
        """A forward pass: [sequences, positions, vocabulary]."""
        ...

    def fused_loss(self, labels: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        """A forward pass that ends in the summed cross entropy of all labels that count (liger.py)."""
        ...

    def fused_log_probabilities(self, labels: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        """A forward pass that ends in the log-probabilities of ``labels`` (head.py)."""
        ...


class TrainedModel(Protocol):
    """A model that was trained, whatever has trained it."""

    device: torch.device

    def trained_state(self, job: TrainJob) -> dict[str, Any] | None:
        """Return the trained parameters, whole and on the CPU, by name; every rank calls it, rank 0 gets the
        tensors.

        None: the model on rank 0 has them itself.
        """
        ...

    @property
    def module(self) -> Any:
        """The transformers (or PEFT) model."""
        ...


class ShardedModel(TrainedModel, Answering, Protocol):
    """A model with its optimizer and schedule, divided over the ranks."""

    def backward(self, loss: torch.Tensor, counted: int, *, last: bool) -> None:
        """Add the gradients of this rank's micro batch.

        ``loss`` is a sum over its labels (or pairs), ``counted`` those of the whole global batch: what adds
        up over all micro batches and ranks is the gradient of the mean. ``last``: of this rank's step.
        """
        ...

    def update(self) -> torch.Tensor | None:
        """Clip, step the optimizer and the schedule, drop the gradients, after a step's last micro batch.

        Returns the gradients' norm before clipping, on any device; None where it isn't known.
        """
        ...

    def lr(self) -> float:
        """The learning rate of the coming update."""
        ...

    def averaged(self) -> AbstractContextManager[None]:
        """Within it the weights are their moving average, where the run keeps one; all ranks enter it."""
        ...

    def save_checkpoint(self, job: TrainJob, env: RankEnv, step: int) -> None:
        """Write this rank's part of the checkpoint after ``step`` steps and mark it complete."""
        ...


class Sharding(Protocol):
    """Divides the states of a run over its ranks."""

    name: str  # the engine's

    def start(self, job: TrainJob, env: RankEnv) -> torch.device:
        """Join the process group; returns the device of this rank."""
        ...

    def load(self, job: TrainJob, env: RankEnv, device: torch.device) -> ShardedModel:
        """Return the job's model with its weights, sharded, in training mode, and resumed if requested."""
        ...
