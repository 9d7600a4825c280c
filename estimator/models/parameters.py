"""Parameters of a model, counted part by part from its shape.

Each function counts one part of one block, or one part outside of the blocks. Letters: h hidden size, f MLP
width, E experts. The code that each family's parts follow is named in ``estimator/models/architectures.py``.
"""

from __future__ import annotations

from estimator.models.architectures import (
    COMPRESSED_PROJECTIONS,
    LATENT_PROJECTIONS,
    MLP_PROJECTIONS,
    RECURRENT_PROJECTIONS,
)
from estimator.models.shape import ModelShape

# ---------------------------------------------------------------------------------------------------------
# One block


def attention_shapes(m: ModelShape) -> dict[str, tuple[int, int]]:
    """Return one block's attention: each linear layer's name -> (out, in)."""
    if m.compressed_attention:
        return _compressed_shapes(m)
    if not m.latent_attention:
        return {
            "q_proj": (m.q_dim * (2 if m.gated_attention else 1), m.hidden),
            "k_proj": (m.kv_dim, m.hidden),
            "v_proj": (m.v_dim, m.hidden),
            "o_proj": (m.hidden, m.attention_out_dim),
        }
    q_a, q_b, kv_a, kv_b = LATENT_PROJECTIONS
    queries = {"q_proj": (m.q_dim, m.hidden)}
    if m.q_lora_rank:
        queries = {q_a: (m.q_lora_rank, m.hidden), q_b: (m.q_dim, m.q_lora_rank)}
    return {
        **queries,
        # the rotary part of the keys is one for all heads and skips the bottleneck
        kv_a: (m.kv_lora_rank + m.qk_rope_head_dim, m.hidden),
        kv_b: (m.heads * (m.qk_nope_head_dim + m.v_head_dim), m.kv_lora_rank),
        "o_proj": (m.hidden, m.attention_out_dim),
    }


def _compressed_shapes(m: ModelShape) -> dict[str, tuple[int, int]]:
    """Return the linear layers of compressed attention that can have adapters.

    The first output projection is omitted: it multiplies each group of heads by its own part of the weight,
    which PEFT's adapters do not support.
    """
    q_a, q_b = LATENT_PROJECTIONS[:2]
    keys, output = COMPRESSED_PROJECTIONS
    return {
        q_a: (m.q_lora_rank, m.hidden),
        q_b: (m.q_dim, m.q_lora_rank),
        keys: (m.head_dim, m.hidden),
        output: (m.hidden, m.o_groups * m.o_lora_rank),
    }


def _compressors(m: ModelShape) -> list[tuple[int, dict[str, tuple[int, int]], int]]:
    """Return (count, linear layers, other parameters) of both kinds of compressors: position biases and norm.

    A block with an indexer has two series of compressed tokens, whose windows overlap.
    """
    kinds = []
    for count, width, rate in (
        (m.index_layers, 2 * m.head_dim, m.compress_rate),
        (m.heavy_layers, m.head_dim, m.heavy_compress_rate),
    ):
        shapes = dict.fromkeys((COMPRESSED_PROJECTIONS[0], "gate_proj"), (width, m.hidden))
        kinds.append((count, shapes, rate * width + m.head_dim))
    return kinds


def attention_kinds(m: ModelShape) -> list[tuple[int, dict[str, tuple[int, int]], int]]:
    """Return (count, linear layers, other parameters) of each kind of attention block, and of compressors."""
    if m.compressed_attention:
        return [(m.attention_layers, attention_shapes(m), attention_extras(m)), *_compressors(m)]
    if not m.global_head_dim:
        return [(m.attention_layers, attention_shapes(m), attention_extras(m))]
    # Blocks with a window and global blocks differ in size. Reused: blocks without own keys and values.
    # Shared: the values are the keys
    kinds = []
    for head_dim, kv_heads, blocks, reused, shared in (
        (m.head_dim, m.kv_heads, m.sliding_layers, m.reused_kv_sliding, False),
        (
            m.wide_head_dim,
            m.wide_kv_heads,
            m.attention_layers - m.sliding_layers,
            m.reused_kv_layers - m.reused_kv_sliding,
            m.global_keys_are_values,
        ),
    ):
        queries, keys = m.heads * head_dim, kv_heads * head_dim
        outer = {"q_proj": (queries, m.hidden), "o_proj": (m.hidden, queries)}
        key_value = {"k_proj": (keys, m.hidden)} | ({} if shared else {"v_proj": (keys, m.hidden)})
        norm = head_dim if m.qk_norm == "head" else 0
        kinds += [(blocks - reused, outer | key_value, 2 * norm), (reused, outer, norm)]
    return [kind for kind in kinds if kind[0]]


