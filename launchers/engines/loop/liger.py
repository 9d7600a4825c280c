"""Liger-Kernel's Triton kernels (``settings.liger``): the loss, and the blocks of some families."""

from __future__ import annotations

from typing import Any

import torch

from launchers.base.imports import collector_paused
from launchers.dataset.prepared import IGNORE


def use_block_kernels(network: Any) -> None:
    """Replace norms, MLPs and rotary embedding of a transformers model, before adapters are added."""
    with collector_paused():
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(network, fused_linear_cross_entropy=False)


def summed_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    soft_cap: float | None,
) -> torch.Tensor:
    """Return the summed cross entropy of the labels that count, computed in chunks of the logits.

    ``hidden``: [tokens, width]; ``weight``, ``bias``: of the output head. Their gradients are computed, too.
    """
    with collector_paused():
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    fused = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORE, reduction="sum", softcap=soft_cap)
    loss: torch.Tensor = fused(weight, hidden, labels, bias)
    return loss
