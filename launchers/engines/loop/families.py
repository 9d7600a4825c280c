"""Find the parts of a model that the loop needs; their names depend on the model's family."""

from __future__ import annotations

from typing import Any

from torch import nn

from launchers.engines.loop import unet


def blocks(network: Any) -> list[nn.Module]:
    """Return the model's decoder layers: the modules that transformers does not split over devices.

    If the family names none, return the modules of the list whose length is the number of layers in
    config.json, or an empty list.
    """
    if unet.is_unet(network):
        return unet.blocks(network)
    names = set(network._no_split_modules or ())
    blocks = [module for module in network.modules() if type(module).__name__ in names]
    if blocks:
        return blocks
    layers = getattr(network.config.get_text_config(), "num_hidden_layers", None)
    lists = [module for module in network.modules() if isinstance(module, nn.ModuleList)]
    return next((list(modules) for modules in lists if len(modules) == layers), [])


def indexers(network: Any) -> list[nn.Module]:
    """Return sparse attention's indexers, whose code computes no gradients (DeepSeek V3.2, GLM-5)."""
    return [module for name, module in network.named_modules() if name.endswith(".indexer")]


def expert_tensors(network: Any) -> list[str]:
    """Return the name suffixes of all tensors that hold a block's experts, such as "experts.down_proj"."""
    return sorted(
        {
            f"experts.{tensor}"
            for name, module in network.named_modules()
            if name.endswith(".experts")
            for tensor, weights in module.named_parameters(recurse=False)
            if weights.ndim == 3  # biases have two dimensions
        }
    )


def expert_blocks(network: Any) -> set[type[nn.Module]]:
    """Return the classes of modules that route each token to some of their experts."""
    return {type(module) for module in network.modules() if hasattr(module, "experts")}
