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


def test_engine_auto_is_trl_and_trl_is_for_nothing_else() -> None:
    job = Job(model=LLAMA, method="lora", engine="auto", task="grpo")
    assert with_simplest_engine(job).engine == "trl"
    assert unsupported_job(with_simplest_engine(job)) is None
    assert with_simplest_engine(replace(job, task="dpo")).engine != "trl"
    for fields in ({"trained_modules": ("lm_head",)}, {"new_tokens": 2}):
        refused = replace(job, engine="trl", **fields)  # type: ignore[arg-type]
        assert "original weight of the head" in (unsupported_job(refused) or "")


def test_the_keys_and_values_of_all_answers_of_a_step_are_there_at_once() -> None:
    few, many = (memory.active(setup(sequences=n)) for n in (8, 512))
    assert few[CACHE] < many[CACHE]
    assert many[CACHE] >= kv_cache_bytes(LLAMA, 512, 2048)
    assert sum(many.values()) > sum(few.values())


def test_memory_never_falls_with_more_answers_or_a_larger_reward_model() -> None:
    sizes = [sum(memory.active(setup(sequences=n)).values()) for n in (1, 4, 16, 64, 256)]
    assert sizes == sorted(sizes)
    scored = memory.active(setup(answers=Answers(reward_parameters=10**9)))
    assert scored["reward model"] == 2 * 10**9
    assert "reward model" not in memory.active(setup())


@pytest.mark.parametrize(
    ("method", "compares", "reference"),
    [("lora", None, "adapters-off"), ("full", None, "none"), ("full", True, "copy"), ("lora", False, "none")],
)
def test_a_second_model_is_held_only_where_it_is_asked_for(
    method: str, compares: bool | None, reference: str
) -> None:
    found = setup(method, answers=Answers(compares=compares))
    assert found.reference == reference
    assert ("reference model" in memory.active(found)) == (reference == "copy")


def test_full_training_keeps_weights_in_fp32_and_a_frozen_base_in_16_bits() -> None:
    assert memory.active(setup("full"))["weights"] == 4 * LLAMA.parameters
    assert memory.active(setup("lora"))["weights"] == 2 * LLAMA.parameters


def test_drawing_answers_is_a_part_of_the_step_that_grows_with_their_length() -> None:
    gpu = hardware.gpu("H100 SXM")
    short, long = (throughput.speed(setup(answers=Answers(length=n)), gpu) for n in (64, 512))
    assert 0 < short.parts.generation < long.parts.generation
    assert long.parts.total == pytest.approx(long.step_seconds)
    low, high = long.tokens_per_second_range or (0, 0)
    assert low < (long.tokens_per_second or 0) < high
    assert "answers are drawn" in long.basis


def test_answers_have_half_of_a_short_sequence_and_256_tokens_of_a_long_one() -> None:
    assert [default_answer_len(tokens) for tokens in (64, 512, 4096)] == [32, 256, 256]
    assert setup().answer_len == 256
