"""What a plan of GRPO holds in memory and takes in time beside the training step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from estimator import hardware, memory, throughput
from estimator.engines.setups import setup_of
from estimator.engines.support import unsupported_job, with_simplest_engine
from estimator.job import Job
from estimator.memory.generation import CACHE, kv_cache_bytes
from estimator.models import find
from estimator.plan import Layout
from estimator.setup import Answers, Setup, default_answer_len

LLAMA = find("llama-8b")


def setup(method: str = "lora", sequences: int = 16, **job: object) -> Setup:
    asked = Job(model=LLAMA, method=method, engine="trl", task="grpo", seq_len=2048, **job)  # type: ignore[arg-type]
    layout = Layout(
        device="cuda",
        nodes=1,
        processes_per_node=1,
        sharding="none",
        micro_batch_size=1,
        accumulation=sequences,
        seq_len=2048,
        activation_checkpointing=True,
        precision="bf16-mixed",
        optimizer="adamw",
    )
    return setup_of(asked, layout)


def test_engine_auto_is_trl_for_grpo_only() -> None:
    job = Job(model=LLAMA, method="lora", engine="auto", task="grpo")
    assert with_simplest_engine(job).engine == "trl"
    assert unsupported_job(with_simplest_engine(job)) is None
    assert with_simplest_engine(replace(job, task="dpo")).engine != "trl"
    for fields in ({"trained_modules": ("lm_head",)}, {"new_tokens": 2}):
        refused = replace(job, engine="trl", **fields)  # type: ignore[arg-type]
        assert "original weight of the head" in (unsupported_job(refused) or "")


def test_the_kv_cache_of_all_answers_of_a_step_is_live_at_once() -> None:
    few, many = (memory.active(setup(sequences=n)) for n in (8, 512))
    assert few[CACHE] < many[CACHE]
    assert many[CACHE] >= kv_cache_bytes(LLAMA, 512, 2048)
    assert sum(many.values()) > sum(few.values())


def test_memory_never_decreases_with_more_answers_or_a_larger_reward_model() -> None:
    sizes = [sum(memory.active(setup(sequences=n)).values()) for n in (1, 4, 16, 64, 256)]
    assert sizes == sorted(sizes)
    scored = memory.active(setup(answers=Answers(reward_parameters=10**9)))
    assert scored["reward model"] == 2 * 10**9
    assert "reward model" not in memory.active(setup())


@pytest.mark.parametrize(
    ("method", "compares_reference", "reference"),
    [("lora", None, "adapters-off"), ("full", None, "none"), ("full", True, "copy"), ("lora", False, "none")],
)
def test_a_reference_copy_is_in_memory_only_if_the_step_compares_with_one(
    method: str, compares_reference: bool | None, reference: str
) -> None:
    found = setup(method, answers=Answers(compares_reference=compares_reference))
    assert found.reference == reference
    assert ("reference model" in memory.active(found)) == (reference == "copy")


def test_full_training_keeps_weights_in_fp32_and_a_frozen_base_in_16_bits() -> None:
    assert memory.active(setup("full"))["weights"] == 4 * LLAMA.parameters
    assert memory.active(setup("lora"))["weights"] == 2 * LLAMA.parameters


def test_generation_time_is_part_of_the_step_and_grows_with_answer_length() -> None:
    gpu = hardware.gpu("H100 SXM")
    short, long = (throughput.speed(setup(answers=Answers(length=n)), gpu) for n in (64, 512))
    assert 0 < short.parts.generation < long.parts.generation
    assert long.parts.total == pytest.approx(long.step_seconds)
    low, high = long.tokens_per_second_range or (0, 0)
    assert low < (long.tokens_per_second or 0) < high
    assert "generation time" in long.basis


def test_default_answers_have_256_tokens_or_half_of_a_shorter_sequence() -> None:
    assert [default_answer_len(tokens) for tokens in (64, 512, 4096)] == [32, 256, 256]
    assert setup().answer_len == 256
