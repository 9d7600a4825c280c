"""fp32 master weights of one process that computes in 16 bits, without a sharding wrapper."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class MasterWeights:
    """Trained parameters in fp32, of which forward and backward passes use copies of type ``dtype``.

    The parameters hold the copies from a forward pass until :meth:`release`, else the fp32 weights, so that
    optimizer, checkpoint and export see these alone. Gradients are summed in fp32, as under fully_shard with
    ``reduce_dtype=torch.float32``. Frozen parameters take that type too.
    """

    def __init__(self, network: nn.Module, dtype: torch.dtype) -> None:
        for parameter in network.parameters():
            if parameter.dtype == torch.float32 and not parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
        self._trained = [
            each for each in network.parameters() if each.requires_grad and each.dtype == torch.float32
        ]
        self._masters = [each.data for each in self._trained]
        self._copies = [each.to(dtype) for each in self._masters]
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        self._computing = False
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._add)  # type: ignore[no-untyped-call]
        base = getattr(network, "get_base_model", lambda: network)()  # PEFT's generate() calls it directly
        for module in {network, base}:
            module.register_forward_pre_hook(self._compute)

    def _compute(self, *_: Any) -> None:
        """Let the parameters hold copies of the current weights."""
        if self._computing:
            return
        torch._foreach_copy_(self._copies, self._masters)
        for parameter, copy in zip(self._trained, self._copies, strict=True):
            parameter.data = copy
        self._computing = True

    def _add(self, parameter: torch.Tensor) -> None:
        """Add a micro batch's gradient to the sum."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if parameter in self._sums:
            self._sums[parameter] += gradient
        else:
            self._sums[parameter] = gradient.float()

    def release(self) -> None:
        """Let the parameters hold the fp32 weights, with the sums of their gradients."""
        if not self._computing:
            return
        for parameter, master in zip(self._trained, self._masters, strict=True):
            parameter.data = master
            parameter.grad = self._sums.pop(parameter, None)
        self._computing = False
