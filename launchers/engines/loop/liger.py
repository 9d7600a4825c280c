"""Liger-Kernel's Triton kernels for a model's norms, MLPs, rotation and loss, as ``settings.liger`` says."""

from __future__ import annotations

from typing import Any

import torch

from launchers.imports import collector_paused


def put_in(network: Any) -> None:
    """Let a transformers model compute with them, before it gets adapters.

    Its forward pass, given labels, then ends in the loss and makes no logits (:func:`summed_loss`).
    """
    with collector_paused():
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(network)


def summed_loss(network: Any, labels: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sum of the cross entropies of ``labels``, shifted already, that count."""
    # a sum is a mean over one; without logits in an evaluation, too
    options = {"num_items_in_batch": 1, "skip_logits": True, "use_cache": False}
    outcome = network(**inputs, shift_labels=labels, **options)
    loss: torch.Tensor = outcome.loss
    return loss
