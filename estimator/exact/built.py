"""Description of a model for the tracer, independent of who built it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # tokens, labels (both [batch, length]) -> scalar


@dataclass(kw_only=True, slots=True)
class BuiltModel:
    """A model on fake tensors, where its parts are, and how it is called."""

    model: nn.Module
    blocks: list[nn.Module]
    last_norm: nn.Module  # what follows it belongs to logits and loss
    forward: Loss

    @property
    def trained(self) -> list[nn.Parameter]:
        """The parameters that have gradients."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]
