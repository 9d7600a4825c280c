"""Activations of attention: queries, keys, values, scores and the result, by kernel and family."""

from __future__ import annotations

from estimator.memory import implementations
from estimator.memory.activations.norms import norm_bytes
from estimator.setup import Setup

# Scores that are capped before the softmax, which flash kernels of torch cannot do (Gemma team 2024,
# arXiv:2408.00118, section 2).
SOFT_CAPPED = ("gemma2",)
# transformers computes the scores of these explicitly: with sinks, or as their code has no other way
# (transformers 5.4, models/*/modeling_*.py: no _supports_sdpa).
EAGER_ALONE = ("deepseek_v4", "gpt_oss", "gptj", "mpt")
# One key head is broadcast over all query heads, which only torch's unfused kernel does, in fp32; more key
# heads are repeated for all query heads. Each block casts the mask, which rows without padding have as well
# (transformers 5.23, models/falcon/modeling_falcon.py; torch 2.13, _scaled_dot_product_attention_math).
BROADCAST_KEYS = ("falcon",)
# Their softmax is in 16 bits, and its slice without the sinks is a view (transformers 5.23,
# models/gpt_oss/modeling_gpt_oss.py, eager_attention_forward).
HALF_SOFTMAX = ("gpt_oss",)
# Dropout of the results of attention and MLP is 0.1 in their published configurations (transformers 5.23,
# models/seed_oss/configuration_seed_oss.py).
RESIDUAL_DROPOUT = ("seed_oss",)


def attention_bytes(setup: Setup, code: implementations.Implementation, size: int) -> float:
    """Return the bytes per token that the attention of one block saves.

    Flash attention saves queries, keys, values, its result and the fp32 logsumexp of each head (Dao et al.
    2022, arXiv:2205.14135); the result is the output projection's input.
    """
    model = setup.model
    out_dim = model.attention_out_dim
    if model.compressed_attention:
        return _compressed_attention(setup, size)
    if model.latent_attention:
        # keys are put together; values are a view of the projection that both come from
        joined = model.heads * (model.qk_nope_head_dim + model.v_head_dim)
        latent_bytes = norm_bytes(setup, trained=not setup.adapters) + (0 if setup.adapters else size)
        latents = (model.q_lora_rank + model.kv_lora_rank) * latent_bytes
        saved = size * (2 * model.q_dim + out_dim + joined) + latents
        if setup.variable_length and model.head_dim > model.v_head_dim:
            # The kernel saves values and result at the width of the keys, and these are copies
            saved += size * (2 * model.q_dim - joined)
        elif model.head_dim == model.v_head_dim:
            # Of heads of one size flash attention's result has the layout of the queries, which are put
            # together by head; the output projection's input is a copy of it. Heads of two sizes use the
            # memory-efficient kernel, whose result needs none.
            saved += size * out_dim
    else:
        expanded = expands_keys(setup)
        expanded |= _explicit_scores(setup)
        expanded |= model.family in BROADCAST_KEYS and code.family_code
        keys, values = model.kv_dim, model.v_dim
        if code.joined_qkv and (model.kv_heads == model.heads or not expanded):
            values += model.q_dim + model.kv_dim  # the view keeps all of the joined projection
        if expanded and model.kv_heads < model.heads:
            keys, values = max(model.q_dim, keys), max(out_dim, values)
        saved = size * (model.q_dim + keys + values + out_dim)
    if broadcasts_keys(
        setup
    ):  # fp32 copies of queries, and of keys and values for all query heads; the softmax
        return (4 * (2 * model.q_dim + out_dim + model.heads * setup.seq_len) + size * out_dim) / setup.tensor
    if code.result_copied and not setup.adapters:
        saved += size * out_dim
    if model.family in BROADCAST_KEYS and code.family_code:
        saved += size * setup.seq_len
    saved += 4 * model.heads
    if model.gated_attention:  # the gate, its sigmoid, and attention's result before it
        saved += 3 * size * model.q_dim
    capped = model.family in SOFT_CAPPED and code.kept_scores
    if setup.attention == "math" or capped or _explicit_scores(setup):
        # the fp32 softmax of the scores and its 16-bit copy for each pair of positions; the cap's tanh
        softmax = 0 if model.family in HALF_SOFTMAX else 4
        saved += model.heads * setup.seq_len * (size + softmax + (size if capped else 0))
    return saved / setup.tensor


def broadcasts_keys(setup: Setup) -> bool:
    """Return whether torch's unfused kernel computes attention, as one key head serves all query heads."""
    model = setup.model
    one_key = model.family in BROADCAST_KEYS and model.kv_heads == 1 < model.heads
    return one_key and implementations.of(setup).family_code


def _compressed_attention(setup: Setup, size: int) -> float:
    """Return the mean bytes per token that compressed attention saves, in transformers' own code (5.23).

    Queries before and after their norm and rotation; the keys of the window's and the compressed tokens,
    repeated for all heads, once as keys and once as values; the softmax of all scores. For each token that is
    compressed, its value and its weight in fp32 and in the compute type. If weights are trained, also the
    inputs of the second query projection and of both output projections.
    """
    model = setup.model
    trained = not setup.adapters
    fp32_copy = 4 if size < 4 else 0
    added = model.compressed_tokens
    norm = norm_bytes(setup, trained=trained)
    saved = model.q_dim * (2 * size + fp32_copy + 2 * size * (1 + added))
    saved += model.heads * size * (setup.seq_len * (1 + added) + 1)
    saved += norm * (model.q_lora_rank + model.head_dim * (1 + added))
    elements = model.head_dim * (2 * model.index_layers + model.heavy_layers) / model.layers
    saved += elements * (2 * size + fp32_copy)
    if trained:
        saved += size * (model.q_lora_rank + model.attention_out_dim + model.o_groups * model.o_lora_rank)
    return saved / setup.tensor


def _explicit_scores(setup: Setup) -> bool:
    """Return whether the family's own code computes the scores, without a kernel."""
    eager_alone = setup.model.family in EAGER_ALONE and implementations.of(setup).kept_scores
    return eager_alone and not setup.variable_length


def expands_keys(setup: Setup) -> bool:
    """Return whether keys and values are repeated for all query heads."""
    expand_kv = implementations.of(setup).expand_kv
    padded = not (setup.fixed_length or setup.variable_length)
    return expand_kv == "always" or (expand_kv == "padded" and padded)
