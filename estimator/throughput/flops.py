"""Work of one forward and backward pass: floating-point operations, bytes moved, launches.

Counts are for one process, one micro batch and, with a pipeline, the largest stage, after division by
tensor, context and expert parallelism. ``efficiency`` has the rates at which GPUs do this work.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from estimator.memory import implementations
from estimator.memory.activations.attention import broadcasts_keys
from estimator.models import parameters
from estimator.models.spec import ModelSpec
from estimator.setup import Setup
from estimator.vocabulary import QUANTIZATIONS, TASKS

# Backward over forward. A product's backward is two products. FlashAttention's is five products for the
# forward's two, as it recomputes the scores: Dao 2023, FlashAttention-2 (arXiv:2307.08691), section 3.1.2.
PRODUCT_BACKWARD = 2.0
ATTENTION_BACKWARD = 2.5
# Share of the products that selective checkpointing repeats: torchtitan's policy saves every second matrix
# product and the attention (torchtitan/distributed/activation_checkpoint.py); Megatron's repeats attention
# alone (Korthikanti et al. 2022, arXiv:2205.05198).
SELECTIVE_PRODUCTS = 0.5
# Bytes that the kernels between the products read and write in an eager bf16 forward pass and in its backward
# pass, for each token and unit of width, counted from their definitions: an RMSNorm in fp32 (cast, square,
# mean, scale, cast, weight), torch's LayerNorm (fp32 results under autocast, cast back) with the dropout that
# comes with it in GPT-2's kind of models (even at 0 it copies and writes a mask), a residual sum, the copy
# that lays queries, keys and values out for attention, the rotary embedding of queries and keys, SiLU times
# gate, GELU.
Bytes = tuple[float, float]
NORM_BYTES: Bytes = (6 + 8 + 4 + 8 + 6 + 4, 4 + 6 + 12 + 8 + 12 + 12 + 6)
LAYER_NORM_BYTES: Bytes = (12 + 5, 6 + 12 + 8 + 6 + 5)
RESIDUAL_BYTES: Bytes = (6, 6)
SPLIT_BYTES: Bytes = (4, 4)
ROTARY_BYTES: Bytes = (4 + 6 + 4 + 6, 4 + 6 + 4 + 6)
GATED_BYTES: Bytes = (4 + 6, 10 + 6)
PLAIN_BYTES: Bytes = (4, 6)
SCORE_BYTES: Bytes = (16, 32)  # unfused attention: scores, mask and softmax of each pair of tokens
SINK_BYTES: Bytes = (4, 4)  # the result is read and scaled; gradients of sinks read it and its gradient
# The same by Liger's kernels, one for each (Liger-Kernel 0.8.5, ops/rms_norm.py, rope.py, swiglu.py)
LIGER_NORM_BYTES: Bytes = (4, 6)
LIGER_ROTARY_BYTES: Bytes = (4, 4)
LIGER_GATED_BYTES: Bytes = (6, 10)
# Of each value of a product's input or result, where the layers between compute in fp32: cast
# (bitsandbytes 0.50.2, nn/modules.py, Linear4bit.forward, after PEFT's prepare_model_for_kbit_training)
CAST_BYTES: Bytes = (6, 6)
ROUTED_BYTES: Bytes = (12, 24)  # a token's copies to and from its experts
LOGIT_BYTES = 34  # forward and backward: logits, fp32 copy, log-softmax, its gradient, and back to bf16
LOGIT_AGAIN_BYTES = 14  # fp32 copy and log-softmax once more, in the backward pass (dataset/batches.py)
FUSED_LOGIT_BYTES = 10
# torchao unpacks NF4 by operators of torch, one after the other (0.15, dtypes/nf4tensor.py,
# get_original_weight): for the two weights of each byte shifted, masked and made 64-bit indices (22), looked
# up (20), scales repeated and multiplied (16), and put side by side (8)
TORCHAO_EAGER_BYTES = 66 / 2
# Bytes to quantize one element of a product's input, or of its result's gradient, counted from the recipes:
# 2 to find the scale of a complete tensor or row (MX and NVFP4 scale 32 and 16 neighbors; NVFP4 also the
# tensor), 2 to read, 1 (NVFP4: 0.5) to write along rows and again along columns; "rowwise" scales twice
QUANTIZED_BYTES = {
    "tensorwise": 2 + 2 + 2,
    "te": 2 + 2 + 2,
    "rowwise": 2 * (2 + 2 + 1),
    "mxfp8": 2 + 2,
    "nvfp4": 2 + 2 + 1,
}
# FSDP2 in one process (torch 2.11, distributed/fsdp/_fully_shard): weights are copied for the forward and for
# the backward pass; gradients into the type of their sum, which is copied, and added to those before
REDUCED_COPY, ADDED = 8, 12
# DeepSpeed without ZeRO (0.19.8, runtime/bf16_optimizer.py and engine.py): each micro batch's gradients are
# added to zeros, made fp32, and added to those before; once a step they are put in a bucket, made 16 bits to
# be sent, and put back, the weights made 16 bits, and the fp32 gradients zero
DEEPSPEED_ADDED, DEEPSPEED_STEP = 2 + 6 + 18, 28 + 6 + 4
# DeepSpeed's ZeRO-1 and ZeRO-2 (0.19.8, runtime/zero/stage_1_and_2.py): each gradient is copied to a bucket,
# divided by the number of processes, and copied for the all-reduce
DEEPSPEED_REDUCED = 4 + 4 + 4
# Bytes kept for the backward pass for each token, unit of width and layer: Korthikanti et al. 2022
# (arXiv:2205.05198), equation 1, without dropout's masks; a checkpoint alone is the layer's input.
KEPT_BYTES = {"none": 32, "selective": 16, "full": 2}
# Adapters on experts: their product is written, read with the weights, the sum written, in each forward pass
COPY_MOVES = 4
SCALED_BYTES: Bytes = (8, 16)  # of each output that LLaMA-Adapter v2 adds a bias to and scales
# Of each unit of an adapter's input and output: read, scaled, added. The input of PEFT's fp32 adapters is
# cast, dropped out, and cast by autocast (tuners/lora/layer.py); Unsloth's are added by their product.
ADAPTER_INPUT, ADAPTER_OUTPUT = (2.0, 2.0 + 6), (2 + 4 + 6.0, 4 + 2.0)
FP32_ADAPTER_INPUT = (6 + 9 + 6 + 2.0, 2 + 6 + 9 + 6 + 6.0)
FUSED_ADAPTER_INPUT, FUSED_ADAPTER_OUTPUT = (2.0, 4.0), (4.0, 2.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Work of one process for one micro batch.

    ``linear``, ``expert``, ``head`` and ``attention`` are FLOPs with recomputation; ``linear`` and
    ``expert`` may run in 8 or 4 bits. ``moved`` are bytes between products as eager kernels move them;
    ``weights`` bytes of weights read (and, where they are sharded, copied); ``dequantized`` weights unpacked;
    ``quantized`` bytes to put inputs and gradients of products into 8 or 4 bits;
    ``copied`` bytes of weights and gradients that the engine copies for each micro batch, ``copied_once`` for
    each step.
    ``layers`` counts passes through a layer, forward and backward together being one; ``offloaded`` are bytes
    of activations that go to the host and come back. ``trained`` are all trained weights of the model.
    """

    linear: float
    expert: float
    head: float
    attention: float
    moved: float
    weights: float
    dequantized: float
    quantized: float
    copied: float
    copied_once: float
    layers: float
    offloaded: float
    trained: int
    model_flops_per_token: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """Numbers of weights of a model: all, used by one token, and by kind of layer."""

    all: int
    active: int
    dense: float  # weights of matrix products outside of experts, used by every token
    used_experts: float  # weights of the experts that one token is routed to, summed over layers
    one_expert: float  # one expert of each layer that has experts
    linear: int  # weights of matrix products of all layers, including all experts


