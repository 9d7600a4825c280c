"""Interface of the libraries that shard a model over the ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from launchers.gang.job import TrainJob
from launchers.gang.rank import RankEnv


class Answering(Protocol):
    """Forward passes of a model, for any engine."""

    device: torch.device

    @property
    def module(self) -> Any:
        """The transformers (or PEFT) model, which has ``disable_adapter``."""
        ...

    def logits(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Run a forward pass; return logits [sequences, positions, vocabulary]."""
        ...

    def fused_loss(self, labels: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        """Run a forward pass without logits; return what the head computes of ``labels`` (head.py)."""
        ...


class TrainedModel(Protocol):
    """A trained model to export, for any engine."""

    device: torch.device

    def trained_state(self, job: TrainJob) -> dict[str, Any] | None:
        """Return the full trained parameters by name, on the CPU of rank 0; called by every rank.

        None: rank 0's :attr:`module` holds them.
        """
        ...

    @property
    def module(self) -> Any:
        """The transformers (or PEFT) model."""
        ...


class ShardedModel(TrainedModel, Answering, Protocol):
    """A model with its optimizer and schedule, sharded over the ranks."""

    def backward(self, loss: torch.Tensor, counted: int, *, last: bool) -> None:
        """Run the backward pass of one micro batch, adding its gradients to those of the step.

        ``loss``: sum over the micro batch's labels (or pairs). ``counted``: number of labels (or pairs) in
        the global batch, so that the gradients of all micro batches and ranks add up to the gradient of the
        mean. ``last``: whether this is the rank's last micro batch of the step.
        """
        ...

    def update(self) -> torch.Tensor | None:
        """Clip the gradients, step optimizer and schedule, and clear the gradients; ends a step.

        Returns the gradients' norm before clipping, on any device; None if it is unknown.
        """
        ...

    def lr(self) -> float:
        """Return the learning rate of the next update."""
        ...

    def averaged(self) -> AbstractContextManager[None]:
        """Replace the weights by their moving average, if the run keeps one, in a context of all ranks."""
        ...

    def save_checkpoint(self, job: TrainJob, env: RankEnv, step: int) -> None:
        """Write this rank's part of the checkpoint of ``step``, and mark it complete."""
        ...


class Sharding(Protocol):
    """Library that shards the training states of a run over its ranks."""

    name: str  # of the engine

    def start(self, job: TrainJob, env: RankEnv) -> torch.device:
        """Join the process group; returns the device of this rank."""
        ...

    def load(self, job: TrainJob, env: RankEnv, device: torch.device) -> ShardedModel:
        """Return the job's model with its weights, sharded, in training mode, and resumed if requested."""
        ...
