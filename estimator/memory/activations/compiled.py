"""Activations of blocks that torch.compile compiles."""

from __future__ import annotations

from estimator.memory import implementations
from estimator.memory.activations.adapters import fused_names
from estimator.memory.activations.attention import RESIDUAL_DROPOUT, expands_keys
from estimator.memory.activations.norms import input_divisor
from estimator.memory.states import compute_size
from estimator.models import ModelSpec
from estimator.setup import Setup

# What torch.compile's partitioner keeps of a block: 8 B for each of h, 2 B for queries, keys, values and the
# result of attention, 6 f. Traced with AOTAutograd (torch 2.13), keys and values repeated for all query
# heads: Llama 3.2 3B 32h, Llama 3 8B 37h, the same for LoRA. Blocks of four norms (Gemma 2 and 3) keep 10,
# GLM-4's 12, and blocks of one norm (Phi) 6. tests/launchers/engines/fsdp2/test_kernels.py traces them.
COMPILED_HIDDEN, COMPILED_QUERY, COMPILED_MLP = 8, 4, 6
COMPILED_FOUR_NORMS, COMPILED_ONE_NORM, COMPILED_GLM4 = 10, 6, 12


def compiled_bytes(setup: Setup, dense: float) -> float:
    """Return the bytes saved per compiled block and token; ``dense``: share of dense blocks."""
    model = setup.model
    widths = dense * ((model.dense_ffn or model.ffn) if model.experts else model.ffn)
    if model.experts:
        widths += (
            model.expert_layers / model.layers * (model.experts_per_token * model.ffn + model.shared_ffn)
        )
    double = compute_size(setup) // 2
    saved = _compiled_hidden(model) * model.hidden / (setup.tensor if setup.sequence_parallel else 1)
    if setup.tensor > 1 and input_divisor(setup) == 1:
        saved += 4 * model.hidden * (1 - 1 / setup.tensor)  # inputs of both products stay gathered
    query = model.attention_out_dim
    keys_and_values = 2 * query if expands_keys(setup) else min(model.kv_dim + model.v_dim, 2 * query)
    gated = COMPILED_MLP if model.gated_mlp else 4
    saved += (COMPILED_QUERY * query + 2 * keys_and_values + gated * widths) / setup.tensor
    if implementations.of(setup).family_code:
        saved += _compiled_in_transformers(setup)
    return double * saved + 4 * model.heads / setup.tensor


def _compiled_hidden(model: ModelSpec) -> int:
    """Return the bytes for each element of the hidden size that a compiled block saves, in 16 bits."""
    if model.family == "glm4":
        return COMPILED_GLM4
    if model.norms_per_layer == 4:
        return COMPILED_FOUR_NORMS
    return COMPILED_ONE_NORM if model.norms_per_layer == 1 else COMPILED_HIDDEN


def _compiled_in_transformers(setup: Setup) -> float:
    """Return the bytes per token, in 16 bits, that compiled blocks of some families save in addition.

    Queries and keys before their norms; the fused projection whose view the values are; masks of dropout.
    Experts save their inputs and results for each token and expert; frozen ones save no inputs, neither the
    first product's nor the second's. A gated shared expert saves its result.
    """
    model = setup.model
    joined = "v_proj" in fused_names(model)
    saved = 2.0 * (model.q_dim + model.kv_dim) * (bool(model.qk_norm) + joined)
    if model.family in RESIDUAL_DROPOUT:
        saved += 2 * model.hidden
    if model.experts:
        trained = not setup.adapters or setup.copies_experts
        experts = 2 * model.experts_per_token * model.hidden + 4 * model.experts
        experts += 2 * model.experts_per_token * (model.hidden if trained else -model.ffn)
        if not trained and not model.shared_ffn:
            experts -= 2 * model.hidden
        if model.shared_expert_gate:
            experts += 2 * model.hidden
        saved += experts * model.expert_layers / model.layers
    return saved
