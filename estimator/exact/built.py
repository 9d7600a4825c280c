"""Description of a model for the tracer, independent of the library that built it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # tokens, labels (both [batch, length]) -> scalar


@dataclass(kw_only=True, slots=True)
class BuiltModel:
    """A model on fake tensors, with its parts and its forward function."""

    model: nn.Module
    blocks: list[nn.Module]
    last_norm: nn.Module  # operations after it are counted as logits and loss
    forward: Loss

    @property
    def trained(self) -> list[nn.Parameter]:
        """Return the parameters with gradients."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]
