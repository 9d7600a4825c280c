"""Memory as it must move, for random steps of all engines, methods and parallelisms."""

from dataclasses import replace
from typing import Any, get_args

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from estimator import memory, models, vocabulary
from estimator.errors import UserError
from estimator.memory.shape import part_of
from estimator.memory.states import (
    divides_scales,
    reduces_once,
    scale_bytes,
    unreduced_embedding_gradient_bytes,
)
from estimator.setup import Setup

NAMES = (
    "tiny-llama",
    "llama-3.2-1b",
    "llama-8b",
    "llama-2-7b",
    "mixtral-8x7b",
    "deepseek-v3",
    "phi-4",
    "gemma-2-9b",
    "bert-base",
)
MODELS = [models.find(name) for name in NAMES]


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    """Any step that Setup lets pass."""

    def pick(kind: Any) -> Any:
        return draw(st.sampled_from(get_args(kind)))

    sharding = pick(vocabulary.Sharding)
    alone = sharding in ("none", "ddp", "zero0")
    pipeline = draw(st.sampled_from([1, 1, 2, 4]))
    values: dict[str, Any] = {
        "model": draw(st.sampled_from(MODELS)),
        "engine": pick(vocabulary.Engine),
        "method": pick(vocabulary.Method),
        "task": pick(vocabulary.Task),
        "lora_rank": draw(st.integers(1, 256)),
        "quantization": pick(vocabulary.Quantization),
        "upcast_frozen": draw(st.booleans()),
        "precision": pick(vocabulary.Precision),
        "fp8": pick(vocabulary.Fp8),
        "optimizer": pick(vocabulary.Optimizer),
        "optimizer_in_backward": draw(st.booleans()),
        "sharding": sharding,
        "shard": 1 if alone else draw(st.sampled_from([1, 2, 8, 64])),
        "replicate": draw(st.sampled_from([1, 2])),
        "flat_parameters": draw(st.booleans()),
        "tensor": draw(st.sampled_from([1, 1, 2, 4])),
        "sequence_parallel": draw(st.booleans()),
        "context": draw(st.sampled_from([1, 1, 2])),
        "pipeline": pipeline,
        "virtual_stages": draw(st.sampled_from([1, 2])) if pipeline > 1 else 1,
        "schedule": "none" if pipeline == 1 else draw(st.sampled_from(get_args(vocabulary.Schedule)[1:])),
        "expert": draw(st.sampled_from([1, 1, 2, 4])),
        "micro_batch_size": draw(st.integers(1, 16)),
        "accumulation": draw(st.integers(1, 8)),
        "seq_len": 2 * draw(st.integers(1, 4096)),
        "fixed_length": draw(st.booleans()),
        "longest_once": draw(st.booleans()),
        "document_mask": draw(st.booleans()),
        "checkpointing": pick(vocabulary.Checkpointing),
        "activation_offload": draw(st.booleans()),
        "compile": draw(st.booleans()),
        "loss": pick(vocabulary.LossKind),
        "loss_chunks": draw(st.integers(1, 16)),
        "attention": draw(st.sampled_from(["flash", "math"])),
        "offload": draw(st.sampled_from(["none", "optimizer", "all"])),
        "offload_to": draw(st.sampled_from(["cpu", "nvme"])),
        "device": draw(st.sampled_from(["cuda", "cuda", "cpu"])),
    }
    values["lora_targets"] = values["model"].projections
    try:
        return Setup(**values)
    except UserError:
        assume(False)
        raise


@given(setups())
@settings(max_examples=150, deadline=None)
def test_every_setup_has_nonnegative_categories_and_figures_within_their_ranges(step: Setup) -> None:
    estimated = memory.estimate(step)
    assert all(size > 0 for _, size in estimated.categories)
    assert {name for name, _ in estimated.categories} <= set(memory.CATEGORIES)
    assert estimated.needs_bytes == sum(size for _, size in estimated.categories)
    assert estimated.needs_range[0] <= estimated.needs_bytes <= estimated.needs_range[1]
    assert estimated.shows_range[0] <= estimated.shows_bytes <= estimated.shows_range[1]
    for kind in ("allocated", "active", "reserved", "process", "needed"):
        span = memory.range_of(step, kind)
        assert 0 < span.lower_bytes <= span.likely_bytes <= span.upper_bytes
    assert memory.host_bytes(step) > 0
    assert memory.disk_bytes(step) > 0


@given(setups(), st.integers(1, 8))
@settings(max_examples=150, deadline=None)
def test_memory_never_decreases_with_batch_length_or_rank(step: Setup, more: int) -> None:
    grown = (
        replace(step, micro_batch_size=step.micro_batch_size + more),
        replace(step, seq_len=step.seq_len + 2 * more),
        replace(step, lora_rank=step.lora_rank + more),
    )
    for kind in ("active", "process"):
        before = memory.range_of(step, kind)
        for bigger in grown:
            after = memory.range_of(bigger, kind)
            assert after.likely_bytes >= before.likely_bytes
            assert after.upper_bytes >= before.upper_bytes


@given(setups(), st.sampled_from([2, 3, 8, 64]))
@settings(max_examples=100, deadline=None)
def test_sharded_states_sum_to_the_complete_states(step: Setup, processes: int) -> None:
    assume(step.expert == 1)
    everything: Any = "zero3" if step.engine == "deepspeed" else "fsdp"
    alone = replace(
        step,
        sharding=everything,
        shard=1,
        replicate=1,
        pipeline=1,
        virtual_stages=1,
        schedule="none",
        context=1,
    )
    whole = memory.states(alone)
    sharded = replace(alone, shard=processes)
    parts = memory.states(sharded)
    for name, size in whole.items():
        if name == "gradients" and (step.engine == "litgpt" or reduces_once(sharded)):
            continue  # FSDP1's flat parameters give frozen weights gradients; those of adapters stay whole
        if name == "gradients":  # only FSDP reduces the embedding's at once
            size -= unreduced_embedding_gradient_bytes(alone, part_of(alone, "only"))
        held = parts[name]
        if name == "weights" and size and not divides_scales(alone):
            scales = scale_bytes(alone, part_of(alone, "only"))
            size, held = size - scales, held - scales
        assert size <= held * processes < size + processes
