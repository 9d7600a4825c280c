"""Losses of an output head that keep no logits in memory.

A forward pass with ``shift_labels`` computes them from the decoder's hidden states and the head's weight, for
every family of transformers:

- next-token prediction: the summed cross entropy by Liger-Kernel, whose forward pass computes the gradients;
- preferences: the log-probability of each label, in chunks that the backward pass computes again. Liger's
  loss per token would keep the head's weight, which shardings free, until the backward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from launchers.dataset.batches import LOSS_CHUNK, chunk_log_probabilities
from launchers.engines.loop import liger


class Head:
    """Forward pass of a model's output head: logits, or the loss of ``labels``.

    ``per_token``: log-probabilities [sequences, positions] in fp32, 0 where labels do not count; otherwise
    the summed cross entropy. Both are of logits with the scale (Granite, Cohere) and the soft cap (Gemma 2
    and 4) of the model.
    """

    def __init__(self, network: Any, *, per_token: bool) -> None:
        self._layer, self._per_token = network.get_output_embeddings(), per_token
        self._product: Callable[[torch.Tensor], torch.Tensor] = self._layer.forward
        config = network.config
        self._scale = getattr(network, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
        self._soft_cap: float | None = getattr(config, "final_logit_softcapping", None)

    def __call__(self, hidden: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if labels is None:
            return self._product(hidden)
        rows, targets = hidden.flatten(0, -2), labels.flatten()
        if self._per_token:
            return self._log_probabilities(rows, targets).view(labels.shape)
        return self._cross_entropy(rows, targets)

    def _cross_entropy(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        weight, bias = self._layer.weight, getattr(self._layer, "bias", None)
        if self._scale != 1:
            hidden, bias = hidden * self._scale, None if bias is None else bias * self._scale
        return liger.summed_cross_entropy(hidden, weight, bias, labels, self._soft_cap)

    def _log_probabilities(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        chunks = zip(torch.split(hidden, LOSS_CHUNK), torch.split(labels, LOSS_CHUNK), strict=True)
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        return torch.cat([checkpoint(self._chunk, *chunk, **options) for chunk in chunks])

    def _chunk(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self._product(hidden)
        if self._scale != 1:
            logits = logits * self._scale
        if self._soft_cap is not None:
            logits = torch.tanh(logits / self._soft_cap) * self._soft_cap
        return chunk_log_probabilities(logits, labels)


def put_in(network: Any, *, per_token: bool) -> None:
    """Replace a transformers model's output head by a :class:`Head`, before adapters and sharding.

    The head's own module computes the loss, so that hooks of shardings gather its weight.
    """
    from transformers import PreTrainedModel  # slow to import

    layer, model_forward = network.get_output_embeddings(), network.forward
    [decoder] = (child for child in network.children() if isinstance(child, PreTrainedModel))
    layer.forward = Head(network, per_token=per_token)

    @functools.wraps(model_forward)  # generate() reads the signature
    def forward(*arguments: Any, shift_labels: torch.Tensor | None = None, **inputs: Any) -> Any:
        if shift_labels is None:
            return model_forward(*arguments, **inputs)
        inputs.pop("labels", None)  # PEFT passes None
        return layer(decoder(*arguments, **inputs)[0], shift_labels)

    network.forward = forward


def loss(forward: Callable[..., Any], labels: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return what the :class:`Head` of a model computes of ``labels``, which are shifted already.

    ``forward``: calls the model the way its engine does.
    """
    result: torch.Tensor = forward(**inputs, shift_labels=labels, use_cache=False)
    return result
