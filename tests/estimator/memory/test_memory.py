"""Memory: against the formulas' own sums, against rules of thumb, and as it must move."""

from typing import Any

import pytest

from estimator import memory
from estimator.engines.setups import setup_of
from estimator.job import Job
from estimator.models import find
from estimator.plan import Layout


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


@pytest.mark.parametrize(
    ("sharding", "bytes_a_parameter"),
    [("zero0", 16.0), ("zero1", 4 + 12 / 8), ("zero2", 2 + 14 / 8), ("zero3", 16 / 8)],
)
def test_deepspeed_mixed_precision_takes_16_bytes_per_parameter_sharded_by_stage(
    sharding: str, bytes_a_parameter: float
) -> None:
    job = Job(model=find("llama-8b"), engine="deepspeed")
    layout = layout_of(processes_per_node=8, sharding=sharding, precision="bf16-mixed")
    total = sum(dict(memory.states(setup_of(job, layout))).values())
    assert total == pytest.approx(bytes_a_parameter * job.model.parameters, rel=1e-6)


@pytest.mark.parametrize("processes", [1, 8])
def test_reserved_memory_is_shown_memory_minus_context_and_nccl(processes: int) -> None:
    layout = layout_of(processes_per_node=processes, sharding="fsdp" if processes > 1 else "none")
    setup = setup_of(Job(model=find("llama-8b")), layout)
    estimated = memory.estimate(setup)
    reserved, device = estimated.counted("reserved"), estimated.counted("device")
    assert (
        device.likely_bytes - reserved.likely_bytes == estimated.outside_bytes == memory.runtime_bytes(setup)
    )
    for counted, kind in ((reserved, "reserved"), (device, "process")):
        known = memory.range_of(setup, kind)
        assert (counted.likely_bytes, counted.upper_bytes) == (known.likely_bytes, known.upper_bytes)
        assert sum(value for _, value in counted.categories) == counted.likely_bytes


def test_a_cpu_estimate_has_resident_but_no_reserved_memory() -> None:
    estimated = memory.estimate(setup_of(Job(model=find("llama-8b")), layout_of(device="cpu")))
    assert estimated.counted("reserved") is None
    resident = estimated.counted("resident")
    assert (resident.likely_bytes, resident.upper_bytes) == (estimated.shows_bytes, estimated.shows_range[1])


def test_the_allocated_counter_excludes_context_and_allocator_overhead() -> None:
    estimated = memory.estimate(setup_of(Job(model=find("llama-8b")), layout_of()))
    allocated = estimated.counted("allocated")
    assert sum(value for _, value in allocated.categories) == allocated.likely_bytes == estimated.live_bytes
    assert not {"runtime", "allocator"} & set(dict(allocated.categories))
