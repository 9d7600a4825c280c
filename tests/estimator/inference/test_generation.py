"""Rejection sampling as it is planned: the batch, the nodes, hours and price of each stage."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from estimator import hardware
from estimator.inference.generation import Sampling, plan_generation, total
from estimator.job import Job, Machine, Target
from estimator.memory.generation import Batch, generation_bytes
from estimator.models import find
from estimator.plan import GIB, Plan, Stage
from estimator.planning import planner
from estimator.throughput.generation import generation_speed

LLAMA = find("llama-8b")
SAMPLING = Sampling(
    prompts=2000, held_out=100, answers=4, prompt_tokens=512, new_tokens=256, by_function=True
)


def plan_of(model: str = "llama-8b", **target: Any) -> Plan:
    job = Job(model=find(model), method="lora", engine="fsdp2", seq_len=2048, global_batch_size=16)
    return planner.plan(job, Target(kind="kubernetes", **target))


def planned(plan: Plan, sampling: Sampling = SAMPLING, model: str = "llama-8b") -> Plan:
    return replace(plan, generation=plan_generation(plan, find(model), sampling))


def stage(plan: Plan, name: str) -> Stage:
    found = plan.generation.stage(name)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def h100() -> Plan:
    return plan_of(gpu="H100 SXM", gpus=8, nodes=1)


def test_each_training_gpu_generates_with_one_copy_of_the_model(h100: Plan) -> None:
    generate = stage(planned(h100), "generate")
    assert (generate.nodes, generate.request.gpus_per_node) == (8, 1)
    assert generate.request.memory_mib * 8 < 2048 * 1024, "of the eight copies that a node holds"
    assert stage(planned(h100), "compare").nodes == 1
    few = stage(planned(h100, replace(SAMPLING, prompts=100)), "generate")
    assert few.nodes < 8, "no node is without a batch"
    assert stage(planned(h100, replace(SAMPLING, nodes=3)), "generate").nodes == 3


def test_a_copy_uses_a_number_of_gpus_that_divides_the_attention_heads() -> None:
    plan = plan_of("llama-70b", gpu="H100 SXM", gpus=8)  # 64 heads, 8 of keys and values
    for answers, blocks_shared, heads_shared in ((8, 3, 4), (40, 5, 8)):
        sampling = replace(SAMPLING, answers=answers, prompt_tokens=4096, new_tokens=4096)
        for shared, gpus in ((False, blocks_shared), (True, heads_shared)):
            own = replace(sampling, heads_shared=shared)
            assert stage(planned(plan, own, "llama-70b"), "generate").request.gpus_per_node == gpus


def test_the_batch_is_the_largest_that_fits_or_still_adds_throughput() -> None:
    plan = planned(plan_of(gpu="L4", gpus=1, nodes=1))
    capacity, generation = plan.prediction.memory.capacity_bytes, plan.generation
    assert capacity is not None
    assert generation.fits
    sequences = generation.batch_tokens // (512 + 256)
    assert sequences % SAMPLING.answers == 0
    for more, fits in ((0, True), (SAMPLING.answers, False)):
        batch = Batch(sequences=sequences + more, prompt_tokens=512, new_tokens=256)
        assert (sum(generation_bytes(LLAMA, batch).values()) <= capacity) is fits


def test_hours_and_price_are_those_of_the_node_with_the_most_batches(h100: Plan) -> None:
    plan = planned(h100)
    generate = stage(plan, "generate")
    sequences = plan.generation.batch_tokens // (512 + 256)
    batch = Batch(sequences=sequences, prompt_tokens=512, new_tokens=256)
    speed = generation_speed(LLAMA, hardware.gpu("H100 SXM"), batch)
    each = math.ceil(math.ceil(2000 / (sequences // 4)) / 8)  # batches of the first node
    assert speed.seconds is not None
    assert generate.hours is not None
    assert generate.usd is not None
    start = h100.prediction.start_up
    assert start is not None
    for end in (0, 1):
        assert generate.hours[end] == pytest.approx(each * speed.seconds[end] / 3600 + start.hours)
        # Eight nodes of one GPU are one machine
        assert generate.usd[end] == pytest.approx(
            generate.hours[end] * (h100.prediction.usd_per_hour or 0), rel=1e-6
        )


def test_a_function_scores_without_gpus_and_its_time_is_unknown(h100: Plan) -> None:
    plan = planned(replace(h100, prediction=replace(h100.prediction, hours=1.0, usd=80.0)))
    score = stage(plan, "score")
    assert (score.request.gpus_per_node, score.hours, score.usd) == (0, None, None)
    hours, usd, missing = total(plan)
    assert missing == ("score",)
    rest = [stage(plan, name) for name in ("generate", "compare")]
    assert hours[1] == pytest.approx(1.0 + sum(each.hours[1] for each in rest if each.hours))
    assert usd[0] == pytest.approx(80.0 + sum(each.usd[0] for each in rest if each.usd))


def test_a_reward_model_gets_the_gpus_that_hold_it(h100: Plan) -> None:
    sampling = replace(SAMPLING, by_function=False, reward_model=find("llama-70b"))
    score = stage(planned(h100, sampling), "score")
    assert score.request.gpus_per_node == 2
    assert score.hours[0] < score.hours[1]
    small = stage(planned(h100, replace(sampling, reward_model=LLAMA)), "score")
    assert small.request.gpus_per_node == 1
    long = replace(sampling, prompt_tokens=60_000, new_tokens=60_000)
    assert stage(planned(h100, long), "score").request.gpus_per_node > 2
    unread = stage(planned(h100, replace(sampling, reward_model=None)), "score")
    assert (unread.hours, unread.basis) == (None, "the reward model is read when the run begins")


def test_unknown_values_stay_unknown(h100: Plan) -> None:
    later = planned(h100, replace(SAMPLING, prompts=None, held_out=None))
    assert stage(later, "generate").hours is None
    assert stage(later, "generate").nodes == 8
    experts = plan_of("mixtral-8x7b", gpu="H100 SXM", gpus=8, nodes=1)
    drawn = stage(planned(experts, model="mixtral-8x7b"), "generate")
    assert (drawn.hours, drawn.usd) == (None, None)
    assert drawn.request.gpus_per_node == 2, "94 GB of weights"


def test_answers_of_one_prompt_that_do_not_fit_are_reported_and_tried_one_by_one(h100: Plan) -> None:
    long = replace(SAMPLING, answers=512, prompt_tokens=2048, new_tokens=2048)
    plan = planned(plan_of(gpu="L4", gpus=1, nodes=1), long)
    assert plan.generation.fits is False
    assert plan.generation.batch_tokens == 512 * 4096


def test_a_plan_with_generation_survives_json(h100: Plan) -> None:
    plan = planned(h100)
    assert Plan.from_json(plan.to_json()) == plan


def test_on_a_local_machine_one_process_generates() -> None:
    job = Job(model=find("tiny-llama"), method="full", engine="fsdp2", seq_len=256, global_batch_size=16)
    machine = Machine(cpu_cores=8, ram_bytes=32 * GIB, disk_free_bytes=100 * GIB)
    plan = planner.plan(job, Target(kind="local", device="cpu", machine=machine))
    generated = planned(plan, model="tiny-llama")
    assert stage(generated, "generate").nodes == 1
    assert (generated.generation.batch_sequences, generated.generation.batch_tokens) == (64, 16384)
