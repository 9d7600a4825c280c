"""Liger-Kernel's Triton kernels for a model's norms, MLPs, rotation and loss, as ``settings.liger`` says."""

from __future__ import annotations

from typing import Any

import torch

from launchers.base.imports import collector_paused

_OF_BLOCKS = ("rope", "rms_norm", "swiglu")


def put_in(network: Any, *, loss_alone: bool = False) -> None:
    """Replace parts of a transformers model by Liger's kernels, before adapters are added.

    Its forward pass, given labels, then ends in the loss and makes no logits (:func:`summed_loss`).
    ``loss_alone``: the blocks stay as they are, for torch.compile, which fuses what Liger's kernels do there,
    or for float8.
    """
    with collector_paused():
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(network, **(dict.fromkeys(_OF_BLOCKS, False) if loss_alone else {}))


def summed_loss(network: Any, labels: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sum of the cross entropies of ``labels``, shifted already, that count."""
    # a sum is a mean over one; without logits in an evaluation, too
    options = {"num_items_in_batch": 1, "skip_logits": True, "use_cache": False}
    outcome = network(**inputs, shift_labels=labels, **options)
    loss: torch.Tensor = outcome.loss
    return loss
