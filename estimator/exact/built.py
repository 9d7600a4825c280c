"""What the tracer needs to know of a model, whoever built it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # tokens, labels (both [batch, length]) -> scalar


@dataclass(kw_only=True, slots=True)
class BuiltModel:
    """A model and where its parts are."""

    model: nn.Module
    blocks: list[nn.Module]
    last_norm: nn.Module  # what follows it belongs to logits and loss
    forward: Loss

    @property
    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]