def recurrent_shapes(m: ModelShape) -> dict[str, tuple[int, int]]:
    """Return one recurrent block's linear layers that can have adapters: each one's name -> (out, in).

    Mamba 2's output projection is omitted: its fused kernel reads the weight directly and ignores adapters.
    """
    value = m.recurrent_heads * m.recurrent_head_dim
    if m.recurrence == "gated-delta":
        return {
            "in_proj_qkv": (2 * m.recurrent_groups * m.recurrent_state + value, m.hidden),
            "in_proj_z": (value, m.hidden),
            "in_proj_b": (m.recurrent_heads, m.hidden),
            "in_proj_a": (m.recurrent_heads, m.hidden),
            "out_proj": (m.hidden, value),
        }
    if m.recurrence == "mamba2":
        return {"in_proj": (value + conv_width(m) + m.recurrent_heads, m.hidden)}
    if m.recurrence == "short-conv":
        return {"conv_in_proj": (3 * m.hidden, m.hidden), "conv_out_proj": (m.hidden, m.hidden)}
    return {}


def conv_width(m: ModelShape) -> int:
    """Return the channels of a recurrent block's convolution."""
    if m.recurrence == "short-conv":
        return m.hidden
    return m.recurrent_heads * m.recurrent_head_dim + 2 * m.recurrent_groups * m.recurrent_state


def recurrent_weights(m: ModelShape) -> int:
    """Count the weights of the linear layers of one recurrent block's mixer."""
    output = m.hidden * m.recurrent_heads * m.recurrent_head_dim if m.recurrence == "mamba2" else 0
    return _weights(recurrent_shapes(m)) + output


def recurrent_extras(m: ModelShape) -> int:
    """Count the parameters of one recurrent mixer outside of its linear layers: convolution, decay, norm."""
    convolution = conv_width(m) * m.conv_kernel
    if m.recurrence == "gated-delta":
        return convolution + 2 * m.recurrent_heads + m.recurrent_head_dim
    if m.recurrence == "mamba2":
        return convolution + conv_width(m) + m.recurrent_heads * (3 + m.recurrent_head_dim)
    return convolution


def mixer_weights(m: ModelShape) -> int:
    """Count the weights of linear layers in all blocks except MLPs: attention, recurrence, layer inputs."""
    recurrent = m.recurrent_layers * recurrent_weights(m) if m.recurrent_layers else 0
    attention = sum(count * _weights(shapes) for count, shapes, _ in attention_kinds(m))
    grouped = m.layers * m.q_dim * m.o_lora_rank  # first output projection of compressed attention
    return attention + recurrent + grouped + m.layers * 2 * m.layer_embedding * m.hidden


def _mixers(m: ModelShape) -> int:
    recurrent = m.recurrent_layers * recurrent_extras(m) if m.recurrent_layers else 0
    recurrent += m.index_layers * indexer(m)
    return mixer_weights(m) + sum(count * extras for count, _, extras in attention_kinds(m)) + recurrent


def indexer(m: ModelShape) -> int:
    """Count the parameters of one indexer of sparse attention: queries, key, its norm, weights of heads.

    That of compressed attention compresses its keys: two series, each with a gate and position biases.
    """
    queries = m.q_lora_rank * m.index_heads * m.index_head_dim
    if m.compressed_attention:
        keys = 2 * m.index_head_dim * (2 * m.hidden + m.compress_rate) + m.index_head_dim
        return queries + keys + m.hidden * m.index_heads
    return queries + m.hidden * (m.index_head_dim + m.index_heads) + 2 * m.index_head_dim


def mlp_shapes(m: ModelShape, width: int) -> dict[str, tuple[int, int]]:
    """Return one MLP of that width: each linear layer's name -> (out, in)."""
    gate = {"gate_proj": (width, m.hidden)} if m.gated_mlp else {}
    return {**gate, "up_proj": (width, m.hidden), "down_proj": (m.hidden, width)}


def _weights(shapes: dict[str, tuple[int, int]]) -> int:
    return sum(out_features * in_features for out_features, in_features in shapes.values())


def attention_extras(m: ModelShape) -> int:
    """Count the parameters of attention outside of its matrices: biases, sinks, norms, head gates."""
    count = (m.q_dim + m.kv_dim + m.v_dim) * m.qkv_bias + m.hidden * m.o_bias
    count += m.heads * m.attention_sinks + m.heads * m.hidden * m.head_gates
    count += {"head": 2 * m.head_dim, "all": m.q_dim + m.kv_dim}.get(m.qk_norm, 0)
    return count + m.q_lora_rank + m.kv_lora_rank + m.head_dim * m.compressed_attention


