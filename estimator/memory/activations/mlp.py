"""Activations of MLPs, dense and with experts."""

from __future__ import annotations

from estimator.memory import implementations
from estimator.memory.activations.adapters import IN_MLP
from estimator.memory.activations.norms import input_divisor
from estimator.memory.states import compute_size
from estimator.setup import Setup

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


def mean_mlp_bytes(setup: Setup, dense: float) -> float:
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
        trained |= not (setup.prompts or setup.runs_loop) and bool(IN_MLP & set(setup.lora_targets))
        inputs = (2 if trained else 1) * routed * model.hidden * size
        routing = 8 * model.experts  # router's logits and their softmax
        if model.router_scales:  # its norm's fp32 input, its result and the scaled one
            routing += (4 + 2 * size) * model.hidden
        if model.family in FP32_ROUTERS and size < 4 and not setup.adapters:
            routing += 4 * model.hidden
        if model.shared_expert_gate:  # scales the result
            routing += size * model.hidden
        experts += (inputs + routing) / input_divisor(setup) + _mlp(setup, model.shared_ffn)
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
