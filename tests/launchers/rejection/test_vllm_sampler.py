"""Answers drawn by vLLM: what it is asked for, and who is told in a line that it is not here.

The last tests draw with it where it is installed (`.ci/run nightly`).
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from estimator.errors import UserError
from estimator.memory.generation import kv_cache_bytes
from estimator.models import find
from launchers.dataset.prompts import Prompt
from launchers.rejection import answers as rows
from launchers.rejection import vllm_sampler
from launchers.rejection.answers import BatchLimit, Ends
from launchers.rejection.generation import check_vllm, generate
from launchers.settings import Settings, build
from launchers.settings.sections import Rejection
from tests.launchers.rejection.test_generation import model, request  # noqa: F401 - a fixture

SETTINGS = Settings(
    seed=7, rejection=Rejection(generator="vllm", answers=3, temperature=0.8, top_p=0.9, max_new_tokens=32)
)
LIMIT = BatchLimit(sequences=96, tokens=9600)
without_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is not None, reason="of an environment without vLLM"
)


def test_the_vllm_engine_gets_the_memory_share_and_batch_of_the_plan_and_the_longest_row() -> None:
    ask = partial(vllm_sampler.engine_options, find("tiny-llama"), SETTINGS, LIMIT, longest=100)
    options = ask(device="cuda", gpus=4, share=0.925)
    assert (options["tensor_parallel_size"], options["gpu_memory_utilization"]) == (4, 0.925)
    assert (options["max_num_seqs"], options["max_model_len"]) == (96, 132)
    assert (options["dtype"], options["seed"]) == ("bfloat16", 7)
    on_cpu = ask(device="cpu", gpus=0, share=None)
    assert on_cpu["dtype"] == "float32", "as transformers draws on CPUs"
    each = kv_cache_bytes(find("tiny-llama"), 1, 1, bytes_each=4)
    assert on_cpu["kv_cache_memory_bytes"] == (9600 + 96 * 128) * each, "not a share of the machine's memory"
    assert not {"tensor_parallel_size", "gpu_memory_utilization"} & on_cpu.keys()


def test_each_prompt_is_sampled_with_the_settings_and_its_own_seed() -> None:
    ends = Ends(ids=frozenset({2, 5}), tokenizer=None)

    def options(index: int, settings: Settings = SETTINGS) -> dict[str, Any]:
        prompt = Prompt(index=index, text="t", shown="t", tokens=1)
        return vllm_sampler.sampling_options(settings, prompt, ends)

    first = options(0)
    assert {name: first[name] for name in ("n", "temperature", "top_p", "max_tokens")} == {
        "n": 3,
        "temperature": 0.8,
        "top_p": 0.9,
        "max_tokens": 32,
    }
    assert first["stop_token_ids"] == [2, 5]
    other_run = SETTINGS.model_copy(update={"seed": 8})
    seeds = {options(0)["seed"], options(1)["seed"], options(0, other_run)["seed"]}
    assert first["seed"] in seeds
    assert len(seeds) == 3
    assert all(0 <= seed < 2**60 for seed in seeds), "vLLM adds the answer's number, in 64 bits"


def test_penalties_in_the_generation_config_of_the_model_are_applied() -> None:
    from transformers import GenerationConfig

    config = GenerationConfig(repetition_penalty=1.1, top_k=20, temperature=0.3)
    assert vllm_sampler.penalties_of(config) == {"repetition_penalty": 1.1}


@without_vllm
def test_missing_vllm_is_reported_before_anything_is_requested(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"there is no vLLM in {re.escape(sys.executable)}"):
        check_vllm(None)
    with pytest.raises(UserError, match="there is no such program here"):
        check_vllm(str(tmp_path / "python"))
    with pytest.raises(UserError, match=r"only to rejection\.generator=vllm"):
        build({"rejection": {"generator_python": sys.executable}})


@pytest.mark.slow  # as the fixture imports transformers
def test_the_configured_python_generates_the_answers(model: Path, tmp_path: Path) -> None:  # noqa: F811
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\necho "$@" >>"$0.calls"\n[ "$1" = -c ]\n'
    )  # says that it has vLLM, and fails
    python.chmod(0o755)
    generation_request = request(model, tmp_path / "run", generator="vllm", generator_python=str(python))
    with pytest.raises(RuntimeError, match="has failed, 3 of 3 shards are missing"):
        generate(generation_request, lambda *_: None)
    calls = python.with_suffix(".calls").read_text().splitlines()
    assert calls[-1] == f"-m launchers.rejection.generation {generation_request.work_dir}/request.json"


@pytest.mark.slow
@pytest.mark.timeout(1800)  # vLLM starts three times in these two, half a minute each on quiet cores
def test_vllm_generates_the_shards_and_the_same_shards_again(model: Path, tmp_path: Path) -> None:  # noqa: F811
    pytest.importorskip("vllm", reason="vLLM is not installed here (docs/rejection.md#vllm)")
    answered: list[int] = []
    generation_request = request(model, tmp_path / "run", generator="vllm")
    assert generate(generation_request, lambda shard, _: answered.append(shard)) == 3
    before = {path.name: path.read_text() for path in generation_request.shards_dir.iterdir()}
    (generation_request.shards_dir / rows.shard_name(1)).unlink()
    generate(generation_request, lambda shard, _: answered.append(shard))
    assert answered == [0, 1, 2, 1]
    assert {path.name: path.read_text() for path in generation_request.shards_dir.iterdir()} == before
    answers = [
        each for path in sorted(generation_request.shards_dir.iterdir()) for each in rows.read_answers(path)
    ]
    assert sorted(each.index for each in answers) == list(range(40))
    assert all(len(each.answers) == 4 for each in answers)
    assert all(1 <= answer.tokens <= 5 for each in answers for answer in each.answers)
    assert any(len({answer.text for answer in each.answers}) > 1 for each in answers), "answers are drawn"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_vllm_selects_the_same_most_likely_tokens_as_transformers(model: Path, tmp_path: Path) -> None:  # noqa: F811
    pytest.importorskip("vllm", reason="vLLM is not installed here (docs/rejection.md#vllm)")
    sure = sharpened(model, tmp_path / "sure")
    tokens_by_engine: dict[str, list[str]] = {}
    for generator in ("transformers", "vllm"):
        generation_request = request(sure, tmp_path / generator, generator=generator, temperature=0.01)
        generate(generation_request, lambda *_: None)
        drawn = [
            each
            for path in sorted(generation_request.shards_dir.iterdir())
            for each in rows.read_answers(path)
        ]
        tokens_by_engine[generator] = [answer.text for each in drawn for answer in each.answers]
    theirs, ours = tokens_by_engine["transformers"], tokens_by_engine["vllm"]
    assert len(theirs) == len(ours) == 160
    assert len(set(theirs)) > 1, "prompts have answers of their own"
    assert sum(one == other for one, other in zip(theirs, ours, strict=True)) >= 0.9 * 160


def sharpened(model: Path, folder: Path) -> Path:  # noqa: F811
    """The model with logits so far apart that at a low temperature nothing is left to chance."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    weights["model.norm.weight"] *= 100
    save_file(weights, file, metadata={"format": "pt"})
    return folder
