"""Activations that blocks save for the backward pass, in bytes per token, with and without checkpointing.

The manual count follows Korthikanti et al. 2022 (arXiv:2205.05198), section 4, with flash attention and a
gated MLP; how many copies each engine's code makes is in ``data/implementations.csv``. Letters: h hidden
size, f MLP width, q and kv the widths of all query and all key heads.
"""

from __future__ import annotations

from estimator.memory import implementations
from estimator.memory.activations.adapters import (
    adapter_input_bytes,
    prompt_attention_bytes,
    rescaled_output_bytes,
)
from estimator.memory.activations.attention import RESIDUAL_DROPOUT, attention_bytes
from estimator.memory.activations.compiled import compiled_bytes
from estimator.memory.activations.mlp import mean_mlp_bytes
from estimator.memory.activations.norms import input_divisor, norm_bytes
from estimator.memory.recurrence import mixer_bytes
from estimator.memory.shape import shape_of
from estimator.memory.states import compute_size
from estimator.models import ModelSpec
from estimator.setup import Setup

# float8 products that are not compiled keep each product's input in several types. Bytes an element beyond
# bf16, from torchtitan@2271b6386: the same run eager and compiled.
FP8_EAGER_BYTES = 3.5
# Their blocks have norms after attention and MLP only (transformers 5.23, models/*/modeling_*.py).
NORMS_AFTER = ("exaone4", "olmo2", "olmo3")


def block_bytes(setup: Setup) -> float:
    """Return the mean bytes saved per block and token without checkpointing."""
    model = setup.model
    dense = model.mlp_blocks - model.expert_layers
    parts = _outside_mlp(setup) + mean_mlp_bytes(setup, dense / model.layers)
    if setup.compile:
        parts = compiled_bytes(setup, dense / model.layers)
    if setup.prompts:
        parts += prompt_attention_bytes(setup) + rescaled_output_bytes(setup)
    elif setup.adapters:
        parts += adapter_input_bytes(setup)
    return parts + _fp8_eager(setup)


def _fp8_eager(setup: Setup) -> float:
    if setup.fp8 not in ("tensorwise", "rowwise") or setup.compile:
        return 0.0
    return FP8_EAGER_BYTES * _input_widths(setup.model) / setup.tensor


def _outside_mlp(setup: Setup) -> float:
    """Return the bytes per token that one block saves outside its MLP: norms, attention and their inputs."""
    model, code, size = setup.model, implementations.of(setup), compute_size(setup)
    whole_weights = not setup.adapters
    sequence = setup.tensor if setup.sequence_parallel else 1
    norm = norm_bytes(setup, trained=setup.trains_norms)
    norms = model.norms_per_layer
    if model.parallel_residual and model.norm == "layer":
        norms = 1  # both read the block's input
    saved = norms * model.hidden * norm / sequence
    attention = model.attention_layers / model.layers
    if model.qk_norm == "unweighted":  # Llama 4's fp32 copies, in blocks with rotary positions
        saved += 4 * (model.q_dim + model.kv_dim) * model.sliding_layers / model.layers / setup.tensor
    elif model.qk_norm:
        saved += (
            attention * (model.q_dim + model.kv_dim) * norm_bytes(setup, trained=whole_weights) / setup.tensor
        )
    if model.global_head_dim:  # the norm of the values has no weight
        saved += attention * model.v_dim * norm_bytes(setup, trained=False) / setup.tensor
    if model.layer_embedding:
        saved += _layer_inputs(setup, size)
    # the norms' results, which the first products of attention and MLP read
    inputs = min(model.norms_per_layer, 2)
    if whole_weights:
        saved += inputs * model.hidden * size / input_divisor(setup)
        if setup.precision.endswith("autocast"):  # each product casts its input for itself
            saved += 5 * model.hidden * 2 - inputs * model.hidden * size
    saved += attention * attention_bytes(setup, code, size) + _recurrence(setup, size) + _streams(setup, size)
    if not model.causal or model.family in RESIDUAL_DROPOUT:
        saved += 2 * model.hidden  # dropout's masks, one byte an element
    return saved


def _layer_inputs(setup: Setup, size: int) -> float:
    """Return the bytes per token of a block's per-layer embedding: embedding, gate, activation and product.

    The gate's input is saved if its weight is trained. Traced (transformers 5.23, torch 2.13, bf16).
    """
    model = setup.model
    return 8 * size * model.layer_embedding + (0 if setup.adapters else size * model.hidden)


