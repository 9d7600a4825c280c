"""Model of a row of measurements: from the table of models by name, or from the row's own dimensions."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from benchmarks.published.vocabulary import UnsupportedRow
from estimator import models
from estimator.errors import UserError
from estimator.models import ModelSpec

# Names of copies of a model, and names that only one publication uses -> name in the table of models.
RENAMED = {
    "openbuddyzephyr7b": "mistral-7b-v0.1",  # https://huggingface.co/OpenBuddy/openbuddy-zephyr-7b-v14.1
    "zephyr7b": "mistral-7b-v0.1",  # https://huggingface.co/HuggingFaceH4/zephyr-7b-beta
    "openhermes257b": "mistral-7b-v0.1",
    "deepseekv316b": "deepseek-v2-lite",  # torchtitan's debug size (models/deepseek_v3): V2-Lite's shape
    "deepseekv3671b": "deepseek-v3",
}

# Maximum relative difference between a row's number of parameters and the count from its dimensions. Beyond
# it, the dimensions describe another kind of model.
TOLERANCE = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Dims:
    """Dimensions that a row states for its model; None for a blank cell."""

    name: str
    parameters: int | None
    hidden: int | None
    layers: int | None
    heads: int | None
    kv_heads: int | None
    ffn: int | None
    vocab: int | None
    tied: bool | None
    seq_len: int | None


def model_of(dims: Dims) -> ModelSpec:
    """Find the model in the table by name, or build it from the dimensions.

    Raises :class:`UnsupportedRow` if neither the table nor the row describes it.
    """
    name = RENAMED.get(_normal(dims.name))
    named = (models.find(name),) if name else _by_name().get(_normal(dims.name), ())
    of_that_name = [spec for spec in named if _agrees(spec, dims)]
    vocab = dims.vocab
    # a published vocabulary may be padded to a multiple that suits the hardware
    fitting = [spec for spec in of_that_name if vocab in (None, spec.vocab)] or [
        replace(spec, vocab=vocab) for spec in of_that_name if vocab
    ]
    if fitting:
        return _nearest([variant for spec in fitting for variant in _positions(spec, dims)], dims)
    plain = list(_candidates(dims, (dims.hidden or 0) // (dims.heads or 1)))
    if not plain:
        raise UnsupportedRow(f"model {dims.name!r} is not in the table and the row leaves its shape blank")
    best = _nearest(plain, dims)
    if _off(best, dims) <= TOLERANCE:
        return best
    wider = [spec for width in (64, 128, 256) for spec in _candidates(dims, width)]  # of a head
    wide = _nearest([best, *wider], dims)
    if _off(wide, dims) <= TOLERANCE:
        return wide
    raise UnsupportedRow(
        f"the dimensions of model {dims.name!r} count to {best.parameters / 1e9:.2f} billion parameters, "
        f"its row says {(dims.parameters or 0) / 1e9:.2f}"
    )


def _nearest(specs: list[ModelSpec], dims: Dims) -> ModelSpec:
    """Return the model whose parameter count is nearest to the row's; the first if the row has none."""
    parameters = dims.parameters
    return specs[0] if parameters is None else min(specs, key=lambda spec: abs(spec.parameters - parameters))


def _off(spec: ModelSpec, dims: Dims) -> float:
    """Return the relative difference of the model's parameter count from the row's; 0 if the row has none."""
    return abs(spec.parameters / dims.parameters - 1) if dims.parameters else 0.0


def _positions(spec: ModelSpec, dims: Dims) -> Iterator[ModelSpec]:
    """Yield the model and, if it learns positions, a variant with the row's sequence length."""
    yield spec
    if spec.position_embeddings and dims.seq_len and dims.parameters:
        yield replace(spec, position_embeddings=dims.seq_len, max_seq_len=dims.seq_len)


def _agrees(spec: ModelSpec, dims: Dims) -> bool:
    """Return whether a model of the table matches the row's dimensions, except the vocabulary."""
    stated = (
        (dims.hidden, spec.hidden),
        (dims.layers, spec.layers),
        (dims.heads, spec.heads),
        (dims.kv_heads, spec.kv_heads),
    )
    widths = (None, spec.ffn, spec.dense_ffn or None)  # a row may state that of blocks without experts
    return dims.ffn in widths and all(value is None or value == own for value, own in stated)


def _candidates(dims: Dims, head_dim: int) -> Iterator[ModelSpec]:
    """Yield models with the row's dimensions; the Llama architecture first, as the most common."""
    hidden, layers, heads, ffn, vocab = dims.hidden, dims.layers, dims.heads, dims.ffn, dims.vocab
    if not (hidden and layers and heads and ffn and vocab):
        return
    ties = (dims.tied,) if dims.tied is not None else (False, True)
    plain: tuple[dict[str, Any], ...] = (
        {"gated_mlp": False, "norm": "layer", "o_bias": False},
        {"gated_mlp": False, "norm": "layer", "o_bias": False, "position_embeddings": dims.seq_len or 0},
        {"gated_mlp": False, "norm": "layer", "qkv_bias": True, "o_bias": True, "mlp_bias": True},
    )
    kinds: tuple[dict[str, Any], ...] = ({}, {"qkv_bias": True}, *plain)
    for kind, tied in itertools.product(kinds, ties):
        # a shape that contradicts itself is no candidate
        with contextlib.suppress(UserError):
            yield ModelSpec(
                name=dims.name,
                family="llama",
                layers=layers,
                hidden=hidden,
                heads=heads,
                kv_heads=dims.kv_heads or heads,
                head_dim=head_dim,
                ffn=ffn,
                vocab=vocab,
                tied_embeddings=tied,
                max_seq_len=dims.seq_len or 2048,
                source="the row's own dimensions",
                **kind,
            )


def _normal(name: str) -> str:
    """Normalize a model's name: lower case, without suffixes that publications add or omit."""
    bare = name.lower().rsplit("/", 1)[-1]
    bare = re.sub(r"\(.*?\)", "", bare).replace("meta-llama-", "llama-")
    bare = re.sub(r"[-_ ](instruct|chat|base|pretrain|hf|it|bf16)\b", "", bare)
    return re.sub(r"[^a-z0-9]", "", bare)


@lru_cache(maxsize=1)
def _by_name() -> dict[str, tuple[ModelSpec, ...]]:
    specs_by_key: dict[str, dict[str, ModelSpec]] = {}
    for name in models.names():
        spec = models.find(name)
        for key in (name, *models.aliases(name)):
            specs_by_key.setdefault(_normal(key), {})[name] = spec
    return {key: tuple(specs.values()) for key, specs in specs_by_key.items()}
