"""GPUs and memory of an inference server."""

from __future__ import annotations

import pytest

from estimator import models
from estimator.errors import UserError
from estimator.inference.serving import Serving, plan_serving
from estimator.memory.generation import CACHE, LOGITS, WEIGHTS, kv_cache_bytes
from estimator.plan import GIB


def plan(name: str, gib: float, gpus: int = 8, *, context: int | None = None, requests: int = 8) -> Serving:
    return plan_serving(
        name,
        models.find(name),
        device="cuda",
        free_bytes=(int(gib * GIB),) * gpus,
        context=context,
        requests=requests,
    )


def test_serving_uses_the_fewest_gpus_that_hold_weights_and_cache() -> None:
    assert plan("llama-8b", 40).gpus == 1
    assert plan("llama-8b", 20).gpus == 2
    large = plan("llama-70b", 73)
    assert large.gpus == 4  # 131 GiB of weights leave too little of two GPUs for 20 GiB of cache
    spec = models.find("llama-70b")
    assert large.memory[WEIGHTS] == 2 * spec.parameters // 4
    assert large.memory[LOGITS] == 8 * spec.vocab * (2 + 4)
    assert large.memory[CACHE] == kv_cache_bytes(spec, 8, 8192) // 4
    assert large.needed_bytes <= large.capacity_bytes


def test_serving_uses_only_gpu_counts_that_divide_the_heads() -> None:
    counts = {plan("llama-8b", gib).gpus for gib in (12, 14, 16, 20, 30, 40)}
    assert counts <= {1, 2, 4, 8}


def test_more_requests_or_longer_contexts_never_need_fewer_gpus() -> None:
    gpus = [plan("llama-8b", 24, requests=requests).gpus for requests in (1, 4, 16, 64)]
    assert gpus == sorted(gpus)
    assert gpus[0] < gpus[-1]


def test_a_model_that_does_not_fit_is_refused_with_alternatives() -> None:
    with pytest.raises(UserError, match=r"(?s)of KV cache\); 24.0 GiB are free.*smaller --context than 8192"):
        plan("llama-8b", 24, gpus=1, requests=64)
    with pytest.raises(UserError, match="more or larger GPUs"):
        plan("llama-70b", 24, gpus=2)
    with pytest.raises(UserError, match="--context 200,000"):
        plan("llama-8b", 80, context=200_000)
