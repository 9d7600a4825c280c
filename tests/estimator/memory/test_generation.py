"""Memory of generation: the cache to the byte, the peak beside real runs, and what was published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.published.generation import PublishedGeneration, runs
from estimator.memory.generation import (
    CACHE,
    WEIGHT_BYTES,
    Batch,
    generation_bytes,
    kv_cache_bytes,
    live_bytes,
)
from estimator.models import ModelSpec, find, resolve
from estimator.plan import GIB

pytest.importorskip("torch")
import torch

from estimator.exact.tracker import StepTracker
from tests.launchers.engines.loop import families

PROMPT, NEW = 20, 12  # together longer than the families' windows


def tiny(family: str, folder: Path, **values: Any) -> tuple[Any, ModelSpec]:
    """A tiny model that never ends an answer, and what the estimator reads of its config.json."""
    network = families.network(family, **values)
    network.generation_config.eos_token_id = None
    network.config.save_pretrained(folder)
    return network, resolve(str(folder), online=False).spec


def generate(network: Any, sequences: int, prompt: int, new: int, **values: Any) -> Any:
    ids = torch.randint(3, 50, (sequences, prompt))
    mask = torch.ones_like(ids)
    mask[0, : prompt // 2] = 0  # padded on the left, as in generation.py
    options = {"do_sample": True, "top_k": 0, "pad_token_id": 0, "return_dict_in_generate": True}
    with torch.inference_mode():
        return network.generate(ids, attention_mask=mask, max_new_tokens=new, **(options | values))


@pytest.mark.parametrize("family", [name for name in families.FAMILIES if name != "mpt"])
def test_the_kv_cache_size_equals_that_of_transformers(family: str, tmp_path: Path) -> None:
    network, model = tiny(family, tmp_path)
    cache = generate(network, 2, PROMPT, NEW).past_key_values
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for layer in cache.layers
        if getattr(layer, "keys", None) is not None  # a recurrent block's state does not grow with the tokens
        for tensor in (layer.keys, layer.values, *getattr(layer, "compressed_kv", {}).values())
    }
    real = sum(storages.values())
    # The last token that is drawn is not cached
    assert kv_cache_bytes(model, 2, PROMPT + NEW - 1, bytes_each=4) == real


LARGER_MLP = {"intermediate_size": 512}
LARGE_VOCABULARY = {"vocab_size": 50_000}


@pytest.mark.parametrize(
    ("family", "values", "shape", "top_p"),
    [
        ("llama", {}, (8, 200, 20), 1.0),
        pytest.param("llama", {}, (8, 20, 90), 1.0, marks=pytest.mark.slow),
        ("llama", LARGER_MLP, (8, 200, 4), 1.0),
        ("llama", LARGE_VOCABULARY, (32, 10, 4), 1.0),
        ("llama", LARGE_VOCABULARY, (32, 10, 4), 0.9),
        ("gemma2", {"head_dim": 32}, (8, 200, 8), 1.0),
        ("mixtral", {}, (8, 200, 8), 1.0),
    ],
)
def test_the_generation_peak_matches_a_real_run(
    family: str, values: dict[str, int], shape: tuple[int, int, int], top_p: float, tmp_path: Path
) -> None:
    network, model = tiny(family, tmp_path, max_position_embeddings=512, **values)
    with StepTracker() as tracker:
        generate(network, *shape, top_p=top_p, return_dict_in_generate=False)
    real = max(sum(parts.values()) for parts in tracker.peaks.values())
    sequences, prompt, new = shape
    batch = Batch(sequences=sequences, prompt_tokens=prompt, new_tokens=new)
    predicted = sum(live_bytes(model, batch, bytes_each=4, top_p=top_p).values())
    assert predicted == pytest.approx(real, rel=0.1)


def test_the_last_decoding_step_holds_the_cache_and_previous_keys_of_one_block() -> None:
    model = find("llama-8b")  # 32 blocks, 8 key/value heads of 128
    batch = Batch(sequences=2, prompt_tokens=1, new_tokens=999)
    cache = 2 * 1000 * 32 * 2 * 1024 * 2
    assert live_bytes(model, batch) == {CACHE: cache, "activations": 2 * 1000 * 1024 * 2}
    capped = find("gemma-2-9b")  # 42 blocks, 16 heads and 8 key/value heads of 256, no fused attention
    live = live_bytes(capped, batch, bytes_each=2)
    assert live["activations"] == 2 * 1000 * (2 * 16 * 256 * 2 + 16 * (2 + 4))


with_peaks = [run for run in runs() if run.peak_gib is not None]


@pytest.mark.parametrize("run", with_peaks, ids=lambda run: run.name)
def test_the_generation_peak_matches_published_runs(run: PublishedGeneration) -> None:
    live = live_bytes(run.model, run.batch, padded=False)
    held = live[CACHE] * run.cache_copies + sum(live.values()) - live[CACHE]
    predicted = WEIGHT_BYTES["cuda"] * run.model.parameters + held
    assert predicted / GIB == pytest.approx(run.peak_gib, rel=0.08)


def test_a_generating_process_reserves_the_cache_twice() -> None:
    model, batch = find("llama-8b"), Batch(sequences=32, prompt_tokens=64, new_tokens=4096)
    assert generation_bytes(model, batch)[CACHE] == 2 * kv_cache_bytes(model, 32, 64 + 4096)