def mlp_weights(m: ModelShape, width: int) -> int:
    """Count the weights of one MLP of that width: 3hf where it is gated, 2hf otherwise."""
    return (3 if m.gated_mlp else 2) * m.hidden * width


def mlp(m: ModelShape, width: int) -> int:
    """Count the parameters of one MLP of that width, biases included."""
    bias = (2 if m.gated_mlp else 1) * width + m.hidden if m.mlp_bias else 0
    return mlp_weights(m, width) + bias


def router(m: ModelShape) -> int:
    """Count the parameters of one block's router: hE, its biases or scales, the gate of shared experts."""
    scales = m.hidden + m.experts if m.router_scales else 0
    return m.experts * (m.hidden + m.router_bias) + (m.hidden if m.shared_expert_gate else 0) + scales


def norm(m: ModelShape) -> int:
    """Count the parameters of one norm over the hidden size."""
    return m.hidden * (2 if m.norm_bias else 1)


def layer(m: ModelShape) -> int:
    """Count the parameters of one block: one with experts if the model has any."""
    shared = mlp(m, m.shared_ffn) if m.shared_ffn else 0
    return _around_mlp(m) + max(m.experts, 1) * mlp(m, m.ffn) + shared + router(m)


def dense_layer(m: ModelShape) -> int:
    """Count the parameters of a block without experts, in a model that has experts."""
    return _around_mlp(m) + mlp(m, m.dense_ffn or m.ffn)


def _around_mlp(m: ModelShape) -> int:
    """Count the parameters of a block without its MLP: mean of attention and recurrent blocks."""
    return (_mixers(m) + wider_mlps(m)) // m.layers + m.norms_per_layer * norm(m) + 2 * hyper_connection(m)


def hyper_connection(m: ModelShape) -> int:
    """Count the parameters that mix the residual streams around one attention or MLP.

    Weights, biases and three scales of the coefficients: n to join n streams, n to spread the result over
    them, n * n between streams (DeepseekV4HyperConnection, transformers 5.23.0).
    """
    coefficients = m.residual_streams * (2 + m.residual_streams)
    return coefficients and coefficients * (m.residual_streams * m.hidden + 1) + 3


def wider_mlps(m: ModelShape) -> int:
    """Count the additional weights of the blocks with a wider MLP."""
    if not m.reused_kv_ffn:
        return 0
    return m.reused_kv_layers * (mlp_weights(m, m.reused_kv_ffn) - mlp_weights(m, m.ffn))


# ---------------------------------------------------------------------------------------------------------
# Outside the blocks


def embeddings(m: ModelShape) -> int:
    """Count the parameters of the embeddings: tokens (also per layer), learned positions, token types."""
    per_layer = m.layer_vocab * m.layers * m.layer_embedding
    return (m.vocab + m.position_embeddings + m.token_types) * m.hidden + per_layer


def head(m: ModelShape) -> int:
    """Count the parameters of the output head if it is a separate matrix; an encoder has none."""
    weight = 0 if m.tied_embeddings or not m.causal else m.vocab * m.hidden
    return weight + m.vocab * m.head_bias


def layer_inputs(m: ModelShape) -> int:
    """Count the parameters that make per-layer inputs from the token embedding: projection and norm."""
    return m.layer_embedding * (m.layers * m.hidden + 1)


def stream_head(m: ModelShape) -> int:
    """Count the parameters that join the residual streams after the last block."""
    return m.residual_streams and m.residual_streams * (m.residual_streams * m.hidden + 1) + 1


def pooler(m: ModelShape) -> int:
    """Count the parameters of BERT's dense layer over the first token; 0 in other models."""
    return m.hidden * (m.hidden + 1) if m.pooler else 0


def model(m: ModelShape) -> int:
    """Count all parameters of the model.

    Includes one norm outside of the blocks: after the last one, or in BERT before the first.
    """
    shared = mlp(m, m.shared_ffn) if m.shared_ffn else 0
    routed = m.expert_layers * (m.experts * mlp(m, m.ffn) + shared + router(m))
    dense = (m.mlp_blocks - m.expert_layers) * mlp(m, (m.dense_ffn or m.ffn) if m.experts else m.ffn)
    blocks = _mixers(m) + wider_mlps(m) + m.layers * m.norms_per_layer * norm(m) + routed + dense
    blocks += m.layers * 2 * hyper_connection(m)
    return embeddings(m) + layer_inputs(m) + blocks + norm(m) + head(m) + pooler(m) + stream_head(m)


