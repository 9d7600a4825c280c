"""Liger-Kernel's Triton kernels for a model's norms, MLPs, rotary embedding and loss (``settings.liger``)."""

from __future__ import annotations

from typing import Any

import torch

from launchers.base.imports import collector_paused

_BLOCK_KERNELS = ("rope", "rms_norm", "swiglu")


def put_in(network: Any, *, loss_alone: bool = False) -> None:
    """Replace parts of a transformers model by Liger's kernels, before adapters are added.

    A forward pass with labels then returns the loss and computes no logits (:func:`summed_loss`).
    ``loss_alone``: replace only the loss and leave the blocks to torch.compile, which fuses the same
    operations, or to float8.
    """
    with collector_paused():
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(network, **(dict.fromkeys(_BLOCK_KERNELS, False) if loss_alone else {}))


def summed_loss(network: Any, labels: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the summed cross entropy of the labels that count; ``labels`` are shifted already."""
    # num_items_in_batch divides the sum; skip_logits applies to evaluation mode, too
    options = {"num_items_in_batch": 1, "skip_logits": True, "use_cache": False}
    outcome = network(**inputs, shift_labels=labels, **options)
    loss: torch.Tensor = outcome.loss
    return loss
