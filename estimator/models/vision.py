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
    family = str(config.get("model_type"))
    read_family = _FAMILIES.get(family, _generic_tower)
    return read_family(config, tower, layers, hidden, ffn, patch, text_hidden)


def _block(hidden: int, ffn: int) -> int:
    """Parameters of a ViT's block: attention, MLP and two norms, all with biases."""
    return 4 * hidden * (hidden + 1) + 2 * hidden * ffn + ffn + hidden + 4 * hidden


def _siglip(tower: Mapping[str, Any], layers: int, hidden: int, ffn: int, patch: int) -> int:
    """Parameters of SigLIP without its head: patches, positions, blocks, last norm."""
    places = (int(tower.get("image_size", 224)) // patch) ** 2
    return 3 * patch**2 * hidden + hidden + places * hidden + layers * _block(hidden, ffn) + 2 * hidden


def _gemma3(
    config: Mapping[str, Any],
    tower: Mapping[str, Any],
    layers: int,
    hidden: int,
    ffn: int,
    patch: int,
    text_hidden: int,
) -> VisionShape:
    head = hidden  # probe of the pooling head, which the language model does not use
    head += 4 * hidden * (hidden + 1) + 2 * hidden * ffn + ffn + hidden + 2 * hidden
    pooled = tower.get("vision_use_head", True) is not False
    side = int(tower.get("image_size", 224))
    tokens = int(config.get("mm_tokens_per_image", 256))
    return VisionShape(
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        patch=patch,
        merge=max(1, round(side // patch / math.sqrt(tokens))),
        side=side,
        tiles=False,
        tokens=tokens,
        parameters=_siglip(tower, layers, hidden, ffn, patch) + head * pooled,
        projector_parameters=hidden * text_hidden + hidden,
    )


def _idefics3(
    config: Mapping[str, Any],
    tower: Mapping[str, Any],
    layers: int,
    hidden: int,
    ffn: int,
    patch: int,
    text_hidden: int,
) -> VisionShape:
    scale = int(config.get("scale_factor", 2))
    return VisionShape(
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        patch=patch,
        merge=scale,
        side=int(tower.get("image_size", 224)),
        tiles=True,
        tokens=0,
        parameters=_siglip(tower, layers, hidden, ffn, patch),
        projector_parameters=hidden * scale**2 * text_hidden,
    )


def _qwen3_vl(
    _config: Mapping[str, Any],
    tower: Mapping[str, Any],
    layers: int,
    hidden: int,
    ffn: int,
    patch: int,
    text_hidden: int,
) -> VisionShape:
    merge, frames = int(tower.get("spatial_merge_size", 2)), int(tower.get("temporal_patch_size", 2))
    merged, out_features = hidden * merge**2, int(tower.get("out_hidden_size", text_hidden))
    mergers = len(tower.get("deepstack_visual_indexes", ()))
    layers_of_merger = merged * (merged + 1) + merged * out_features + out_features
    parameters = 3 * frames * patch**2 * hidden + hidden + layers * _block(hidden, ffn)
    return VisionShape(
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        patch=patch,
        merge=merge,
        side=0,
        tiles=False,
        tokens=0,
        parameters=parameters + int(tower.get("num_position_embeddings", 2304)) * hidden,
        projector_parameters=(1 + mergers) * layers_of_merger + 2 * hidden + mergers * 2 * merged,
    )


def _generic_tower(
    config: Mapping[str, Any],
    tower: Mapping[str, Any],
    layers: int,
    hidden: int,
    ffn: int,
    patch: int,
    text_hidden: int,
) -> VisionShape:
    merge = int(tower.get("spatial_merge_size", config.get("spatial_merge_size", 1)))
    fixed = "spatial_merge_size" not in tower and "spatial_merge_size" not in config
    return VisionShape(
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        patch=patch,
        merge=merge,
        side=int(tower.get("image_size", 0)) if fixed else 0,
        tiles=False,
        tokens=0,
        parameters=_siglip(tower, layers, hidden, ffn, patch),
        projector_parameters=hidden * merge**2 * text_hidden + text_hidden**2,
    )


_FAMILIES = {"gemma3": _gemma3, "idefics3": _idefics3, "smolvlm": _idefics3, "qwen3_vl": _qwen3_vl}
