"""Memory: against the formulas' own sums, against rules of thumb, and as it must move."""

from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimator import hardware, memory
from estimator.job import Job
from estimator.memory.shape import part_of
from estimator.memory.states import divides_scales, scale_bytes
from estimator.models import find
from estimator.plan import GIB, Layout, Sharding
from estimator.planning.engines import setup_of


def layout_of(**changes: Any) -> Layout:
    values: dict[str, Any] = {
        "device": "cuda",
        "nodes": 1,
        "processes_per_node": 1,
        "sharding": "none",
        "micro_batch_size": 1,
        "accumulation": 1,
        "seq_len": 512,
        "activation_checkpointing": False,
        "precision": "bf16",
        "optimizer": "adamw",
    }
    return Layout(**(values | changes))


def test_full_bf16_training_with_torchtune_holds_8_bytes_a_parameter() -> None:
    job = Job(model=find("llama-8b"))
    parts = dict(memory.states(setup_of(job, layout_of())))
    assert sum(parts.values()) == 8 * job.model.parameters


@pytest.mark.parametrize(
    ("sharding", "bytes_a_parameter"),
    [("zero0", 16.0), ("zero1", 4 + 12 / 8), ("zero2", 2 + 14 / 8), ("zero3", 16 / 8)],
)
def test_deepspeeds_mixed_precision_holds_16_bytes_a_parameter_divided_by_stage(
    sharding: str, bytes_a_parameter: float
) -> None:
    job = Job(model=find("llama-8b"), engine="deepspeed")
    layout = layout_of(processes_per_node=8, sharding=sharding, precision="bf16-mixed")
    total = sum(dict(memory.states(setup_of(job, layout))).values())
    assert total == pytest.approx(bytes_a_parameter * job.model.parameters, rel=1e-6)


def test_offloaded_states_leave_the_gpu_for_the_host() -> None:
    job = Job(model=find("llama-8b"), engine="deepspeed", offload="cpu")
    layout = layout_of(sharding="zero2", precision="bf16-mixed", offload="cpu")
    on_gpu = dict(memory.states(setup_of(job, layout)))
    assert (on_gpu["master weights"], on_gpu["optimizer"]) == (0, 0)
    assert memory.host_bytes(setup_of(job, layout)) > memory.host_bytes(
        setup_of(job, replace(layout, offload="none"))
    )


def test_qlora_stores_linear_weights_in_half_a_byte_and_embeddings_in_bf16() -> None:
    job = Job(model=find("llama-2-7b"), method="qlora")
    parts = dict(memory.states(setup_of(job, layout_of())))
    assert parts["weights"] / 1e9 == pytest.approx(0.5 * 6.476 + 2 * 0.262, rel=0.01)


@pytest.mark.parametrize("processes", [1, 8])
def test_torch_reserves_what_a_gpu_shows_but_for_context_and_collectives(processes: int) -> None:
    layout = layout_of(processes_per_node=processes, sharding="fsdp" if processes > 1 else "none")
    setup = setup_of(Job(model=find("llama-8b")), layout)
    found = memory.estimate(setup)
    reserved, device = found.counted("reserved"), found.counted("device")
    assert reserved is not None
    assert device is not None
    assert device.likely_bytes - reserved.likely_bytes == found.outside_bytes == memory.runtime_bytes(setup)
    for counted, kind in ((reserved, "reserved"), (device, "process")):
        known = memory.range_of(setup, kind)
        assert (counted.likely_bytes, counted.upper_bytes) == (known.likely_bytes, known.upper_bytes)
        assert sum(value for _, value in counted.categories) == counted.likely_bytes


def test_of_a_cpus_process_nothing_lies_outside() -> None:
    found = memory.estimate(setup_of(Job(model=find("llama-8b")), layout_of(device="cpu")))
    assert found.counted("reserved") is None
    resident = found.counted("resident")
    assert resident is not None
    assert (resident.likely_bytes, resident.upper_bytes) == (found.shows_bytes, found.shows_range[1])


def test_tensors_alone_are_predicted_without_context_and_allocator() -> None:
    found = memory.estimate(setup_of(Job(model=find("llama-8b")), layout_of()))
    allocated = found.counted("allocated")
    assert allocated is not None
    assert sum(value for _, value in allocated.categories) == allocated.likely_bytes == found.live_bytes
    assert not {"runtime", "allocator"} & set(dict(allocated.categories))


def test_what_is_needed_is_the_sum_of_the_categories_and_lies_below_the_upper_end() -> None:
    found = memory.estimate(setup_of(Job(model=find("llama-8b")), layout_of()), capacity_bytes=80 * GIB)
    assert found.needs_bytes == sum(value for _, value in found.categories)
    assert found.needs_range[0] < found.needs_bytes < found.needs_range[1]
    assert found.shows_bytes == sum(value for _, value in found.shown_categories)
    assert [name for name, _ in found.categories] == [
        name for name in memory.CATEGORIES if name in dict(found.categories)
    ]


# Rules of thumb, each with the assumption under which it holds


def test_70b_full_in_bf16_on_8_cards_of_80_gb_has_room_for_its_states_only() -> None:
    """Pure bf16 AdamW states are 66 of 80 GiB; gradients, buffers and activations on top do not fit safely.

    With two such nodes they do, at 2,048 tokens and with checkpointing.
    """
    job = Job(model=find("llama-70b"), global_batch_size=16, seq_len=2048)
    one = layout_of(
        processes_per_node=8, sharding="fsdp", seq_len=2048, activation_checkpointing=True, accumulation=2
    )
    states = sum(dict(memory.states(setup_of(job, one))).values())
    assert 65 * GIB < states < 66 * GIB
    assert memory.estimate(setup_of(job, one)).needs_bytes > 80 * GIB
    two = replace(one, nodes=2, accumulation=1)
    assert memory.estimate(setup_of(job, two)).needs_bytes < 80 * GIB


