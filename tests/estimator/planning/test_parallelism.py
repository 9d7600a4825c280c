"""Tensor, context, pipeline and expert parallelism: what is tried, what is asked for, what is taken."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimator import Job, Target, UserError, memory
from estimator.engines.setups import setup_of
from estimator.job import divides_heads
from estimator.models import find
from estimator.planning.goals import Goals
from estimator.planning.parallelism import spreads
from estimator.planning.planner import plan
from estimator.planning.search import Search
from estimator.vocabulary import PARALLEL_ENGINES

ANY = Target(kind="catalogue")
MODELS = ("llama-8b", "llama-70b", "mixtral-8x7b", "qwen3-30b-a3b", "tiny-llama")
WORLDS = st.sampled_from([(1, 1), (1, 2), (1, 8), (2, 8), (3, 8), (4, 4), (16, 8)])


def job_of(model: str, engine: Any = "torchtitan", **changes: Any) -> Job:
    return Job(model=find(model), engine=engine, **{"global_batch_size": 64, **changes})


@given(st.sampled_from(MODELS), st.sampled_from(PARALLEL_ENGINES), WORLDS, st.integers(1, 256))
@settings(max_examples=60, deadline=None)
def test_every_spread_uses_all_processes_and_keeps_tensor_parallelism_in_a_node(
    model: str, engine: Any, world: tuple[int, int], batch: int
) -> None:
    job = job_of(model, engine, global_batch_size=batch)
    nodes, per_node = world
    search = Search(job, "bf16-mixed", "cuda")
    for ladder in search.ladders.of(nodes, per_node):
        for layout in (
            search.ladders.rung(ladder, step) for step in range(len(search.ladders.sizes(ladder)))
        ):
            setup = setup_of(job, layout)  # which refuses degrees that divide nothing
            assert setup.world_size == nodes * per_node
            assert layout.global_batch_size == batch
            assert (
                layout.global_batch_size == setup.data_parallel * setup.micro_batch_size * setup.accumulation
            )
            assert per_node % layout.tensor_parallel == 0
            assert divides_heads(job.model, layout.tensor_parallel)
            assert job.model.layers % layout.pipeline_parallel == 0


@given(
    st.sampled_from(MODELS),
    st.sampled_from(["full", "lora"]),
    st.sampled_from(["torchtune", "deepspeed", *PARALLEL_ENGINES]),
    WORLDS,
)
@settings(max_examples=60, deadline=None)
def test_every_spread_needs_at_least_its_share_of_the_states(
    model: str, method: Any, engine: Any, world: tuple[int, int]
) -> None:
    """The bound by which the search leaves numbers of GPUs out."""
    job = job_of(model, engine, method=method, global_batch_size=128)
    nodes, per_node = world
    search = Search(job, "bf16" if engine == "torchtune" else "bf16-mixed", "cuda")
    whole = search.total_state_bytes(None)
    for ladder in search.ladders.of(nodes, per_node):
        layout = search.ladders.rung(ladder)
        own = sum(dict(memory.states(search.setup(layout))).values())
        assert own * nodes * per_node >= 0.999 * whole
        assert search.estimate(layout).needs_bytes >= own


@pytest.mark.parametrize(
    ("changes", "world", "shardings", "replicas"),
    [
        ({}, (1, 1), ["none", "fsdp"], [1]),
        ({"method": "lora"}, (1, 1), ["none"], [1]),
        ({}, (1, 8), ["shard_grad_op", "fsdp"], [1]),
        ({}, (2, 8), ["shard_grad_op", "fsdp"], [1, 2]),
        ({"replicas": 4}, (1, 8), ["shard_grad_op", "fsdp"], [4]),
        ({"replicas": 3}, (1, 8), [], []),
        ({"global_batch_size": 4}, (1, 8), [], []),
    ],
)
def test_fsdp2_shards_over_the_processes_of_replicas_that_divide_them(
    changes: dict[str, Any], world: tuple[int, int], shardings: list[str], replicas: list[int]
) -> None:
    found = [
        (spread.sharding, spread.replicate)
        for spread in spreads(job_of("llama-8b", "fsdp2", **changes), *world)
    ]
    assert found == [(sharding, copies) for sharding in shardings for copies in replicas]


def test_launched_engines_shard_states_only() -> None:
    for engine in ("torchtune", "deepspeed"):
        for spread in spreads(job_of("llama-8b", engine), 2, 8):
            assert spread.model_parallel == 1


def test_a_batch_smaller_than_the_gpu_count_needs_model_parallelism() -> None:
    chosen = plan(
        job_of("llama-8b", global_batch_size=2), Target(kind="catalogue", nodes=1, gpus=8, gpu="H100 SXM")
    )
    layout = chosen.layout
    assert layout.global_batch_size == 2
    assert layout.data_parallel <= 2
    assert layout.tensor_parallel * layout.context_parallel * layout.pipeline_parallel >= 4


@pytest.mark.parametrize("engine", PARALLEL_ENGINES)
def test_requested_parallel_degrees_are_used_and_shown(engine: Any) -> None:
    job = job_of("llama-8b", engine, tensor_parallel=2, pipeline_parallel=2, context_parallel=2)
    chosen = plan(job, Target(kind="catalogue", gpu="H100 SXM", nodes=1, gpus=8))
    layout = chosen.layout
    assert (layout.tensor_parallel, layout.pipeline_parallel, layout.context_parallel) == (2, 2, 2)
    assert layout.schedule in ("1f1b", "interleaved")
    text = " ".join(chosen.why)
    for words in (
        "tensor parallel 2, as requested",
        "pipeline parallel 2, as requested",
        "context parallel 2",
    ):
        assert words in text


def test_tensor_parallel_wider_than_a_node_is_refused() -> None:
    with pytest.raises(UserError, match="must divide the 4 GPUs"):
        plan(job_of("llama-8b", tensor_parallel=8), Target(kind="catalogue", gpus=4))
    with pytest.raises(UserError, match="is not divisible over"):
        plan(job_of("llama-8b", tensor_parallel=8), ANY, Goals(max_gpus=4))
