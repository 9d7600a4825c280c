"""torchtune's model behind the interface that tasks evaluate (launchers.engines.loop.tasks)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from estimator.exact.torchtune_imports import torchtune_imports
from launchers.dataset.batches import summed_cross_entropy

with torchtune_imports():
    from torchtune.modules.peft import disable_adapter


class MeasuredModel:
    """Computes logits; see launchers.engines.loop.sharding.Answering."""

    def __init__(self, network: Any, device: torch.device) -> None:
        self._network = network
        self.device = device

    @property
    def module(self) -> MeasuredModel:
        """This object, which has :meth:`disable_adapter`."""
        return self

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Disable the adapters in the context, which gives the untrained model."""
        context: AbstractContextManager[None] = disable_adapter(self._network)
        return context

    def logits(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Return [sequences, positions, vocabulary] for ``input_ids`` with one document per row."""
        # The padding token may be outside the vocabulary: any valid token will do in its place
        tokens = inputs["input_ids"].clamp(0, self._network.tok_embeddings.num_embeddings - 1)
        logits: torch.Tensor | list[torch.Tensor] = self._network(tokens)
        return torch.cat(logits, dim=1) if isinstance(logits, list) else logits

    def fused_loss(self, labels: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        """Sum the cross entropy of the logits, which no fused kernel computes for these models."""
        return summed_cross_entropy(self.logits(**inputs), labels)
