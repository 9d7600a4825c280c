"""Activations that the mixers of recurrent blocks save, in bytes per token.

Counted in the PyTorch code of transformers 5.23, which runs if the packages with fused kernels are missing,
by the saved tensors of a trace. Letters: v width of all value channels, k of all key channels, r of the key
channels repeated for each value head, h heads.
"""

from __future__ import annotations

from estimator.models import ModelSpec
from estimator.setup import Setup

# Tokens per chunk (models/qwen3_next/modeling_qwen3_next.py, torch_chunk_gated_delta_rule)
DELTA_CHUNK = 64
# Tokens per chunk of Mamba 2 in published models (models/nemotron_h/configuration_nemotron_h.py,
# models/granitemoehybrid/configuration_granitemoehybrid.py)
MAMBA2_CHUNKS = {"nemotron_h": 128, "granitemoehybrid": 256}


def mixer_bytes(setup: Setup, size: int) -> float:
    """Return the bytes per token that one recurrent mixer saves; ``size``: bytes of the compute type."""
    model = setup.model
    if model.recurrence == "short-conv":  # both gates and their products, the convolution and its result
        return 6.0 * size * model.hidden
    count = _gated_delta if model.recurrence == "gated-delta" else _mamba2
    return count(model, setup.seq_len, trained=not setup.adapters)


def _gated_delta(model: ModelSpec, seq_len: int, *, trained: bool) -> float:
    """Return the bytes per token of the gated delta rule (transformers' torch_chunk_gated_delta_rule).

    ``trained``: whether the weights of the mixer are trained.
    """
    heads = model.recurrent_heads
    values = heads * model.recurrent_head_dim
    keys = model.recurrent_groups * model.recurrent_state
    repeated_keys = heads * model.recurrent_state
    # input and result of the convolution, in 16 bits; then fp32
    saved = 2.0 * 2 * (values + 2 * keys)
    # queries and keys before and after their norm, keys times beta, solved keys, both times their decay
    saved += 4 * 8 * repeated_keys
    # values, solved values, corrected values
    saved += 4 * 3 * values
    # norm: fp32 input, gate and its activation; 16-bit result and its product with the gate
    saved += (4 * 3 + 2 * 2) * values
    # decays, both products of a chunk before and after their decays
    saved += 4 * 5 * heads * DELTA_CHUNK
    # norms of queries and keys, beta in both types, decay's input, three exponents, the norm's variance
    saved += heads * (4 * 8 + 2)
    # each chunk's state
    saved += 4 * repeated_keys * model.recurrent_head_dim * -(-seq_len // DELTA_CHUNK) / seq_len
    if trained:  # the norm's 16-bit result before its weight; the softplus that A scales
        saved += 2 * values + 4 * heads
    return saved


def _mamba2(model: ModelSpec, seq_len: int, *, trained: bool) -> float:
    """Return the bytes per token of Mamba 2 (transformers' mamba2_chunk_scan)."""
    heads, chunk = model.recurrent_heads, MAMBA2_CHUNKS[model.family]
    values = heads * model.recurrent_head_dim
    groups = model.recurrent_groups * model.recurrent_state
    repeated_groups = heads * model.recurrent_state
    chunks = -(-seq_len // chunk)
    # Rows of several chunks are copied for both products with the values, and for that with the states
    copies = 2 if chunks > 1 else 1
    # result of the input projection, and of the convolution, in 16 bits; then fp32
    saved = 2.0 * (2 * values + 2 * groups + heads) + 2 * (values + 2 * groups)
    # values; norm: gate, its activation, product
    saved += 4 * 4 * values
    padded = chunks * chunk / seq_len
    # states' part of the result, result
    saved += padded * 4 * 2 * values
    # values times the time step; B, B and C of the first product, B with decay, C of the last product
    saved += padded * (4 * copies * values + 4 * 5 * repeated_groups)
    # decays, product of C and B, both multiplied
    saved += padded * 4 * 3 * heads * chunk
    # time step before and after softplus, in fp32, two exponents; variance of the norm
    saved += heads * (2 * 2 + 4 + 2 * 4) + 4 * model.recurrent_groups
    # states before the recurrence, with an initial one, and after it
    states = chunks + 1 + (chunks if chunks > 1 else chunks + 1)
    saved += 4 * repeated_groups * model.recurrent_head_dim * states / seq_len
    if trained:  # values for D, time step for A, the norm's result before its weight, the projection's input
        saved += padded * 4 * values + 4 * heads + 4 * values + 2 * values
    return saved
