"""CLIP text encoders: parameters, and activations saved for the backward pass of adapters.

The structure is that of CLIPTextModel in transformers. Letters: w width, f MLP width, r rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from estimator.models.unet import TEXT_TOKENS, Adapters, linear, norm

TEXT_ADAPTED = ("q_proj", "k_proj", "v_proj", "out_proj")  # the layers of each attention that LoRA adapts
_VOCABULARY = 49_408


@dataclass(frozen=True, kw_only=True, slots=True)
class TextEncoderShape:
    """Shape of one CLIP text encoder, with the fields of its config.json."""

    name: str
    width: int
    layers: int
    inner: int  # of the MLP
    heads: int
    projection: int = 0  # width of the summary; 0: the encoder makes none, and its last layer is not used
    vocabulary: int = _VOCABULARY
    quick: bool = False  # QuickGELU, which keeps two feature maps; GELU keeps one

    @classmethod
    def of_config(cls, config: Mapping[str, Any], name: str, *, projects: bool) -> TextEncoderShape:
        """Return the shape in a config.json; raises KeyError for a missing field."""
        return cls(
            name=name,
            width=config["hidden_size"],
            layers=config["num_hidden_layers"],
            inner=config["intermediate_size"],
            heads=config["num_attention_heads"],
            projection=config["projection_dim"] if projects else 0,
            vocabulary=config["vocab_size"],
            quick=config["hidden_act"] == "quick_gelu",
        )

    @property
    def parameters(self) -> int:
        """Count the parameters: embeddings of tokens and 77 positions, layers, norm, projection of the pooled
        text.
        """
        w = self.width
        layer = 4 * linear(w, w) + linear(w, self.inner) + linear(self.inner, w) + 2 * norm(w)
        embeddings = (self.vocabulary + TEXT_TOKENS) * w
        return embeddings + self.layers * layer + norm(w) + self.projection * w

    @property
    def used_layers(self) -> int:
        """Layers that the UNet depends on: all if the pooled text is projected, else all but the last."""
        return self.layers if self.projection else self.layers - 1

    def lora_parameters(self, rank: int) -> int:
        """Count the weights of adapters on the four matrices of attention in each used layer."""
        return self.used_layers * len(TEXT_ADAPTED) * 2 * rank * self.width

    def saved_bytes(self, size: int, adapters: Adapters, *, recomputed: bool) -> int:
        """Return the bytes that one caption's forward pass saves, without frozen weights.

        Counted from a trace of transformers' own modules (5.4, torch 2.13, SDPA), with which it agrees to the
        byte (tests/estimator/models/test_clip.py). An encoder without a projection drops the result of its
        last layer, whose tensors do not count then.
        """
        w, layers = self.width, self.used_layers
        if recomputed:
            return size * TEXT_TOKENS * w * layers
        maps = (2 if self.quick else 1) * self.inner + 4  # the activation's; both norms' statistics
        if adapters.in_fp32 and size < 4:  # each adapter has its input in fp32
            elements = size * (6 * w + maps) + 4 * (4 * w + 4 * adapters.rank)
        else:
            elements = size * (7 * w + maps + 4 * adapters.rank)
        return layers * (TEXT_TOKENS * elements + 4 * self.heads * TEXT_TOKENS)
