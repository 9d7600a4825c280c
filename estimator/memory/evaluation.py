"""Memory of the evaluation: one copy of the model for inference, base and result one after the other."""

from __future__ import annotations

from estimator.memory.host import CUDA_CONTEXT_BYTES, GPU_PROCESS_HOST_BYTES
from estimator.models import ModelSpec, parameters

WEIGHT_BYTES = 2  # bf16, as launchers/evaluation/loading.py loads them on a GPU
LARGEST_FILE = 5 * 10**9  # of a model in the Hugging Face layout: transformers' default for saving
BATCH_TOKENS = 8192  # per forward pass: MAX_BATCH_TOKENS of launchers/dataset/measured.py
LOSS_POSITIONS = 1024  # that the loss has an fp32 copy of: LOSS_CHUNK of launchers/dataset/batches.py
# Reserved over active memory of identical runs, at most: the allocator's blocks don't fit all tensors
RESERVED_OVER_LIVE = 1.36


def inference_bytes(model: ModelSpec, gpus: int, seq_len: int, *, lora_experts: bool = False) -> int:
    """Return the memory of the fullest of ``gpus`` GPUs that share one copy of the model layer by layer.

    Sum of its share of the weights, one block more (blocks are not split), and for one batch: the residual
    stream, the larger of one block's tensors and of the logits with their copies in the loss, and the KV
    cache of one answer. ``lora_experts``: PEFT's adapters on experts stay unmerged, which needs a copy of one
    block's experts.
    """
    weights = WEIGHT_BYTES * model.parameters
    block = weights // model.layers if gpus > 1 else 0
    stream = BATCH_TOKENS * WEIGHT_BYTES * (4 * model.hidden + 3 * model.ffn)
    logits = BATCH_TOKENS * model.vocab * WEIGHT_BYTES + LOSS_POSITIONS * model.vocab * 8
    cache = 2 * model.attention_layers * model.kv_dim * seq_len * WEIGHT_BYTES // gpus
    if lora_experts:
        stream += 2 * WEIGHT_BYTES * model.experts * parameters.mlp_weights(model, model.ffn)
    live = max(stream, logits) + model.hidden * BATCH_TOKENS * WEIGHT_BYTES + cache
    return weights // gpus + block + int(live * RESERVED_OVER_LIVE) + CUDA_CONTEXT_BYTES


def inference_gpus(
    model: ModelSpec, max_gpus: int, capacity_bytes: int, seq_len: int, *, lora_experts: bool = False
) -> int:
    """Return the fewest GPUs that hold the model; ``max_gpus`` if none do: the rest is offloaded."""

    def fits(gpus: int) -> bool:
        return inference_bytes(model, gpus, seq_len, lora_experts=lora_experts) <= capacity_bytes

    return next(filter(fits, range(1, max_gpus)), max_gpus)


def inference_host_bytes(
    model: ModelSpec, gpus: int, capacity_bytes: int, seq_len: int, *, lora_experts: bool = False
) -> int:
    """Return the host memory of the evaluation: process, one weight file, and offloaded weights."""
    offloaded = (
        max(inference_bytes(model, gpus, seq_len, lora_experts=lora_experts) - capacity_bytes, 0) * gpus
    )
    return GPU_PROCESS_HOST_BYTES + min(WEIGHT_BYTES * model.parameters, LARGEST_FILE) + offloaded
