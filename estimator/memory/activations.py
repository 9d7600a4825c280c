"""Activations that blocks save for the backward pass, in bytes per token, with and without checkpointing.

The manual count follows Korthikanti et al. 2022 (arXiv:2205.05198), section 4, with flash attention and a
gated MLP; how many copies each engine's code makes is in ``data/implementations.csv``. Letters: h hidden
size, f MLP width, q and kv the widths of all query and all key heads.
"""

from __future__ import annotations

from estimator.memory import implementations
from estimator.memory.recurrence import mixer_bytes
from estimator.memory.shape import shape_of
from estimator.memory.states import compute_size
from estimator.models import ModelSpec
from estimator.models.architectures import family_of
from estimator.models.parameters import recurrent_shapes
from estimator.setup import Setup

# What torch.compile's partitioner keeps of a block: 8 B for each of h, 2 B for queries, keys, values and the
# result of attention, 6 f. Traced with AOTAutograd (torch 2.13), keys and values repeated for all query
# heads: Llama 3.2 3B 32h, Llama 3 8B 37h, the same for LoRA. Blocks of four norms (Gemma 2 and 3) keep 10,
# GLM-4's 12, and blocks of one norm (Phi) 6. tests/launchers/engines/fsdp2/test_kernels.py traces them.
COMPILED_HIDDEN, COMPILED_QUERY, COMPILED_MLP = 8, 4, 6
COMPILED_FOUR_NORMS, COMPILED_ONE_NORM, COMPILED_GLM4 = 10, 6, 12

# float8 products that are not compiled keep each product's input in several types. Bytes an element beyond
# bf16, from torchtitan@2271b6386: the same run eager and compiled.
FP8_EAGER_BYTES = 3.5

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
# transformers multiplies every token with every expert, by zero where it is not routed (transformers 5.23,
# models/llama4/modeling_llama4.py, Llama4TextMoe).
ALL_EXPERTS = ("llama4_text",)
# Their routers' products are in fp32 (transformers 5.23, models/*/modeling_*.py, class *TopkRouter): a
# trained weight needs an fp32 copy of the input.
FP32_ROUTERS = (
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "ernie4_5_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "nemotron_h",
)
# Their blocks have norms after attention and MLP only (transformers 5.23, models/*/modeling_*.py).
NORMS_AFTER = ("exaone4", "olmo2", "olmo3")


def block_bytes(setup: Setup) -> float:
    """Return the mean bytes saved per block and token without checkpointing."""
    model = setup.model
    dense = model.mlp_blocks - model.expert_layers
    parts = _outside_mlp(setup) + _mean_mlp(setup, dense / model.layers)
    if setup.compile:
        parts = _compiled(setup, dense / model.layers)
    if setup.prompts:
        parts += _prompt_attention(setup) + _rescaled_outputs(setup)
    elif setup.adapters:
        parts += _adapter_inputs(setup)
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
    norm = _norm_bytes(setup, trained=setup.trains_norms)
    norms = model.norms_per_layer
    if model.parallel_residual and model.norm == "layer":
        norms = 1  # both read the block's input
    saved = norms * model.hidden * norm / sequence
    attention = model.attention_layers / model.layers
    if model.qk_norm == "unweighted":  # Llama 4's fp32 copies, in blocks with rotary positions
        saved += 4 * (model.q_dim + model.kv_dim) * model.sliding_layers / model.layers / setup.tensor
    elif model.qk_norm:
        saved += (
            attention
            * (model.q_dim + model.kv_dim)
            * _norm_bytes(setup, trained=whole_weights)
            / setup.tensor
        )
    if model.global_head_dim:  # the norm of the values has no weight
        saved += attention * model.v_dim * _norm_bytes(setup, trained=False) / setup.tensor
    if model.layer_embedding:
        saved += _layer_inputs(setup, size)
    # the norms' results, which the first products of attention and MLP read
    inputs = min(model.norms_per_layer, 2)
    if whole_weights:
        saved += inputs * model.hidden * size / _gathered(setup)
        if setup.precision.endswith("autocast"):  # each product casts its input for itself
            saved += 5 * model.hidden * 2 - inputs * model.hidden * size
    saved += attention * _attention(setup, code, size) + _recurrence(setup, size) + _streams(setup, size)
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


