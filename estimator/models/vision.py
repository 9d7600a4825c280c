"""Vision tower and projector of a vision-language model, from its config.json.

Counts follow transformers 5.23: models/siglip, models/gemma3, models/idefics3 and models/qwen3_vl. Other
towers are counted as ViTs of their widths with a two-layer projector.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

IMAGE_SIDE = 1024  # pixels of an image where the user names no size


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionShape:
    """Shape of a vision tower and its projector."""

    layers: int
    hidden: int
    ffn: int
    patch: int  # pixels of the side of a patch
    merge: int  # patches of the side of one image token
    side: int  # pixels of the images that the tower is made for; 0: of any size
    tiles: bool  # larger images are divided into tiles of ``side``, next to the scaled image
    tokens: int  # image tokens of an image, or of a tile; 0: one for each merged patch
    parameters: int  # of the tower
    projector_parameters: int

    def patches_of(self, width: int, height: int) -> int:
        """Patches of an image of this many pixels, in all its tiles."""
        if not self.side:
            return self.tokens_of(width, height) * self.merge**2
        return (self.side // self.patch) ** 2 * self._tiles_of(width, height)

    def tokens_of(self, width: int, height: int) -> int:
        """Image tokens of an image of this many pixels, without the tokens around them."""
        if not self.side:
            step = self.patch * self.merge
            return max(1, round(width / step)) * max(1, round(height / step))
        tokens_per_tile = self.tokens or (self.side // self.patch // self.merge) ** 2
        return tokens_per_tile * self._tiles_of(width, height)

    def _tiles_of(self, width: int, height: int) -> int:
        if not self.tiles or max(width, height) <= self.side:
            return 1
        return math.ceil(width / self.side) * math.ceil(height / self.side) + 1


def from_config(config: Mapping[str, Any], text_hidden: int) -> VisionShape | None:
    """Read the tower's shape; None for a model without one, or one whose widths are not in config.json.

    ``text_hidden``: hidden size of the language model.
    """
    tower = config.get("vision_config")
    if not isinstance(tower, Mapping):
        return None
    layers = tower.get("num_hidden_layers", tower.get("depth"))
    widths = [layers, *(tower.get(name) for name in ("hidden_size", "intermediate_size", "patch_size"))]
    layers, hidden, ffn, patch = (width if isinstance(width, int) and width > 0 else 0 for width in widths)
    if not (layers and hidden and ffn and patch):
        return None
    read_family = _FAMILIES.get(str(config.get("model_type")), _generic_tower)
    return read_family(_Tower(config, tower, layers, hidden, ffn, patch, text_hidden))


@dataclass(frozen=True, slots=True)
class _Tower:
    """Widths of a vision tower, with the configuration that they are from."""

    config: Mapping[str, Any]
    values: Mapping[str, Any]  # vision_config in ``config``
    layers: int
    hidden: int
    ffn: int
    patch: int
    text_hidden: int

    @property
    def side(self) -> int:
        """Pixels of the side of an image."""
        return int(self.values.get("image_size", 224))

    @property
    def block(self) -> int:
        """Parameters of a ViT's block without its norms: attention and MLP, with biases."""
        return 4 * self.hidden * (self.hidden + 1) + 2 * self.hidden * self.ffn + self.ffn + self.hidden

    @property
    def blocks(self) -> int:
        """Parameters of all blocks, each with two norms."""
        return self.layers * (self.block + 4 * self.hidden)

    @property
    def siglip(self) -> int:
        """Parameters of SigLIP without its head: patches, positions, blocks, last norm."""
        places = (self.side // self.patch) ** 2
        return self.hidden * (3 * self.patch**2 + 1 + places + 2) + self.blocks

    def shape(self, *, tiles: bool = False, tokens: int = 0, **values: int) -> VisionShape:
        """Return the shape with the tower's widths."""
        widths = {"layers": self.layers, "hidden": self.hidden, "ffn": self.ffn, "patch": self.patch}
        return VisionShape(tiles=tiles, tokens=tokens, **widths, **values)


def _gemma3(tower: _Tower) -> VisionShape:
    head = tower.hidden  # probe of the pooling head, which the language model does not use
    head += tower.block + 2 * tower.hidden
    pooled = tower.values.get("vision_use_head", True) is not False
    tokens = int(tower.config.get("mm_tokens_per_image", 256))
    return tower.shape(
        merge=max(1, round(tower.side // tower.patch / math.sqrt(tokens))),
        side=tower.side,
        tokens=tokens,
        parameters=tower.siglip + head * pooled,
        projector_parameters=tower.hidden * tower.text_hidden + tower.hidden,
    )


def _idefics3(tower: _Tower) -> VisionShape:
    scale = int(tower.config.get("scale_factor", 2))
    return tower.shape(
        merge=scale,
        side=tower.side,
        tiles=True,
        parameters=tower.siglip,
        projector_parameters=tower.hidden * scale**2 * tower.text_hidden,
    )


def _qwen3_vl(tower: _Tower) -> VisionShape:
    values, hidden = tower.values, tower.hidden
    merge, frames = int(values.get("spatial_merge_size", 2)), int(values.get("temporal_patch_size", 2))
    merged, out_features = hidden * merge**2, int(values.get("out_hidden_size", tower.text_hidden))
    mergers = len(values.get("deepstack_visual_indexes", ()))
    layers_of_merger = merged * (merged + 1) + merged * out_features + out_features
    parameters = 3 * frames * tower.patch**2 * hidden + hidden + tower.blocks
    return tower.shape(
        merge=merge,
        side=0,
        parameters=parameters + int(values.get("num_position_embeddings", 2304)) * hidden,
        projector_parameters=(1 + mergers) * layers_of_merger + 2 * hidden + mergers * 2 * merged,
    )


def _generic_tower(tower: _Tower) -> VisionShape:
    name = "spatial_merge_size"
    merge = int(tower.values.get(name, tower.config.get(name, 1)))
    fixed = name not in tower.values and name not in tower.config
    return tower.shape(
        merge=merge,
        side=int(tower.values.get("image_size", 0)) if fixed else 0,
        parameters=tower.siglip,
        projector_parameters=tower.hidden * merge**2 * tower.text_hidden + tower.text_hidden**2,
    )


_FAMILIES = {"gemma3": _gemma3, "idefics3": _idefics3, "smolvlm": _idefics3, "qwen3_vl": _qwen3_vl}
