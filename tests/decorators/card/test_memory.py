"""Memory on the card: each measured counter is shown next to its own prediction."""

from __future__ import annotations

import dataclasses

from decorators.card import charts, memory
from decorators.card.state import CardState
from estimator.plan import GIB
from tests.decorators.flows.plans import make_plan
from tests.decorators.profile.states import STARTED, make_state


def rows_of(state: CardState) -> dict[str, tuple[str, str]]:
    memory_rows = memory.memory_rows(
        state.plan.prediction.memory, state.measured, on_gpu=state.plan.layout.device == "cuda"
    )
    return {label: (predicted, measured) for label, predicted, measured in memory_rows}


def bars_of(state: CardState, bar: str) -> dict[str, float]:
    values = memory.memory_bars(state)["layer"][0]["data"]["values"]
    return {each["part"]: each["gib"] for each in values if each["bar"] == bar}


def test_each_counter_has_its_own_prediction() -> None:
    rows = rows_of(make_state())
    assert rows["memory of a GPU, by NVML"] == ("34.0 GiB, at most 40.0 GiB", "32.5 GiB")
    assert rows["reserved by torch"] == ("33.0 GiB, at most 39.0 GiB", "31.9 GiB")
    assert rows["allocated by torch (tensors)"] == ("32.0 GiB", "29.9 GiB")
    assert rows["needed to run"] == ("33.0 GiB, at most 36.0 GiB", "")
    assert rows["a GPU, including use before the step"] == ("80.0 GiB capacity", "33.0 GiB")


def test_without_nvml_the_measured_memory_of_a_gpu_is_unknown() -> None:
    rows = rows_of(make_state(nvml=False))
    assert rows["memory of a GPU, by NVML"] == ("34.0 GiB, at most 40.0 GiB", "unknown")
    assert rows["reserved by torch"] == ("33.0 GiB, at most 39.0 GiB", "31.9 GiB")


def test_on_a_cpu_the_card_shows_resident_memory() -> None:
    memory_row = rows_of(make_state(on_gpus=False))["memory of a process"]
    assert memory_row == ("600 MiB, at most 750 MiB", "573 MiB")


def test_the_memory_bars_show_every_category_and_the_measured_memory() -> None:
    predicted, measured = (bars_of(make_state(), bar) for bar in ("predicted", "measured"))
    assert list(predicted) == ["weights", "gradients", "optimizer", "activations", "runtime", "allocator"]
    assert sum(predicted.values()) == 34  # what it shows, beside what was shown
    assert (round(sum(measured.values()), 1), round(measured["runtime"], 1)) == (32.5, 0.6)
    marks = memory.memory_bars(make_state())["layer"][1]["data"]["values"]
    assert [mark["gib"] for mark in marks] == [40, 80]


def test_a_capacity_far_above_the_bars_is_named_instead_of_drawn() -> None:
    predicted = make_plan({}, "local").prediction.memory.counted("resident")
    spec = charts.memory_bars(predicted, [], "process", 64 * GIB)
    assert [mark["mark"] for mark in spec["layer"][1]["data"]["values"]] == ["upper bound"]
    assert "(capacity: 64.0 GiB, far to the right)" in spec["layer"][0]["encoding"]["x"]["title"]


def test_memory_over_time_is_from_nvml_or_else_torch_or_else_resident_memory() -> None:
    assert memory.memory_points(make_state())[0].source == "GPU 0"
    assert memory.memory_points(make_state(nvml=False))[-1].used_bytes > 31 * GIB
    assert memory.memory_points(make_state(on_gpus=False))[0].used_bytes < GIB
    points = memory.memory_points(make_state(steps=0, on_gpus=False))
    assert {point.source for point in points} == {"the step's processes"}


def test_memory_in_use_before_the_step_is_subtracted() -> None:
    state = make_state()
    assert state.gpu_samples[0].gpus[0].used_bytes == GIB
    points = [point for point in memory.memory_points(state) if point.source == "GPU 0"]
    assert (points[0].used_bytes, points[-1].used_bytes) == (0, 32 * GIB)
    freed = dataclasses.replace(
        state.gpu_samples[1],
        at=STARTED + 300,
        gpus=tuple(dataclasses.replace(gpu, used_bytes=0) for gpu in state.gpu_samples[1].gpus),
    )
    later = dataclasses.replace(state, gpu_samples=(*state.gpu_samples, freed))
    assert min(point.used_bytes for point in memory.memory_points(later)) == 0
