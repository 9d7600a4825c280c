"""Activations of adapters: inputs and results of LoRA's matrices, LLaMA-Adapter's prompts and scales."""

from __future__ import annotations

from estimator.memory import implementations
from estimator.memory.shape import shape_of
from estimator.memory.states import compute_size
from estimator.models import ModelSpec
from estimator.models.architectures import family_of
from estimator.models.parameters import recurrent_shapes
from estimator.setup import Setup

IN_MLP = frozenset(("gate_proj", "up_proj", "down_proj"))
IN_COMPRESSORS = frozenset(("kv_proj", "gate_proj"))
SOURCE = {
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


def adapter_input_bytes(setup: Setup) -> float:
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
    groups = fused_names(model) if code.family_code else {}
    all_of_qkv = {"q_proj", "k_proj", "v_proj"} <= set(setup.lora_targets)
    saved_inputs: set[str] = set()
    matrices: set[str] = set()
    saved = 0.0
    for target in setup.lora_targets:
        if target not in shapes:
            continue
        out_features, in_features = shapes[target]
        source = SOURCE.get(target, target)
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


def prompt_attention_bytes(setup: Setup) -> float:
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


def rescaled_output_bytes(setup: Setup) -> float:
    """Return the bytes per block and token of the linear outputs needed by the scales of v2."""
    if setup.method != "adapter-v2":
        return 0.0
    model = setup.model
    shapes = shape_of(model).linear_shapes
    outputs = sum(out_features * _adapted(setup, name) for name, (out_features, _) in shapes.items())
    return compute_size(setup) * outputs / setup.tensor


def fused_names(model: ModelSpec) -> dict[str, str]:
    """Map generic names of linear layers to the fused matrix of the family's code."""
    linears = family_of(model.family).linears
    return {
        name: matrix
        for matrix, groups in linears.items()
        for group in groups
        if len(group) > 1
        for name in group
    }


def _block_share(model: ModelSpec, target: str) -> float:
    """Return the share of blocks that have a linear layer of this name."""
    if target in IN_MLP:
        return model.mlp_blocks / model.layers
    recurrent = target in recurrent_shapes(model)
    return (model.recurrent_layers if recurrent else model.attention_layers) / model.layers


def _adapted(setup: Setup, target: str) -> float:
    """Count the adapters of a block that process each token, on one kind of linear layer; the mean.

    Compressors of attention have linear layers of the same names. Fused expert tensors of the loop have no
    adapters, its dense and shared MLPs have.
    """
    model = setup.model
    compressors = model.compressed_layers / model.layers if target in IN_COMPRESSORS else 0
    if not model.experts or target not in IN_MLP:
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
