"""Log-probabilities of labels without storing all logits: the output head runs on chunks of positions.

The backward pass recomputes each chunk's logits. Used for preference losses: they need the log-probability of
each answer, which Liger's fused cross entropy does not return.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from launchers.dataset.batches import LOSS_CHUNK, chunk_log_probabilities

Product = Callable[[torch.Tensor], torch.Tensor]


class Head:
    """Forward pass of an output head: logits, or log-probabilities of ``labels`` while these are set."""

    def __init__(self, product: Product) -> None:
        self._product = product
        self.labels: torch.Tensor | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [sequences, positions, vocabulary], or log-probabilities [sequences, positions]."""
        if self.labels is None:
            return self._product(hidden)
        chunks = zip(
            torch.split(hidden.flatten(0, -2), LOSS_CHUNK),
            torch.split(self.labels.flatten(), LOSS_CHUNK),
            strict=True,
        )
        per_token = [
            checkpoint(_chunk, self._product, part, labels, use_reentrant=False, preserve_rng_state=False)
            for part, labels in chunks
        ]
        return torch.cat(per_token).view(self.labels.shape)


def _chunk(product: Product, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return chunk_log_probabilities(product(hidden), labels)


def put_in(network: Any) -> None:
    """Replace a transformers model's output head by a :class:`Head`, before adapters and sharding."""
    head = network.get_output_embeddings()
    head.forward = Head(head.forward)


def log_probabilities(
    network: Any, forward: Callable[..., Any], labels: torch.Tensor, inputs: dict[str, torch.Tensor]
) -> torch.Tensor:
    """Return [sequences, positions]: log-probabilities of ``labels`` in fp32, 0 where they do not count.

    ``forward``: calls ``network`` the way its engine does.
    """
    head: Head = network.get_output_embeddings().forward
    head.labels = labels
    try:
        result: torch.Tensor = forward(**inputs, use_cache=False).logits
    finally:
        head.labels = None
    return result
