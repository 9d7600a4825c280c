"""Requested next to used resources, and idle GPUs, on the card."""

from __future__ import annotations

import dataclasses
from typing import Any

from decorators.card.resources import idle_lines, resource_rows, utilization_over_time
from decorators.card.state import CardState
from decorators.card.step import Text, draw
from estimator.rightsizing.recommend import Recommendation
from estimator.rightsizing.usage import Sizes
from launchers.report.telemetry import Step
from tests.decorators.profile.states import make_state

GIB = 2**30


def with_gpus(state: CardState, **changes: dict[int, Any]) -> CardState:
    """Return the state with other figures of some GPUs: ``mean_utilization={3: 0.38}``."""
    gpus = tuple(
        dataclasses.replace(
            gpu, **{name: values[gpu.index] for name, values in changes.items() if gpu.index in values}
        )
        for gpu in state.measured.gpus
    )
    return dataclasses.replace(state, measured=dataclasses.replace(state.measured, gpus=gpus))


def loading(rank: int, seconds: float, dt: float) -> list[Step]:
    """Return steps of a rank that waits for data."""
    values = {
        "loss": None,
        "lr": None,
        "grad_norm": None,
        "samples": 1,
        "tokens": 8,
        "dtf": None,
        "dtb": None,
    }
    return [Step(rank=rank, step=number, dt=dt, loading=seconds, **values) for number in (121, 122, 123)]


def test_an_idle_gpu_is_named_with_the_data_loading_time() -> None:
    assert idle_lines(make_state()) == []
    loading_steps = [step for rank in range(8) for step in loading(rank, 0.4 if rank == 3 else 0.01, 0.6)]
    state = with_gpus(make_state(more=loading_steps), mean_utilization={3: 0.38, 5: 0.5})
    assert idle_lines(state) == [
        "GPU 3 idle 62% of the time: data loading takes 0.4 s of a 0.6 s step.",
        "GPU 5 idle 50% of the time.",
    ]
    assert any("GPU 3 idle" in block.markdown for block in draw(state) if isinstance(block, Text))


def test_gpus_that_the_step_never_used_are_named_together() -> None:
    unused = {6: 0.0, 7: 0.0}
    state = with_gpus(make_state(), mean_utilization=unused, peak_used_bytes={6: GIB // 2, 7: GIB // 2})
    assert idle_lines(state) == ["GPUs 6, 7 not used. Request fewer GPUs."]
    young = dataclasses.replace(state.measured, duration_seconds=5.0)
    assert idle_lines(dataclasses.replace(state, measured=young)) == []


def test_requested_used_and_recommended_sizes_are_side_by_side() -> None:
    recommendation = Recommendation(
        sizes=Sizes(cpu=12, memory_mib=80 * 1024, gpus=8, gpu_type="L40S"),
        gpu_memory_bytes=40 * GIB,
        gpu_utilization=0.97,
        tasks=3,
        reason="used in 3 earlier tasks",
    )
    requested = Sizes(cpu=96, memory_mib=1000 * 1024, gpus=8, gpu_type="A100-80GB")
    state = make_state(requested=requested, next_request=recommendation)
    rows = {name: row for name, *row in resource_rows(state)}
    assert rows["CPU cores"] == ["96", "unknown", "12"]
    assert rows["host memory"] == ["1,000 GiB", "61.0 GiB", "80.0 GiB"]
    assert rows["GPUs"] == ["8 x A100-80GB", "8", "8 x L40S"]
    assert rows["memory of a GPU"] == ["80.0 GiB", "32.5 GiB", "40.0 GiB"]
    assert resource_rows(make_state()) == [], "nothing was requested, and nothing is known"


def test_utilization_is_that_of_gpus_or_else_of_cpu_cores() -> None:
    def sources(state: CardState) -> set[str]:
        spec = utilization_over_time(state)
        return {row["who"] for row in spec["layer"][0]["data"]["values"]} if spec is not None else set()

    assert sources(make_state()) == {f"GPU {number}" for number in range(8)}
    on_cpu = make_state(on_gpus=False)
    busy = tuple(dataclasses.replace(sample, cpu_cores=1.5) for sample in on_cpu.host_samples)
    assert sources(dataclasses.replace(on_cpu, host_samples=busy)) == {"the step's processes"}
    assert sources(on_cpu) == set()