def unused_experts(m: ModelShape) -> int:
    """Count the parameters of the experts that a token is not routed to."""
    unused = max(m.experts, 1) - max(m.experts_per_token, 1)
    return m.expert_layers * unused * mlp(m, m.ffn)


# ---------------------------------------------------------------------------------------------------------
# Over the whole model


def mlps(m: ModelShape, *, experts: bool = True) -> list[tuple[int, int]]:
    """Return (count, width) of all MLPs of the model: experts, shared experts, MLPs of dense blocks.

    ``experts=False`` omits routed experts.
    """
    if m.reused_kv_ffn:
        return [(m.mlp_blocks - m.reused_kv_layers, m.ffn), (m.reused_kv_layers, m.reused_kv_ffn)]
    expert_layers = m.mlp_blocks - m.dense_layers
    groups = [
        (expert_layers * max(m.experts, 1) * (experts or not m.experts), m.ffn),
        (expert_layers, m.shared_ffn),
        (m.dense_layers, m.dense_ffn or m.ffn),
    ]
    return [(count, width) for count, width in groups if count and width]


def linears(m: ModelShape) -> int:
    """Count the weights of all linear layers of the blocks, without routers."""
    return mixer_weights(m) + sum(count * mlp_weights(m, width) for count, width in mlps(m))


def prompts(m: ModelShape, *, length: int, start_layer: int, gates: int) -> int:
    """Count the parameters of LLaMA-Adapter's prompts: ``length`` vectors and gates per block from the first.

    Zhang et al. 2023 (arXiv:2303.16199), section 3.1 and 3.2; litgpt/adapter.py.
    """
    return (m.layers - start_layer) * (length * m.hidden + gates)


def outputs(m: ModelShape) -> int:
    """Count the output features of all linear layers: of blocks, routers, and the head, tied or not."""
    blocks = sum(
        count * sum(out_features for out_features, _ in shapes.values())
        for count, shapes, _ in attention_kinds(m)
    )
    blocks += m.layers * m.o_groups * m.o_lora_rank
    blocks += m.recurrent_layers * sum(out_features for out_features, _ in recurrent_shapes(m).values())
    blocks += sum(
        count * sum(out_features for out_features, _ in mlp_shapes(m, width).values())
        for count, width in mlps(m)
    )
    return blocks + m.expert_layers * m.experts + m.vocab * m.causal


def norms(m: ModelShape) -> int:
    """Count the parameters of all norms over the hidden size."""
    return (m.layers * m.norms_per_layer + 1) * norm(m)


def adapted(m: ModelShape, group: tuple[str, ...], *, experts: bool) -> list[tuple[int, int, int]]:
    """Return (count, out, in) of the matrices with adapters: one name, in all blocks.

    ``group``: projections fused into the matrix. ``experts=False`` omits routed experts.
    """
    if group == ("pooler",):
        return [(1, m.hidden, m.hidden)]
    blocks = [(count, shapes) for count, shapes, _ in attention_kinds(m) if group[0] in shapes]
    if group[0] in RECURRENT_PROJECTIONS:
        blocks = [(m.recurrent_layers, recurrent_shapes(m))]
    if group[0] in MLP_PROJECTIONS:
        blocks += [(count, mlp_shapes(m, width)) for count, width in mlps(m, experts=experts)]
    return [(count, sum(shapes[name][0] for name in group), shapes[group[0]][1]) for count, shapes in blocks]


def lora(m: ModelShape, rank: int, group: tuple[str, ...], *, experts: bool = True) -> int:
    """Count the parameters of the adapters on one matrix of every block.

    Two matrices each, (rank, in) and (out, rank): Hu et al. 2021 (arXiv:2106.09685), section 4.1.
    """
    return sum(
        count * rank * (out_features + in_features)
        for count, out_features, in_features in adapted(m, group, experts=experts)
    )


def expert_lora(m: ModelShape, rank: int) -> int:
    """Count the parameters of adapters on the two expert tensors of a block in transformers 5.

    The first tensor fuses gate and up. Each expert of a tensor has two matrices, (rank, in) and (out, rank):
    peft/tuners/lora/layer.py, ParamWrapper.
    """
    if not m.experts:
        return 0
    joined = m.ffn * (2 if m.gated_mlp else 1)
    return m.expert_layers * m.experts * rank * (m.hidden + joined + m.ffn + m.hidden)


def magnitudes(m: ModelShape, group: tuple[str, ...], *, experts: bool = True) -> int:
    """Count the magnitudes that DoRA adds: one for each output (Liu et al. 2024, arXiv:2402.09353)."""
    return sum(count * out_features for count, out_features, _ in adapted(m, group, experts=experts))