def _norm_bytes(setup: Setup, *, trained: bool) -> int:
    """Return the bytes per element that one norm saves; ``trained``: whether its weight is trained."""
    code = implementations.of(setup)
    if setup.model.norm == "layer":
        return compute_size(setup)  # torch's own kernel reads its input again
    if setup.precision == "fp32" or setup.precision.endswith("autocast"):
        return 4 + (code.norm_output_fp32 if trained else 0)
    return code.norm_input + (code.norm_output if trained else 0)


def _gathered(setup: Setup) -> int:
    """Return the factor by which tensor parallelism divides the saved inputs of matrix products.

    torch's DTensor saves them gathered over the sequence, Megatron gathers them again (arXiv:2205.05198,
    section 4.2.2).
    """
    gathers_input = setup.engine == "megatron" and setup.sequence_parallel
    return setup.tensor if gathers_input else 1


def _attention(setup: Setup, code: implementations.Implementation, size: int) -> float:
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
        latent_bytes = _norm_bytes(setup, trained=not setup.adapters) + (0 if setup.adapters else size)
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
        expanded = _expands_keys(setup)
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
    norm = _norm_bytes(setup, trained=trained)
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


def _expands_keys(setup: Setup) -> bool:
    """Return whether keys and values are repeated for all query heads."""
    expand_kv = implementations.of(setup).expand_kv
    padded = not (setup.fixed_length or setup.variable_length)
    return expand_kv == "always" or (expand_kv == "padded" and padded)


def _mean_mlp(setup: Setup, dense: float) -> float:
    """Return the bytes saved by the MLP per block and token: mean over blocks with and without experts."""
    model = setup.model
    dense_width = (model.dense_ffn or model.ffn) if model.experts else model.mean_ffn
    saved = dense * _mlp(setup, dense_width)
    if model.experts:
        routed = model.experts if model.family in ALL_EXPERTS else model.experts_per_token
        size = compute_size(setup)
        experts = _mlp(setup, routed * model.ffn)
        # each expert's input, if its weights need it, and its result before weighting
        trained = not setup.adapters or setup.copies_experts
        # the loop's adapters with these names are on shared experts
        trained |= not (setup.prompts or setup.runs_loop) and bool(_IN_MLP & set(setup.lora_targets))
        inputs = (2 if trained else 1) * routed * model.hidden * size
        routing = 8 * model.experts  # router's logits and their softmax
        if model.router_scales:  # its norm's fp32 input, its result and the scaled one
            routing += (4 + 2 * size) * model.hidden
        if model.family in FP32_ROUTERS and size < 4 and not setup.adapters:
            routing += 4 * model.hidden
        if model.shared_expert_gate:  # scales the result
            routing += size * model.hidden
        experts += (inputs + routing) / _gathered(setup) + _mlp(setup, model.shared_ffn)
        saved += model.expert_layers / model.layers * experts
    return saved


def _mlp(setup: Setup, width: int) -> float:
    """Return the bytes per token that an MLP of this width saves.

    Gated: gate, its activation, up and their product (8f in 16 bits); the product only if down_proj is
    trained or has an adapter. Otherwise: input and result of the activation (4f). A quantized base with fp32
    norms computes its MLP in fp32 (bitsandbytes' Linear4bit returns its input's type).
    """
    size = compute_size(setup)
    last = size if not setup.adapters else 0
    saved = (3 * size if setup.model.gated_mlp else size) * width
    saved += implementations.of(setup).activation_copies * size * width
    if setup.upcast_frozen:
        saved *= 2
    return (saved + last * width) / setup.tensor


