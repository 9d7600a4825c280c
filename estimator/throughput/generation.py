"""Speed of transformers' ``generate``: prompts are bound by matrix products, decoding by memory.

A decoding step generates one token per sequence. It reads all weights and the KV cache, so it takes at least
these bytes over the memory's bandwidth: Pope et al. 2022 (arXiv:2211.05102), section 2.1.
The prompts' forward pass takes 2 FLOPs per weight and token (Kaplan et al. 2020,
arXiv:2001.08361, section 2.1).

The result is a range that contains the published runs of ``benchmarks/published/data/generation.csv``, nearly
all with one sequence. The fast end assumes the full bandwidth, the slow end the lowest that those runs
reached.
"""

from __future__ import annotations

from dataclasses import dataclass

from estimator.hardware.catalogue import Gpu
from estimator.memory.generation import Batch, kv_cache_bytes
from estimator.models import ModelSpec
from estimator.throughput.efficiency import best_product, products_rate, published
from estimator.throughput.flops import weights_of

WEIGHT_BYTES = 2  # bf16
# Seconds of the host to launch one block's kernels: 16.7 ms a token with 28 blocks, 38 ms with 64, whatever
# their width, on H20s with transformers 4.51.3; 21 ms with 24, 57 ms with 64 on A100s with 4.46.0
HOST_SECONDS = (0.55e-3, 0.92e-3)
# How often a step moves the cache: the longer one is a new tensor, read and written (transformers 5.4,
# cache_utils.py), which attention reads. Under a padding mask it reads, and first writes, the keys and values
# of all query heads (integrations/sdpa_attention.py, repeat_kv).
CACHE_COPIED, CACHE_READ = 2, 1
# Share of the bandwidth that published runs reached at least, for weights and for the cache
SLOWEST_WEIGHTS = 0.6
SLOWEST_CACHE = {"Ampere": 0.3, "*": 0.15}


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationSpeed:
    """Time of one batch whose answers all reach the longest length; None: unknown.

    Ranges are (fast end, slow end) of seconds, and (slow end, fast end) of tokens a second.
    """

    basis: str
    step_seconds: tuple[float, float] | None = None  # a token of each sequence, at half of the new tokens
    seconds: tuple[float, float] | None = None
    tokens_per_second: tuple[float, float] | None = None  # new ones, over the whole time


def generation_speed(model: ModelSpec, gpu: Gpu | None, batch: Batch) -> GenerationSpeed:
    """Predict the speed of generating a batch with one copy of a model in bf16.

    GPUs that share a copy layer by layer work sequentially, so several are as fast as one. Unknown on a CPU,
    on a GPU without a sourced bandwidth or rate, and for experts: no run with transformers 5 was published.
    """
    reason = _unknown(model, gpu)
    if reason or gpu is None:
        return GenerationSpeed(basis=reason)
    prompt = _prompt_seconds(model, gpu, batch)
    step = _step_seconds(model, gpu, batch)
    fast, slow = (
        first + batch.new_tokens * step_seconds for first, step_seconds in zip(prompt, step, strict=True)
    )
    new = batch.sequences * batch.new_tokens
    return GenerationSpeed(
        basis=(
            "range: from the memory's full bandwidth down to the speed of published runs of transformers' "
            "generate, nearly all with one sequence (benchmarks/published/data/generation.csv)"
        ),
        step_seconds=step,
        seconds=(fast, slow),
        tokens_per_second=(new / slow, new / fast),
    )


def forward_seconds(
    model: ModelSpec, gpu: Gpu | None, sequences: int, tokens: int
) -> tuple[float, float] | None:
    """Return (fast, slow) seconds of a forward pass over complete texts, as in a reward model, or None."""
    if gpu is None or _unknown(model, gpu):
        return None
    return _prompt_seconds(model, gpu, Batch(sequences=sequences, prompt_tokens=tokens, new_tokens=0))


def balanced_sequences(gpu: Gpu) -> int | None:
    """Batch size at which a step's products take as long as reading the weights; None if unknown.

    A weight of 2 bytes takes part in 2 FLOPs per sequence, so this is FLOP/s over bytes per second. Larger
    batches make the step longer in proportion and gain no throughput.
    """
    peak = gpu.peak_flops("bf16")
    if peak is None or gpu.bandwidth_gbps is None:
        return None
    return max(int(peak / (gpu.bandwidth_gbps * 1e9)), 1)


def _unknown(model: ModelSpec, gpu: Gpu | None) -> str:
    """Return the reason why the speed is unknown, as one clause; "" if it can be predicted."""
    if gpu is None:
        return "no published speed of generation for this device"
    if model.experts:
        return "no published run of generation with experts by transformers 5"
    if gpu.bandwidth_gbps is None:
        return f"no sourced memory bandwidth for the {gpu.name}"
    if products_rate(gpu, "bf16", published()) is None:
        return f"neither peak nor measured rate for the {gpu.name} in bf16"
    return ""


def _rates(gpu: Gpu) -> tuple[float, float]:
    """Return (fast, slow) FLOP/s of matrix products: the best measured, and the lower end of training."""
    table = published()
    slow = products_rate(gpu, "bf16", table) or 1.0
    return best_product(gpu, "bf16", table) or slow, slow * table.of("range", "p10")


def _prompt_seconds(model: ModelSpec, gpu: Gpu, batch: Batch) -> tuple[float, float]:
    """Return (fast, slow) seconds of the prompts' forward pass, with causal attention."""
    tokens, table = batch.sequences * batch.prompt_tokens, published()
    products = 2.0 * tokens * (weights_of(model).active - model.vocab * model.hidden)
    attended = (model.q_dim + model.attention_out_dim) * batch.prompt_tokens  # 2 FLOPs over half of it
    attention = float(tokens * model.layers * attended)
    fast, slow = _rates(gpu)
    share = table.of("attention", gpu.architecture or "")
    bandwidth = (gpu.bandwidth_gbps or 1.0) * 1e9
    weights = WEIGHT_BYTES * model.parameters / bandwidth
    return (
        max((products + attention) / fast, weights, HOST_SECONDS[0] * model.layers),
        max(products / slow + attention / (slow * share) + weights, HOST_SECONDS[1] * model.layers),
    )


def _step_seconds(model: ModelSpec, gpu: Gpu, batch: Batch) -> tuple[float, float]:
    """Return (fast, slow) seconds of the middle decoding step: the mean, as time grows linearly."""
    middle = batch.prompt_tokens + batch.new_tokens // 2
    bandwidth = (gpu.bandwidth_gbps or 1.0) * 1e9
    weights = WEIGHT_BYTES * model.parameters / bandwidth
    cache = kv_cache_bytes(model, batch.sequences, middle) / bandwidth
    repeated = 2 * model.heads // model.kv_heads
    work = 2.0 * batch.sequences * weights_of(model).active
    work += 2.0 * batch.sequences * model.layers * (model.q_dim + model.attention_out_dim) * middle
    fast, slow = _rates(gpu)
    share = SLOWEST_CACHE.get(gpu.architecture or "*", SLOWEST_CACHE["*"])
    slow_traffic = weights / SLOWEST_WEIGHTS + cache * (CACHE_COPIED + CACHE_READ + repeated) / share
    return (
        max(HOST_SECONDS[0] * model.layers, weights + (CACHE_COPIED + CACHE_READ) * cache, work / fast),
        max(HOST_SECONDS[1] * model.layers, slow_traffic + work / slow),
    )
