"""Quantized formats of published checkpoints, and the cost of their one-time conversion to bf16."""

from __future__ import annotations

from dataclasses import dataclass

from estimator.models import parameters
from estimator.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFormat:
    """A ``quant_method`` of config.json that is dequantized on CPUs before training.

    ``bytes_each`` are bytes of a quantized weight with its scales; ``rate`` the weights dequantized in a
    second on one core.
    """

    bytes_each: float
    rate: float
    title: str


# Rates: benchmarks/dequantize.py, one core of a busy x86-64 cloud machine, torch 2.13, November 2026; a quiet
# one has up to three times as much
FORMATS: dict[str, WeightFormat] = {
    "mxfp4": WeightFormat(bytes_each=0.5 + 1 / 32, rate=11e6, title="MXFP4"),
    "fp8": WeightFormat(bytes_each=1.0, rate=48e6, title="FP8"),
    "fp4": WeightFormat(bytes_each=0.5 + 1 / 32, rate=11e6, title="FP4 and FP8"),  # read like MXFP4
    "awq": WeightFormat(bytes_each=0.5 + 2.5 / 128, rate=15e6, title="AWQ"),
    "gptq": WeightFormat(bytes_each=0.5 + 2.5 / 128, rate=8e6, title="GPTQ"),
    "compressed-tensors": WeightFormat(bytes_each=0.5 + 2 / 32, rate=19e6, title="compressed-tensors"),
    "bitsandbytes": WeightFormat(bytes_each=0.5 + 4 / 64, rate=76e6, title="bitsandbytes"),
}
BF16_BYTES = 2


def format_of(model: ModelSpec) -> WeightFormat | None:
    """Return the quantized format of the published files; None for 16 or 32 bits and other formats."""
    return FORMATS.get(model.quantized_weights)


def file_bytes(model: ModelSpec) -> int:
    """Return the bytes of the published files, with embeddings, norms and head in bf16."""
    published = format_of(model)
    if published is None:
        return BF16_BYTES * model.stored_parameters
    linear = parameters.linears(model)
    return int(published.bytes_each * linear) + BF16_BYTES * (model.stored_parameters - linear)


def conversion_seconds(model: ModelSpec, cores: int) -> float:
    """Seconds that ``cores`` cores take to dequantize the published files; 0 for 16 and 32 bits."""
    published = format_of(model)
    return 0.0 if published is None else parameters.linears(model) / (published.rate * max(cores, 1))