def _compiled(setup: Setup, dense: float) -> float:
    """Return the bytes saved per compiled block and token; ``dense``: share of dense blocks."""
    model = setup.model
    widths = dense * ((model.dense_ffn or model.ffn) if model.experts else model.ffn)
    if model.experts:
        widths += (
            model.expert_layers / model.layers * (model.experts_per_token * model.ffn + model.shared_ffn)
        )
    double = compute_size(setup) // 2
    saved = _compiled_hidden(model) * model.hidden / (setup.tensor if setup.sequence_parallel else 1)
    if setup.tensor > 1 and _gathered(setup) == 1:
        saved += 4 * model.hidden * (1 - 1 / setup.tensor)  # inputs of both products stay gathered
    query = model.attention_out_dim
    keys_and_values = 2 * query if _expands_keys(setup) else min(model.kv_dim + model.v_dim, 2 * query)
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
    joined = "v_proj" in _fused_names(model)
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


def _adapter_inputs(setup: Setup) -> float:
    """Return the bytes of adapters per block and token: inputs, and results between their two matrices.

    In torchtune, and in PEFT with adapters of the weights' type, adapters on the same input share it. Dropout
    saves a mask of one byte and the result for each target. PEFT's fp32 adapters cast their input for each
    target (peft/tuners/lora/layer.py, _cast_input_dtype). DoRA saves both results for scaling
    (peft/tuners/lora/dora.py).
    """
    model, code = setup.model, implementations.of(setup)
    shapes, size = shape_of(model).linear_shapes, compute_size(setup)
    if model.experts and setup.runs_loop and "down_proj" in shapes:  # experts have no adapters
        shapes = shapes | {"down_proj": (shapes["down_proj"][0], _adapted_width(model))}
    cast = code.adapter_bytes if setup.precision != "fp32" else 0
    groups = _fused_names(model) if code.family_code else {}
    all_of_qkv = {"q_proj", "k_proj", "v_proj"} <= set(setup.lora_targets)
    saved_inputs: set[str] = set()
    matrices: set[str] = set()
    saved = 0.0
    for target in setup.lora_targets:
        if target not in shapes:
            continue
        out_features, in_features = shapes[target]
        source = _SOURCE.get(target, target)
        if source == "norm2" and model.parallel_residual and model.norms_per_layer == 1:
            source = "norm1"
        matrix = groups.get(target, target)
        if matrix in matrices:
            continue  # a fused matrix has one adapter
        matrices.add(matrix)
        input_bytes = 0 if source == "attention" and not code.result_copied else size
        shared_input = source if not code.lora_dropout or (code.joined_qkv and source == "norm1") else target
        if cast:
            input_bytes = cast
        elif shared_input in saved_inputs:
            input_bytes = 0
        elif code.lora_dropout:
            input_bytes = 1 + size
        if setup.compile and code.family_code and not code.lora_dropout:
            input_bytes = 0  # the partitioner keeps it already (COMPILED_HIDDEN)
        saved_inputs.add(shared_input)
        result_bytes = 4 * size * out_features if setup.method == "dora" else 0
        if setup.engine == "litgpt" and source == "norm1" and not all_of_qkv:
            result_bytes += size * out_features  # result before concatenation with the others
        share, count = _block_share(model, target), _adapted(setup, target)
        inputs = count if cast else min(count, 1)  # compressors read what attention saves
        saved += share * inputs * input_bytes * in_features
        saved += share * count * (result_bytes + (cast or size) * setup.lora_rank)
    return saved / setup.tensor


def _prompt_attention(setup: Setup) -> float:
    """Return the mean bytes per block and token of LLaMA-Adapter's attention over its prompt.

    litgpt saves the attention's result, which the gate scales, and the kernel's softmax statistics
    (litgpt/adapter.py). The loop's v2 and PEFT's v1 save the fp32 probabilities before and after the gate;
    PEFT also computes the queries a second time (peft/tuners/adaption_prompt/layer.py).
    """
    model, size = setup.model, compute_size(setup)
    if setup.engine == "litgpt":
        saved = float(size * model.attention_out_dim + 4 * model.heads)
    else:
        saved = 8.0 * model.heads * setup.llama_adapter.prompt_length
        if setup.method == "adapter-v1":
            saved += size * model.q_dim
    prompted_share = (
        1.0 if setup.method == "adapter-v1" else 1 - setup.llama_adapter.start_layer / model.layers
    )
    return saved * prompted_share / setup.tensor


