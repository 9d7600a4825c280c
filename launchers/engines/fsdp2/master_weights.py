"""fp32 master weights for training with 16-bit products in a single process, without fully_shard."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class MasterWeights:
    """Trained parameters in fp32, with copies of type ``dtype`` for forward and backward passes.

    The parameters hold the copies from a forward pass until :meth:`release`, else the fp32 weights, which
    optimizer, checkpoint and export use. Gradients are summed in fp32, as under fully_shard with
    ``reduce_dtype=torch.float32``. Frozen parameters are cast to ``dtype``.
    """

    def __init__(self, network: nn.Module, dtype: torch.dtype) -> None:
        for parameter in network.parameters():
            if parameter.dtype == torch.float32 and not parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
        self._trained = [
            parameter
            for parameter in network.parameters()
            if parameter.requires_grad and parameter.dtype == torch.float32
        ]
        self._masters = [parameter.data for parameter in self._trained]
        self._copies = [parameter.to(dtype) for parameter in self._masters]
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        self._holds_copies = False
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._add_gradient)  # type: ignore[no-untyped-call]
        base = getattr(network, "get_base_model", lambda: network)()  # PEFT's generate() calls it directly
        for module in {network, base}:
            module.register_forward_pre_hook(self._use_copies)

    def _use_copies(self, *_: Any) -> None:
        """Make the parameters hold 16-bit copies of the current weights."""
        if self._holds_copies:
            return
        torch._foreach_copy_(self._copies, self._masters)
        for parameter, copy in zip(self._trained, self._copies, strict=True):
            parameter.data = copy
        self._holds_copies = True

    def _add_gradient(self, parameter: torch.Tensor) -> None:
        """Add a micro batch's gradient to the sum."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if parameter in self._sums:
            self._sums[parameter] += gradient
        else:
            self._sums[parameter] = gradient.float()

    def release(self) -> None:
        """Make the parameters hold the fp32 weights and the sums of their gradients."""
        if not self._holds_copies:
            return
        for parameter, master in zip(self._trained, self._masters, strict=True):
            parameter.data = master
            parameter.grad = self._sums.pop(parameter, None)
        self._holds_copies = False
