"""The page: predicted beside measured, and everything that is missing with its reason."""

from __future__ import annotations

from benchmarks.on_gpu import cases, page
from benchmarks.on_gpu.cases import ON_GPUS
from benchmarks.on_gpu.checks import Checked
from benchmarks.on_gpu.one_run import Outcome
from benchmarks.on_gpu.page import Heading
from benchmarks.on_gpu.search import Found
from benchmarks.on_gpu.session import Measured
from estimator.plan import GIB
from tests.benchmarks.on_gpu.machines import H200, plan_of, ran

HEADING = Heading(
    title="What training needs, shows and does on 1x NVIDIA H200",
    command="python -m benchmarks.on_gpu --minutes 20",
    machine="on a processor",
    day="2026-10-01",
    minutes=12.0,
    resolution=0.02,
)
NOT_CHECKED = Checked(command="python -m checklist", problem="it had not ended after 240 s")
CASES = cases.in_order(ON_GPUS, H200)


def rendered(*measured: Measured, scale: cases.Scale = ON_GPUS) -> str:
    return page.render(HEADING, measured, scale, NOT_CHECKED)


def cells(text: str, section: str, case: str) -> list[str]:
    """The cells of a case's line in the table below a heading."""
    below = text.split(f"## {section}\n", 1)[1].split("\n## ", 1)[0]
    line = next(line for line in below.splitlines() if line.startswith(f"| {case} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_live_shown_and_needed_memory_stand_beside_what_was_predicted() -> None:
    case = CASES[0]
    plan = plan_of(case, ON_GPUS, H200)
    memory = plan.prediction.memory
    needed = round(memory.needs_bytes / 1.25)
    measured = ran(case, plan, live_bytes=memory.live_bytes * 2, device_bytes=memory.shows_bytes)
    limit = needed - (measured.outside_bytes or 0)
    measured.found = Found(runs_bytes=limit, fails_bytes=limit - GIB // 2, trials=2, finished=True)
    measured.trials = [Outcome(ended="ran"), Outcome(ended="out of memory")]
    found = cells(rendered(measured), "Memory of one process", case.name)
    assert found[0] == f"{memory.live_bytes / GIB:.2f}"
    assert found[1:3] == [f"{memory.live_bytes * 2 / GIB:.2f}", "-50.0%"]
    assert found[5] == "+0.0%"
    assert found[7:] == [f"{needed / GIB:.2f}", "0.50 (2 runs)", "+25.0%"]


def test_speed_of_packed_rows_is_compared_and_of_others_only_told() -> None:
    packed = next(case for case in CASES if case.lengths == "fixed")
    plan = plan_of(packed, ON_GPUS, H200)
    predicted = plan.prediction.tokens_per_second
    step = 4 * 2048 / predicted
    text = rendered(ran(packed, plan, step_seconds=2 * step), ran(CASES[0], plan_of(CASES[0], ON_GPUS, H200)))
    assert cells(text, "Speed", packed.name)[2] == "+100.0%"
    assert cells(text, "Speed", CASES[0].name)[:3] == ["", "1,000", ""]


def test_a_peak_that_nvml_missed_is_left_out_with_its_reason() -> None:
    case = CASES[0]
    measured = ran(
        case, plan_of(case, ON_GPUS, H200), device_bytes=GIB // 2, reserved_bytes=29 * GIB, samples=6
    )
    measured.found = Found(runs_bytes=29 * GIB, fails_bytes=28 * GIB, trials=0, finished=True)
    text = rendered(measured)
    memory = cells(text, "Memory of one process", case.name)
    assert memory[3], "what was predicted stays"
    assert memory[4:6] == ["", ""], "neither the figure nor its error"
    assert memory[7:] == ["", "", ""], "what lies outside of torch is not known, nor with it what is needed"
    assert cells(text, "NVML beside torch's counters", case.name) == ["", "29.00", "", "0.00", "6"]
    assert "below what torch reserved in the same run" in text
    assert f"- {case.name}: 0.50 GiB seen in 6 looks, 29.00 GiB reserved" in text