def _rescaled_outputs(setup: Setup) -> float:
    """Return the bytes per block and token of the linear outputs needed by the scales of v2."""
    if setup.method != "adapter-v2":
        return 0.0
    model = setup.model
    shapes = shape_of(model).linear_shapes
    outputs = sum(out_features * _adapted(setup, name) for name, (out_features, _) in shapes.items())
    return compute_size(setup) * outputs / setup.tensor


def _fused_names(model: ModelSpec) -> dict[str, str]:
    """Map generic names of linear layers to the fused matrix of the family's code."""
    linears = family_of(model.family).linears
    return {
        name: matrix
        for matrix, groups in linears.items()
        for group in groups
        if len(group) > 1
        for name in group
    }


_SOURCE = {
    "q_proj": "norm1",
    "k_proj": "norm1",
    "v_proj": "norm1",
    "q_a_proj": "norm1",
    "kv_a_proj_with_mqa": "norm1",
    "kv_proj": "norm1",
    "o_proj": "attention",
    "gate_proj": "norm2",
    "up_proj": "norm2",
    "down_proj": "product",
    **dict.fromkeys(("in_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), "recurrence input"),
    "conv_in_proj": "recurrence input",
    "out_proj": "attention",  # the mixer's bytes include its input
    "conv_out_proj": "attention",
}


_IN_MLP = frozenset(("gate_proj", "up_proj", "down_proj"))
_IN_COMPRESSORS = frozenset(("kv_proj", "gate_proj"))


def _block_share(model: ModelSpec, target: str) -> float:
    """Return the share of blocks that have a linear layer of this name."""
    if target in _IN_MLP:
        return model.mlp_blocks / model.layers
    recurrent = target in recurrent_shapes(model)
    return (model.recurrent_layers if recurrent else model.attention_layers) / model.layers


def _adapted(setup: Setup, target: str) -> float:
    """Count the adapters of a block that process each token, on one kind of linear layer; the mean.

    Compressors of attention have linear layers of the same names. Fused expert tensors of the loop have no
    adapters, its dense and shared MLPs have.
    """
    model = setup.model
    compressors = model.compressed_layers / model.layers if target in _IN_COMPRESSORS else 0
    if not model.experts or target not in _IN_MLP:
        return 1 + compressors
    if setup.runs_loop:
        dense = 1 - model.expert_layers / model.mlp_blocks
        return (1 if model.shared_ffn else dense) + compressors
    return model.experts_per_token + compressors


def _adapted_width(model: ModelSpec) -> int:
    """Return the mean width of the dense and shared MLPs of a model with experts."""
    dense = model.mlp_blocks - model.expert_layers
    adapted = model.mlp_blocks if model.shared_ffn else max(dense, 1)
    return (dense * (model.dense_ffn or model.ffn) + model.expert_layers * model.shared_ffn) // adapted


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
    return model.hidden * _norm_bytes(setup, trained=False) / sequence


def backward_bytes(setup: Setup) -> float:
    """Return the bytes per token of the gradients that are live during one block's backward pass.

    Two tensors of the MLP's width and two of the hidden size; tensor parallelism divides the latter only
    once they are reduced.
    """
    model, size = setup.model, compute_size(setup)
    width = max(model.ffn * max(model.experts_per_token, 1), model.q_dim)
    return 2 * size * width / setup.tensor + 2 * size * model.hidden / _gathered(setup)


def head_input_bytes(setup: Setup) -> float:
    """Return the bytes per token that the last norm and the output head save."""
    model, size = setup.model, compute_size(setup)
    sequence = setup.tensor if setup.sequence_parallel else 1
    head_input = model.hidden * size * (1 if not setup.adapters else 0)
    norm = _norm_bytes(setup, trained=setup.trains_norms)
    joined = _joined_streams(setup, size)
    return (model.hidden * (norm + size) + joined) / sequence + head_input
