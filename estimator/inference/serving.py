"""GPUs and memory of an inference server: weights, KV cache of concurrent requests, runtime."""

from __future__ import annotations

from dataclasses import dataclass

from estimator.errors import UserError
from estimator.formatting import format_bytes, format_count
from estimator.memory.generation import (
    ACTIVATIONS,
    CACHE,
    LOGITS,
    RUNTIME,
    WEIGHT_BYTES,
    WEIGHTS,
    Batch,
    Device,
    kv_cache_bytes,
    live_bytes,
)
from estimator.memory.host import CPU_RUNTIME_BYTES, CUDA_CONTEXT_BYTES, NCCL_BYTES
from estimator.models import ModelSpec

DEFAULT_CONTEXT = 8192  # default maximum tokens of a request with its answer
# Share of a GPU's memory used by vLLM: gpu_memory_utilization (vLLM 0.32, config/cache.py)
VLLM_SHARE = 0.92


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """One copy of a model on ``gpus`` GPUs of a node (tensor parallel), or on CPUs."""

    device: Device
    gpus: int
    context: int  # tokens of a request with its answer
    requests: int  # concurrent requests, each with a full context
    memory: dict[str, int]  # bytes of one GPU, or of the CPU process, by category
    capacity_bytes: int

    @property
    def needed_bytes(self) -> int:
        return sum(self.memory.values())

    def text(self) -> str:
        """Describe layout and memory in one line."""
        place = "CPU" if self.device == "cpu" else format_count(self.gpus, "GPU")
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.memory.items() if size)
        return (
            f"{place}, {format_count(self.requests, 'request')} of {self.context:,} tokens at once: "
            f"{format_bytes(self.needed_bytes)} of {format_bytes(self.capacity_bytes)} ({parts})"
        )


def context_of(model: ModelSpec, context: int | None) -> int:
    """Return the maximum tokens of a request with its answer: the user's, or the model's up to a default.

    Raises UserError if the model supports fewer.
    """
    longest = model.max_seq_len
    if context is not None and longest is not None and context > longest:
        raise UserError(
            f"--context {context:,}: {model.name} supports {longest:,} tokens.", f"Use --context {longest}."
        )
    return context or min(longest or DEFAULT_CONTEXT, DEFAULT_CONTEXT)


def serving_memory(
    model: ModelSpec, *, device: Device, gpus: int, context: int, requests: int
) -> dict[str, int]:
    """Return the bytes of one GPU of a tensor-parallel server, or of a process on CPUs, by category."""
    size = WEIGHT_BYTES[device]
    live = live_bytes(model, Batch(sequences=1, prompt_tokens=context - 1, new_tokens=1), bytes_each=size)
    runtime = CPU_RUNTIME_BYTES
    if device == "cuda":
        runtime = CUDA_CONTEXT_BYTES + (NCCL_BYTES if gpus > 1 else 0)
    return {
        WEIGHTS: size * model.parameters // gpus,
        CACHE: kv_cache_bytes(model, requests, context, bytes_each=size) // gpus,
        ACTIVATIONS: live.get(ACTIVATIONS, 0),
        LOGITS: requests * model.vocab * (size + 4),
        RUNTIME: runtime,
    }


def plan_serving(
    name: str,
    model: ModelSpec,
    *,
    device: Device,
    free_bytes: tuple[int, ...],
    context: int | None,
    requests: int,
) -> Serving:
    """Choose the fewest GPUs that hold the model and the KV cache of ``requests`` full contexts.

    Parameters
    ----------
    free_bytes:
        Available memory of each GPU of the node; one value for CPUs.

    Raises
    ------
    UserError
        They do not fit; the advice has options that would.
    """
    tokens = context_of(model, context)
    counts = [count for count in range(1, len(free_bytes) + 1) if heads_divide(model, count)]
    for gpus in counts:
        memory = serving_memory(model, device=device, gpus=gpus, context=tokens, requests=requests)
        capacity = min(sorted(free_bytes, reverse=True)[:gpus])
        if sum(memory.values()) <= capacity:
            return Serving(
                device=device,
                gpus=gpus if device == "cuda" else 0,
                context=tokens,
                requests=requests,
                memory=memory,
                capacity_bytes=capacity,
            )
    memory = serving_memory(model, device=device, gpus=counts[-1], context=tokens, requests=requests)
    place = "in memory" if device == "cpu" else f"in each of {format_count(counts[-1], 'GPU')}"
    fixed_bytes = sum(memory.values()) - memory[CACHE]
    advice = "Use more or larger GPUs."
    if fixed_bytes < max(free_bytes):
        advice = f"Use a smaller --context than {tokens}, or fewer --requests than {requests}."
    elif device == "cpu":
        advice = "Use a machine with more memory, or a GPU."
    raise UserError(
        f"{name} needs {format_bytes(sum(memory.values()))} {place} to serve "
        f"{format_count(requests, 'request')} of {tokens:,} tokens "
        f"({format_bytes(memory[WEIGHTS])} of weights, {format_bytes(memory[CACHE])} of KV cache); "
        f"{format_bytes(max(free_bytes))} are free.",
        advice,
    )


def heads_divide(model: ModelSpec, gpus: int) -> bool:
    """Return whether ``gpus`` GPUs can share each block's attention heads evenly; KV heads may be replicated.

    Source: vLLM 0.32, config/model.py and layers/linear.py.
    """
    return model.heads % gpus == 0 and (model.kv_heads % gpus == 0 or gpus % model.kv_heads == 0)
