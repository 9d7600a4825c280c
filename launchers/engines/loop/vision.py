"""Parts of a vision-language model: language model, vision tower and projector; which of them are trained."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from launchers.settings import Settings

# transformers' names for the modules between vision tower and language model
_PROJECTOR = re.compile(
    r"(?:^|\.)(?:multi_modal_projector|connector|merger|deepstack_merger_list|embed_vision)(?:\.|$)"
)


def freeze(network: Any, settings: Settings) -> None:
    """Freeze the vision tower for ``vision: frozen``; the projector stays trained."""
    if settings.vision != "frozen":
        return
    for name, module in vision_parts(network):
        for parameter_name, parameter in module.named_parameters():
            if not _PROJECTOR.search(f"{name}.{parameter_name}"):
                parameter.requires_grad_(False)


def adapted_layers(network: Any, language_layers: list[str], settings: Settings) -> list[str]:
    """Return the full names of the linear layers that get adapters.

    ``language_layers``: last components of the layer names in the language model. With ``vision: lora`` all
    linear layers of tower and projector are added.
    """
    towers = tuple(f"{name}." for name, _ in vision_parts(network))
    linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    names = [
        name for name in linear if not name.startswith(towers) and name.rpartition(".")[2] in language_layers
    ]
    return names + [name for name in linear if name.startswith(towers) and settings.vision == "lora"]


def vision_parts(network: Any) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over the modules that hold all parameters outside of the language model and its head."""
    embedding = network.get_input_embeddings()
    for name, module in network.model.named_children():
        if not any(submodule is embedding for submodule in module.modules()):
            yield f"model.{name}", module