@pytest.mark.parametrize("seq_len", [512, 1024])
@pytest.mark.parametrize("gpu", ["L4", "RTX 4090", "A10G"])
def test_7b_lora_fits_one_card_of_24_gb_with_checkpointing_at_short_lengths(gpu: str, seq_len: int) -> None:
    job = Job(model=find("llama-2-7b"), method="lora", seq_len=seq_len)
    layout = layout_of(seq_len=seq_len, activation_checkpointing=True, accumulation=8)
    assert memory.estimate(setup_of(job, layout)).needs_bytes < hardware.gpu(gpu).vram_bytes


@pytest.mark.parametrize("model", ["llama-2-7b", "llama-8b", "mistral-7b"])
def test_7b_qlora_fits_one_card_of_16_gb_with_checkpointing(model: str) -> None:
    job = Job(model=find(model), method="qlora", seq_len=1024)
    layout = layout_of(seq_len=1024, activation_checkpointing=True, accumulation=8)
    assert memory.estimate(setup_of(job, layout)).needs_bytes < hardware.gpu("RTX A4000").vram_bytes


def test_7b_full_needs_more_than_one_card_of_24_gb_with_plain_adamw() -> None:
    job = Job(model=find("llama-2-7b"), seq_len=512)
    assert memory.estimate(setup_of(job, layout_of(activation_checkpointing=True))).needs_bytes > 24 * GIB


# Properties

SHARDINGS: tuple[tuple[Sharding, str], ...] = (
    ("none", "torchtune"),
    ("fsdp", "torchtune"),
    ("zero0", "deepspeed"),
    ("zero1", "deepspeed"),
    ("zero2", "deepspeed"),
    ("zero3", "deepspeed"),
)


@st.composite
def runs(draw: st.DrawFn) -> tuple[Job, Layout]:
    sharding, engine = draw(st.sampled_from(SHARDINGS))
    processes = 1 if sharding == "none" else draw(st.sampled_from([1, 2, 8]))
    device = draw(st.sampled_from(["cuda", "cpu"]))
    precision = "fp32" if device == "cpu" else "bf16" if engine == "torchtune" else "bf16-mixed"
    job = Job(
        model=find(draw(st.sampled_from(["tiny-llama", "llama-3.2-1b", "llama-8b", "mixtral-8x7b"]))),
        method=draw(st.sampled_from(["full", "lora", "qlora"])),
        engine=cast("Any", engine),
        seq_len=draw(st.integers(1, 2048)),
        lora_rank=draw(st.integers(1, 256)),
        compile=draw(st.booleans()),
        packing=draw(st.booleans()),
    )
    layout = layout_of(
        device=device,
        processes_per_node=processes,
        sharding=sharding,
        micro_batch_size=draw(st.integers(1, 16)),
        accumulation=draw(st.integers(1, 4)),
        seq_len=job.seq_len,
        activation_checkpointing=draw(st.booleans()),
        precision=precision,
    )
    return job, layout


@given(runs(), st.integers(1, 8))
@settings(max_examples=150, deadline=None)
def test_memory_never_falls_when_batch_length_or_rank_grows(run: tuple[Job, Layout], more: int) -> None:
    job, layout = run
    before = memory.estimate(setup_of(job, layout)).needs_bytes
    longer = min(job.seq_len + more, job.model.max_seq_len)
    grown = [
        (job, replace(layout, micro_batch_size=layout.micro_batch_size + more)),
        (replace(job, seq_len=longer), replace(layout, seq_len=longer)),
        (replace(job, lora_rank=job.lora_rank + more), layout),
    ]
    for bigger_job, bigger_layout in grown:
        assert memory.estimate(setup_of(bigger_job, bigger_layout)).needs_bytes >= before


@given(runs(), st.sampled_from([2, 3, 8, 64]))
@settings(max_examples=100, deadline=None)
def test_sharded_states_add_up_to_the_whole(run: tuple[Job, Layout], processes: int) -> None:
    job, layout = run
    everything: Sharding = "fsdp" if job.engine == "torchtune" else "zero3"
    alone = replace(layout, processes_per_node=1, sharding=everything)
    setup = setup_of(job, alone)
    whole = dict(memory.states(setup))
    parts = dict(memory.states(setup_of(job, replace(alone, processes_per_node=processes))))
    if not divides_scales(setup):
        for sizes in (whole, parts):
            sizes["weights"] -= scale_bytes(setup, part_of(setup, "only"))
    for name, size in whole.items():
        assert size <= parts[name] * processes < size + processes


@given(runs())
@settings(max_examples=50, deadline=None)
def test_checkpointing_never_needs_more_live_memory(run: tuple[Job, Layout]) -> None:
    job, layout = run
    on, off = (replace(layout, activation_checkpointing=flag) for flag in (True, False))
    one_layer = layout.micro_batch_size * layout.seq_len * 4 * job.model.hidden
    live_on, live_off = (sum(memory.active(setup_of(job, each)).values()) for each in (on, off))
    assert live_on <= live_off + one_layer * job.model.layers  # a one-layer model only adds boundaries