@lru_cache(maxsize=1024)
def weights_of(model: ModelSpec) -> Weights:
    """Count the weights of a model; cached."""
    blocks = model.mlp_blocks - model.dense_layers
    expert = blocks * parameters.mlp_weights(model, model.ffn) if model.experts else 0
    dense = parameters.mixer_weights(model) + model.mlp_blocks * model.hidden * model.experts
    dense += blocks * parameters.mlp_weights(model, model.shared_ffn if model.experts else model.ffn)
    dense += model.dense_layers * parameters.mlp_weights(model, model.dense_ffn or model.ffn)
    return Weights(
        all=model.parameters,
        active=model.active_parameters,
        dense=float(dense),
        used_experts=float(expert * model.experts_per_token),
        one_expert=float(expert),
        linear=model.linear_parameters,
    )


def model_flops_per_token(setup: Setup) -> float:
    """Return the model FLOPs of one token, forward and backward, without recomputation.

    6 per weight of a matrix product (not of embedding look-ups), 4 if the weight is frozen, as its gradient
    is not computed, and 12 x layers x query width x sequence length for attention,
    not halved for the causal mask: Chowdhery et al. 2022, PaLM (arXiv:2204.02311), appendix B; torchtitan
    and llm-foundry count the same way.
    """
    return work(setup).model_flops_per_token


