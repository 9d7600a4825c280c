"""Memory of generation with transformers' ``generate``: weights, KV cache, tensors of a batch.

docs/estimator.md compares it with runs and with published figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from estimator.memory.activations.attention import EAGER_ALONE, SOFT_CAPPED
from estimator.memory.evaluation import WEIGHT_BYTES as GPU_WEIGHT_BYTES
from estimator.memory.host import CPU_RUNTIME_BYTES, CUDA_CONTEXT_BYTES
from estimator.models import ModelSpec
from estimator.setup import Setup

Device = Literal["cuda", "cpu"]

WEIGHTS, CACHE, ACTIVATIONS, LOGITS, RUNTIME = (
    "weights",
    "KV cache",
    "activations",
    "logits and sampling",
    "runtime",
)
WEIGHT_BYTES: dict[Device, int] = {
    "cuda": GPU_WEIGHT_BYTES,
    "cpu": 4,
}  # launchers/evaluation/loading.py, precision_on

# Copies of the cache that a batch gets room for. A DynamicCache is a new tensor in each step, a token longer
# than the last (transformers 5.4, cache_utils.py, torch.cat), so that no freed block is large enough for it.
# PyTorch's allocator reserves what there is (84 GB where 26 GB were allocated, in the rows of
# huggingface/optimum-benchmark in benchmarks/published/data/generation.csv) and gives blocks back when memory
# is short. With room for a second copy it does so once in many steps instead of once per layer. transformers
# before DynamicCache had both copies alive.
CACHE_HELD = 2
# Bytes for each logit of the last position: fp32 copy, scores over the temperature, probabilities
# (transformers 5.4, generation/utils.py, _sample), next to the model's own
SAMPLING_BYTES = 12
# More where top_p is below 1: sorted scores with their indices, probabilities and their sums, two masks
# (generation/logits_process.py, TopPLogitsWarper)
TOP_P_BYTES = 4 + 8 + 4 + 4 + 2
# Copies of a token's hidden size for each expert it is routed to (transformers 5.23, integrations/moe.py)
_ROUTED_COPIES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Answers that are generated together, padded to the longest prompt."""

    sequences: int  # answers, not prompts: four answers to one prompt are four
    prompt_tokens: int
    new_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens of one complete sequence."""
        return self.prompt_tokens + self.new_tokens


def grpo_batch(setup: Setup) -> Batch:
    """Return the answers that one process generates in a GRPO step: of all its micro batches, in one batch.

    TRL 1.16, trainer/grpo_trainer.py, _prepare_inputs. Prompts have all tokens besides the answer.
    """
    return Batch(
        sequences=setup.micro_batch_size * setup.accumulation,
        prompt_tokens=max(1, setup.seq_len - setup.answer_len),
        new_tokens=setup.answer_len,
    )


def kv_cache_bytes(model: ModelSpec, sequences: int, tokens: int, *, bytes_each: int = 2) -> int:
    """Return the exact bytes of the KV cache of ``sequences`` sequences of ``tokens`` tokens each.

    Per sequence, token and block: kv_heads * head_dim keys and as many values; with latent attention (MLA)
    the compressed latents, kv_lora_rank + qk_rope_head_dim numbers (transformers 5.23). Blocks with a sliding
    window (or Llama 4's chunks) keep the tokens of the window; blocks that reuse keys and values (Gemma 4)
    keep none. Compressed attention (DeepSeek V4) has one tensor of keys and values, of the window's and the
    compressed tokens. A batch that generates has cached all tokens but the last one generated. The allocator
    holds more: see ``CACHE_HELD``.

    Parameters
    ----------
    model:
        Model, of which blocks, KV heads, head sizes and window count.
    bytes_each:
        Bytes per number: 2 in bf16, 4 in fp32.
    """
    window = min(tokens, model.sliding_window or tokens)
    if model.compressed_attention:
        cached = _compressed_cache(model, tokens, window)
        return sequences * cached * bytes_each
    far_layers, near_layers = model.attention_layers - model.sliding_layers, model.sliding_layers
    if not model.global_head_dim:
        cached = (far_layers * tokens + near_layers * window) * _cached_width(model)
    else:
        near_layers -= model.reused_kv_sliding
        far_layers -= model.reused_kv_layers - model.reused_kv_sliding
        cached = near_layers * window * 2 * model.kv_heads * model.head_dim
        cached += far_layers * tokens * 2 * model.wide_kv_heads * model.wide_head_dim
    return sequences * cached * bytes_each


def _compressed_cache(model: ModelSpec, tokens: int, window: int) -> int:
    """Count the numbers that compressed attention caches per sequence; an indexer has its own keys."""
    cached = model.layers * window * model.head_dim
    if model.index_layers:
        width = model.head_dim + model.index_head_dim
        cached += model.index_layers * (tokens // model.compress_rate) * width
    if model.heavy_layers:
        cached += model.heavy_layers * (tokens // model.heavy_compress_rate) * model.head_dim
    return cached


def live_bytes(
    model: ModelSpec, batch: Batch, *, bytes_each: int = 2, top_p: float = 1.0, padded: bool = True
) -> dict[str, int]:
    """Return the live bytes at the peak without weights, by category; the allocator holds more.

    The largest of three moments: the prompts' forward pass, with the keys and values of all their tokens
    (blocks with a window release them a step later) and the tensors of one block under its mask; attention in
    the last step, with the whole cache; sampling of the last token. Prompts of one length (``padded=False``)
    have no mask. Families without a fused attention kernel also hold the attention scores and their softmax.
    """
    fused = model.family not in (*SOFT_CAPPED, *EAGER_ALONE)
    score = 0 if fused else model.heads * (bytes_each + 4)  # bytes per pair of positions
    prompts, cached = batch.sequences * batch.prompt_tokens, batch.sequences * batch.tokens
    mask = prompts * batch.prompt_tokens * padded  # a byte for each pair of tokens
    cache = kv_cache_bytes(model, batch.sequences, batch.tokens, bytes_each=bytes_each)
    each_logit = bytes_each + SAMPLING_BYTES + (TOP_P_BYTES if top_p < 1 else 0)
    moments = (
        {
            CACHE: prompts * model.attention_layers * _cached_width(model) * bytes_each,
            ACTIVATIONS: prompts * (_block_width(model) * bytes_each + batch.prompt_tokens * score) + mask,
        },
        {CACHE: cache, ACTIVATIONS: cached * (_decoding_width(model, fused) * bytes_each + score)},
        {CACHE: cache, LOGITS: batch.sequences * model.vocab * each_logit},
    )
    return max(moments, key=lambda moment: sum(moment.values()))


def generation_bytes(
    model: ModelSpec, batch: Batch, *, gpus: int = 1, device: Device = "cuda", top_p: float = 1.0
) -> dict[str, int]:
    """Return the memory of a generating process by category: of the fullest GPU, or of the CPU process.

    Several GPUs share one copy of the model layer by layer, which cannot cut a block; each holds the cache of
    its layers.
    """
    size, on_gpus = WEIGHT_BYTES[device], device == "cuda"
    weights = size * model.parameters
    block = weights // model.layers if gpus > 1 else 0
    live = live_bytes(model, batch, bytes_each=size, top_p=top_p)
    cache_copies = CACHE_HELD if on_gpus else 1
    return {
        WEIGHTS: weights // gpus + block,
        CACHE: cache_copies * live.pop(CACHE) // gpus,
        **live,
        RUNTIME: CUDA_CONTEXT_BYTES if on_gpus else CPU_RUNTIME_BYTES,
    }


def largest_batch(
    model: ModelSpec,
    capacity_bytes: int,
    *,
    prompt_tokens: int,
    new_tokens: int,
    gpus: int = 1,
    device: Device = "cuda",
    top_p: float = 1.0,
    max_sequences: int = 65536,
) -> int:
    """Return the largest number of sequences, up to ``max_sequences``, that fits each GPU; 0 if none fits."""

    def fits(sequences: int) -> bool:
        batch = Batch(sequences=sequences, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
        categories = generation_bytes(model, batch, gpus=gpus, device=device, top_p=top_p)
        return sum(categories.values()) <= capacity_bytes

    low, high = 0, max_sequences + 1  # fits at low, and not at high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _block_width(model: ModelSpec) -> int:
    """Count the numbers per token that one block holds at the same time in the prompts' forward pass.

    Embedding, residual stream and two normalized copies of it; also the larger of MLP (gate, up and their
    product; with experts, also copies of routed tokens) and attention (queries before and after rotation,
    keys and values, and those repeated for all heads).
    """
    mlp = 3 * model.ffn
    if model.experts:
        mlp = model.experts_per_token * (mlp + _ROUTED_COPIES * model.hidden) + 3 * model.shared_ffn
        mlp = max(mlp, 3 * model.dense_ffn if model.dense_layers else 0)
    attention = 2 * model.q_dim + model.kv_dim + model.v_dim + _attended_width(model)
    return 4 * model.hidden + max(mlp, attention)


def _attended_width(model: ModelSpec) -> int:
    """Return the width of the keys and values of one token in one block, repeated for all query heads.

    Attention with a padding mask needs them (transformers 5.23, integrations/sdpa_attention.py).
    """
    return model.heads * (model.head_dim + (model.v_head_dim or model.head_dim))


def _cached_width(model: ModelSpec) -> int:
    """Count the numbers that the cache holds per token and block."""
    if model.latent_attention:
        return model.kv_lora_rank + model.qk_rope_head_dim
    if model.compressed_attention:
        return model.head_dim
    return model.kv_dim + model.v_dim


def _decoding_width(model: ModelSpec, fused: bool) -> int:
    """Count the numbers per cached token that one block holds in addition to the cache in a decoding step.

    Fused attention groups the query heads (transformers 5.23, integrations/sdpa_attention.py, pack_gqa) and
    only needs the previous keys during concatenation. Latents are expanded for all heads.
    """
    return model.kv_dim if fused and not model.latent_attention else _attended_width(model)