def _recurrence(setup: Setup, size: int) -> float:
    """Return the mean bytes per token and block that the mixers of recurrent blocks save."""
    model = setup.model
    if not model.recurrent_layers:
        return 0.0
    return mixer_bytes(setup, size) * model.recurrent_layers / model.layers


def _streams(setup: Setup, size: int) -> float:
    """Return the mean bytes per token of a block's two hyper-connections; 0 without them.

    Each saves the residual streams, their fp32 copy and its normalized form (whose weight may be frozen), the
    numerators and denominators of the mixing matrix's normalizations, the other coefficients, and the result
    of attention or MLP (transformers 5.23, DeepseekV4HyperConnection). The first one saves nothing if the
    embedding and its weights are frozen.
    """
    model, streams = setup.model, setup.model.residual_streams
    if not streams:
        return 0.0
    saved = _joined_streams(setup, size) + size * model.hidden
    divisions = 2 * model.sinkhorn_iterations - 1
    coefficients = streams * (streams + 2)
    connections = 2 - (1 / model.layers if setup.adapters else 0)
    return connections * (saved + 4 * (divisions * streams * (streams + 1) + 2 * coefficients))


def _joined_streams(setup: Setup, size: int) -> int:
    """Return the bytes per token that the join of the residual streams to one saves."""
    normalized = 0 if setup.adapters else 4
    fp32_copy = 4 if size < 4 else 0
    return setup.model.residual_streams * setup.model.hidden * (size + fp32_copy + normalized)


def _input_widths(model: ModelSpec) -> int:
    """Return the sum of the input widths of a block's linear layers."""
    return sum(in_features for _, in_features in shape_of(model).linear_shapes.values())


def boundary_bytes(setup: Setup) -> float:
    """Return the bytes per token of one block's input, the only tensor that full checkpointing saves."""
    sequence = setup.tensor if setup.sequence_parallel else 1
    is_fp32 = setup.precision.endswith("autocast") or setup.upcast_frozen
    streams = max(setup.model.residual_streams, 1)
    return (4 if is_fp32 else compute_size(setup)) * streams * setup.model.hidden / sequence


def selective_bytes(setup: Setup) -> float:
    """Return the bytes per block and token that selective checkpointing saves in addition to the input.

    The results of attention and of every second matrix product: q, v, gate and down of the seven
    (torchtitan/distributed/activation_checkpoint.py). With tensor parallel also both reduce-scatters'
    results; down's is a partial sum over the whole sequence.
    """
    model, size = setup.model, compute_size(setup)
    width = model.ffn
    if model.experts:
        width = model.experts_per_token * model.ffn + model.shared_ffn
    saved = (model.q_dim + model.v_dim + width + model.attention_out_dim) * size / setup.tensor
    saved += 4 * model.heads / setup.tensor + model.hidden * size
    if setup.tensor > 1 and implementations.of(setup).scattered_kept:
        saved += 2 * model.hidden * size / setup.tensor
    return saved + _fp8_eager(setup)


def frozen_input_bytes(setup: Setup) -> float:
    """Return the bytes per token of ``block_bytes`` that the first block's first norm does not save.

    Its input is the embedding, which has no gradient if the embedding is frozen.
    """
    model = setup.model
    trained = not setup.adapters or setup.trains_norms or "embed_tokens" in setup.trained_modules
    if trained or setup.prompts or setup.compile or model.residual_streams or model.family in NORMS_AFTER:
        return 0.0
    sequence = setup.tensor if setup.sequence_parallel else 1
    return model.hidden * norm_bytes(setup, trained=False) / sequence


def backward_bytes(setup: Setup) -> float:
    """Return the bytes per token of the gradients that are live during one block's backward pass.

    Two tensors of the MLP's width and two of the hidden size; tensor parallelism divides the latter only
    once they are reduced.
    """
    model, size = setup.model, compute_size(setup)
    width = max(model.ffn * max(model.experts_per_token, 1), model.q_dim)
    return 2 * size * width / setup.tensor + 2 * size * model.hidden / input_divisor(setup)


def head_input_bytes(setup: Setup) -> float:
    """Return the bytes per token that the last norm and the output head save."""
    model, size = setup.model, compute_size(setup)
    sequence = setup.tensor if setup.sequence_parallel else 1
    head_input = model.hidden * size * (1 if not setup.adapters else 0)
    norm = norm_bytes(setup, trained=setup.trains_norms)
    joined = _joined_streams(setup, size)
    return (model.hidden * (norm + size) + joined) / sequence + head_input