def _model_flops(setup: Setup) -> float:
    model = setup.model
    matrices = weights_of(model).active
    if not model.tied_embeddings or not model.causal:
        matrices -= model.vocab * model.hidden
    matrices -= (model.position_embeddings + model.token_types) * model.hidden
    attention = 6 * model.attention_layers * (model.q_dim + model.attention_out_dim) * setup.seq_len
    if not setup.adapters:
        return float(6 * matrices + attention)
    return float(4 * matrices + 6 * _adapters_used(setup) + attention)


@lru_cache(maxsize=65536)
def work(setup: Setup) -> Work:
    """Return the work of one micro batch; cached, as a search asks for the same setups many times."""
    model, tokens = setup.model, float(setup.tokens)
    stage = -(-model.layers // setup.pipeline) / model.layers  # share of the layers in the fullest stage
    split = stage / setup.tensor
    weights = weights_of(model)
    dense, experts = weights.dense + _repeated_weights(setup), weights.used_experts
    copied = weights.one_expert * model.experts if setup.copies_experts else 0.0
    repeat_products, repeat_attention, repeat_rest = _recomputation(setup)
    reference = 1.0 if setup.reference in ("adapters-off", "copy") else 0.0  # its forward pass
    if TASKS[setup.task].judged:
        reference += 1 + reference  # and both models' on other answers to the same prompts
    backward_share = 1 - setup.idle_blocks / model.layers  # share of the layers that have a backward pass
    backward = backward_share * PRODUCT_BACKWARD / 2 if setup.adapters else PRODUCT_BACKWARD
    passes = 1 + backward + repeat_products + reference
    adapters = 2 * _adapters_used(setup) * (1 + PRODUCT_BACKWARD + repeat_products)
    head_weights = model.vocab * model.hidden if model.causal else 0
    head_backward = PRODUCT_BACKWARD if _head_trained(setup) else PRODUCT_BACKWARD / 2
    head_passes = 1 + head_backward + reference
    if setup.loss == "fused" and TASKS[setup.task].preferences:
        head_passes += 1  # computed again, launchers/engines/loop/head.py
    # the loop pads values to the width of the keys
    widths = 2 * model.q_dim if setup.variable_length else model.q_dim + model.attention_out_dim
    attention = 2 * _attended(setup) * widths
    moved = _moved(setup, 0) * (1 + repeat_rest + reference) + _moved(setup, 1)
    size = 4 if setup.precision == "fp32" else 2
    weight_bytes = (dense + _resident_experts(setup)) * split * size
    saved = tokens * model.hidden * stage * model.layers / setup.tensor
    unpacked = 0.0
    if setup.quantization != "none":
        unpacked = weights.linear * split * _unpacked_bytes(setup)
    return Work(
        linear=tokens * split * (2 * dense * passes + adapters),
        expert=tokens * split * 2 * experts * (passes + (backward if copied else 0.0)),
        head=tokens * 2 * head_weights * head_passes / setup.tensor,
        attention=tokens
        * split
        * attention
        * (1 + backward_share * (ATTENTION_BACKWARD + repeat_attention) + reference),
        moved=tokens / setup.tensor * (stage * model.layers * moved + _logits(setup)),
        weights=weight_bytes * passes
        + COPY_MOVES * copied * split * size * (1 + repeat_products + reference),
        dequantized=unpacked * passes,
        quantized=tokens * stage * _quantized(setup, repeat_products),
        copied=_copied(setup),
        copied_once=DEEPSPEED_STEP * _trained(setup) if _wrapped(setup) else 0.0,
        layers=stage * model.layers * (1 + (repeat_rest + reference) / 3),
        offloaded=2.0 * setup.activation_offload * KEPT_BYTES[setup.checkpointing] * saved,
        trained=_trained(setup),
        model_flops_per_token=_model_flops(setup),
    )


def _trained(setup: Setup) -> int:
    return setup.trainable_parameters if setup.adapters else weights_of(setup.model).all


def _unpacked_bytes(setup: Setup) -> float:
    """Return the bytes read and written to unpack one weight: by one kernel, or by torchao's operators."""
    if setup.engine == "torchtune" and not setup.compile:
        return TORCHAO_EAGER_BYTES
    return QUANTIZATIONS[setup.quantization].weight_bytes + 2


def _wrapped(setup: Setup) -> bool:
    """Return whether DeepSpeed's bf16 optimizer without ZeRO keeps fp32 weights and gradients."""
    return setup.sharding == "zero0" and setup.precision == "bf16-mixed"


def _copied(setup: Setup) -> float:
    """Return the bytes of weights and gradients that the engine itself copies for one micro batch.

    For FSDP2 only in a single process: with several, communication takes longer than the copies, and the
    coefficients fitted to published runs include both.
    """
    trained = _trained(setup)
    if _wrapped(setup):
        return float(DEEPSPEED_ADDED * trained)
    if setup.engine == "deepspeed" and setup.sharding in ("zero1", "zero2"):
        passes = 1 if setup.sharding == "zero2" else setup.accumulation  # ZeRO-1 reduces in one of them
        return DEEPSPEED_REDUCED * trained / passes
    if setup.copies_weights:  # weights once a step; each gradient is read in 16 bits and added in fp32
        return trained * (
            (4 + 2) / setup.accumulation + 2 + 4 + 4 * (setup.accumulation - 1) / setup.accumulation
        )
    if not setup.fsdp_in_one_process:
        return 0.0
    weights, state_copies = weights_of(setup.model), 2 if setup.adapters else 4
    weights_16_bit = weights.all - (weights.linear if setup.quantization != "none" else 0)
    copied = 2.0 * weights_16_bit * (state_copies + 2)
    if setup.quantization != "none":
        copied += 2 * 2 * weights.linear * QUANTIZATIONS[setup.quantization].weight_bytes
    reduced = 2 + 4 + REDUCED_COPY + ADDED * (setup.accumulation - 1) / setup.accumulation
    return copied + trained * reduced


def _quantized(setup: Setup, repeated: float) -> float:
    """Return the bytes per token that all layers' products take to quantize inputs and gradients.

    Tensor parallelism divides the results of the first products of attention and MLP, and the inputs of their
    last ones. ``repeated``: recomputed share of the forward pass.
    """
    size = QUANTIZED_BYTES.get(setup.fp8)
    if size is None:
        return 0.0
    model, tensor = setup.model, setup.tensor
    inputs = model.hidden + model.attention_out_dim / tensor
    gradients = (model.q_dim + model.kv_dim + model.v_dim) / tensor + model.hidden
    mlps = (
        [(model.experts_per_token, model.ffn), (1, model.shared_ffn)] if model.experts else [(1, model.ffn)]
    )
    for count, width in mlps:
        if width:
            inputs += count * (model.hidden + width / tensor)
            gradients += count * ((1 + model.gated_mlp) * width / tensor + model.hidden)
    return size * model.layers * (inputs * (1 + repeated) + gradients)


def _adapters_used(setup: Setup) -> float:
    """Count the adapter weights that one token passes through, including those of its experts.

    For LLaMA-Adapter: the keys and values of its prompts.
    """
    model = setup.model
    if setup.prompts:
        widths = model.q_dim + model.attention_out_dim
        return (model.layers - setup.llama_adapter.start_layer) * setup.llama_adapter.prompt_length * widths
    return setup.adapter_parameters * weights_of(model).active / weights_of(model).all


def _repeated_weights(setup: Setup) -> float:
    """Count the weights of the products that PEFT's LLaMA-Adapter v1 repeats: queries and values.

    peft/tuners/adaption_prompt/utils.py, llama_compute_query_states. litgpt and v2 in the loop repeat none.
    """
    if setup.method != "adapter-v1" or setup.engine == "litgpt":
        return 0.0
    model = setup.model
    return float(
        (model.layers - setup.llama_adapter.start_layer) * model.hidden * (model.q_dim + model.v_dim)
    )


def _resident_experts(setup: Setup) -> float:
    """Count the weights of the experts that the tokens of one process's micro batch are routed to."""
    model = setup.model
    if not model.experts:
        return 0.0
    active = min(model.experts / setup.expert, float(setup.tokens * model.experts_per_token))
    return weights_of(model).one_expert * active


def _recomputation(setup: Setup) -> tuple[float, float, float]:
    """Return the recomputed shares of a forward pass: of products, of attention, of the operators between."""
    share = setup.model.layers // setup.recompute_every / setup.model.layers
    if setup.checkpointing == "full":
        return share, share, share
    if setup.checkpointing == "none":
        return 0.0, 0.0, 0.0
    if setup.engine == "megatron":
        return 0.0, 1.0, 0.0
    return SELECTIVE_PRODUCTS * share, 0.0, share


def _head_trained(setup: Setup) -> bool:
    return not setup.adapters or "lm_head" in (*setup.trained_modules, *setup.lora_targets)


def _attended(setup: Setup) -> float:
    """Return the attended tokens per token, summed over layers; half the sequence if causal.

    With a dense mask or compressed attention, the complete sequence: the kernels compute every pair of tokens
    before masking.
    """
    model, length = setup.model, setup.seq_len
    if setup.document_mask:
        return float(model.attention_layers * length)
    if model.compressed_attention:  # transformers' code masks scores after computing all of them
        return model.layers * length * (1 + model.compressed_tokens)
    if setup.document_tokens is not None:
        length = setup.document_tokens
    reach = length / 2 if model.causal else float(length)
    window = float(model.sliding_window or length)
    # Under a causal window the first tokens see fewer than the window
    sliding_reach = min(window - window * window / (2 * length), reach) if window < length else reach
    return (model.attention_layers - model.sliding_layers) * reach + model.sliding_layers * sliding_reach


def _moved(setup: Setup, backward: int) -> float:
    """Return the bytes between the products of one layer for one token, in one eager pass."""
    model = setup.model
    width = model.ffn * max(model.experts_per_token, 1) + model.shared_ffn
    norm, rotary, gated = NORM_BYTES, ROTARY_BYTES, GATED_BYTES
    if setup.engine_version in ("liger", "unsloth") and not setup.compile:
        norm, rotary = LIGER_NORM_BYTES, LIGER_ROTARY_BYTES
    if setup.engine_version == "liger" and not setup.compile:
        gated = LIGER_GATED_BYTES
    if model.norm != "rms":
        norm = LAYER_NORM_BYTES
    traffic: float = model.hidden * (model.norms_per_layer * norm[backward] + 2 * RESIDUAL_BYTES[backward])
    # each hyper-connection normalizes the residual streams and adds to them
    traffic += 2 * model.residual_streams * model.hidden * (norm[backward] + RESIDUAL_BYTES[backward])
    traffic += (model.q_dim + model.kv_dim + model.v_dim) * SPLIT_BYTES[backward]
    if not model.position_embeddings:
        traffic += (model.q_dim + model.kv_dim) * rotary[backward]
    traffic += width * (gated if model.gated_mlp else PLAIN_BYTES)[backward]
    if setup.upcast_frozen:
        mlp = parameters.mlp_shapes(model, model.ffn)
        widths = sum(sum(shape) for name, shape in model.linear_shapes.items() if name not in mlp)
        widths += max(model.experts_per_token, 1) * sum(sum(shape) for shape in mlp.values())
        traffic = 2 * traffic + CAST_BYTES[backward] * widths
    traffic += ROUTED_BYTES[backward] * model.hidden * model.experts_per_token
    # transformers' own code computes scores with sinks; FlashAttention's has them from version 3 on
    own_code = model.attention_sinks and implementations.of(setup).kept_scores and setup.flash_version < 3
    if own_code and setup.variable_length:
        traffic += SINK_BYTES[backward] * model.attention_out_dim
    elif setup.attention == "math" or own_code or broadcasts_keys(setup):
        traffic += SCORE_BYTES[backward] * model.heads * setup.seq_len
    if setup.prompts:
        traffic += RESIDUAL_BYTES[backward] * model.attention_out_dim
        if setup.method == "adapter-v2":
            traffic += SCALED_BYTES[backward] * parameters.outputs(model) / model.layers
    elif setup.adapters:
        # An adapter of rank r has r weights for each unit of its inputs and outputs; inputs are about half
        units = setup.adapter_parameters / (setup.lora_rank * model.layers)
        traffic += units * (_adapter_input(setup)[backward] + _adapter_output(setup)[backward]) / 2
    return traffic


def _adapter_input(setup: Setup) -> Bytes:
    if setup.engine_version == "unsloth" and setup.quantization != "none":
        return FUSED_ADAPTER_INPUT
    # adapters have the base's type in PEFT below 0.8, and in fsdp_qlora's loop (train.py, precision bf16)
    same_type = setup.engine_version == "peft-0.7"
    same_type |= setup.engine_version == "loop" and setup.flat_parameters
    is_fp32 = implementations.of(setup).adapter_bytes == 4 and not same_type
    return FP32_ADAPTER_INPUT if is_fp32 else ADAPTER_INPUT


def _adapter_output(setup: Setup) -> Bytes:
    fused = setup.engine_version == "unsloth" and setup.quantization != "none"
    return FUSED_ADAPTER_OUTPUT if fused else ADAPTER_OUTPUT


def _logits(setup: Setup) -> float:
    if not setup.model.causal:
        return 0.0
    bytes_per_logit = FUSED_LOGIT_BYTES if setup.loss == "fused" else LOGIT_BYTES
    if setup.loss == "recomputed":
        bytes_per_logit += LOGIT_AGAIN_BYTES
    return float(bytes_per_logit * setup.model.vocab)
