"""What has to be found in a model, whatever its family calls it."""

from __future__ import annotations

from typing import Any

from torch import nn


def blocks(network: Any) -> list[nn.Module]:
    """The model's decoder layers: what transformers says must not be split over devices.

    Of a family that says nothing, the list with as many modules as config.json has layers. Empty where that
    isn't there either.
    """
    names = set(network._no_split_modules or ())
    found = [module for module in network.modules() if type(module).__name__ in names]
    if found:
        return found
    layers = getattr(network.config.get_text_config(), "num_hidden_layers", None)
    lists = [module for module in network.modules() if isinstance(module, nn.ModuleList)]
    return next((list(each) for each in lists if len(each) == layers), [])


def expert_blocks(network: Any) -> set[type[nn.Module]]:
    """The classes of modules that send each token to some of their experts only."""
    return {type(module) for module in network.modules() if hasattr(module, "experts")}
