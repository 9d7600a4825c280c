"""The plan as people see it."""

from dataclasses import replace

import pytest

from estimator import CannotFit, Job, Machine, Target, plan, render, render_cannot_fit
from estimator.engines import images
from estimator.formatting import format_bytes
from estimator.models import find, resolve
from estimator.plan import GIB
from estimator.planning.goals import Goals
from estimator.planning.planner import plans
from estimator.planning.summary import render_summary

LAPTOP = Machine(cpu_cores=4, ram_bytes=16 * GIB, disk_free_bytes=100 * GIB)


@pytest.mark.parametrize("width", [60, 100])
def test_a_report_shows_request_memory_price_and_reasons_within_the_width(width: int) -> None:
    chosen = plan(Job(model=find("llama-70b"), global_batch_size=64, steps=100), Target(kind="kubernetes"))
    text = render(chosen, width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert chosen.prediction.memory.describe() in " ".join(render(chosen, width).split())
    flat = " ".join(text.split())
    for word in (
        "llama-70b",
        chosen.request.instance_type or "",
        "to spare per GPU",
        "tokens/s",
        "$",
        "prices of 2026",
    ):
        assert word in flat
    for category, _ in chosen.prediction.memory.categories:
        assert category in text
    assert "Why" in text
    assert "Rejected" in text


def test_alternatives_have_their_number_of_machines_and_unknown_speeds_are_named() -> None:
    chosen = plan(Job(model=find("llama-8b"), method="lora"), Target(kind="catalogue", gpu="A100 SXM 80GB"))
    several = replace(chosen, request=replace(chosen.request, nodes=2, gpus_per_node=8))
    unknown = replace(several, prediction=replace(several.prediction, tokens_per_second=None))
    machine = f"{chosen.request.instance_type} ({chosen.request.cloud})"
    flat = " ".join(render_summary(chosen, [several, unknown]).split())
    assert f"16x A100 SXM 80GB on 2 {machine}, lora, {chosen.prediction.tokens_per_second:,.0f}" in flat
    assert f"16x A100 SXM 80GB on 2 {machine}, lora, speed unknown" in flat


def test_unknown_figures_are_shown_as_unknown() -> None:
    text = render(plan(Job(model=find("tiny-llama")), Target(machine=LAPTOP)))
    assert "Speed       unknown" in text
    assert "$" not in text


def test_a_job_that_does_not_fit_shows_the_need_and_working_commands() -> None:
    with pytest.raises(CannotFit) as caught:
        plan(Job(model=find("llama-8b"), method="lora"), Target(machine=LAPTOP))
    text = render_cannot_fit(caught.value, "python flow.py run --model llama-8b --method lora")
    assert text.startswith("llama-8b has 8.0 billion parameters")
    assert "Available   no GPU, 4 CPU cores" in text
    assert "$" in text
    assert "  python flow.py run --model llama-8b --method lora --with kubernetes" in text


def test_a_suggested_value_replaces_that_of_the_command() -> None:
    error = CannotFit("no", suggestions=({"method": "qlora"},))
    for given in ("--method lora", "--method=lora"):
        text = render_cannot_fit(error, f"python flow.py run {given} --nodes 1")
        assert "python flow.py run --nodes 1 --method qlora" in text


@pytest.mark.parametrize("model", ["llama-8b", "llama-70b", "mixtral-8x7b", "stable-diffusion-xl"])
@pytest.mark.parametrize("target", [Target(kind="kubernetes"), Target(kind="catalogue", nodes=2)])
def test_a_summary_fits_one_screen_with_place_price_time_and_memory(model: str, target: Target) -> None:
    spec = resolve(model).spec
    job = Job(
        model=spec,
        task=images.task_for(spec, "sft"),  # type: ignore[arg-type]
        method="lora",
        seq_len=images.length_of(spec, None),
        steps=1000,
    )
    ranking = plans(job, target, Goals(), 3)
    lines = render_summary(ranking.best, ranking.plans[1:]).splitlines()
    assert len(lines) <= 28
    assert max(map(len, lines)) <= 80
    request = ranking.best.request
    size = f"{request.cpu} CPU, {format_bytes(request.memory_mib << 20)} per node"
    assert size in " ".join(line.strip() for line in lines)
    labels = {line[:12].strip() for line in lines}
    assert labels >= {"Where", "Price", "Time", "Memory", "Step", "Why", "Also fits"}


def test_time_and_price_of_a_job_have_the_range_of_the_predicted_speed() -> None:
    job = Job(model=find("llama-8b"), method="lora", engine="auto")
    chosen = plan(job, Target(kind="catalogue", instance_type="g6e.xlarge", nodes=1), Goals(tokens=10**8))
    prediction = chosen.prediction
    assert prediction.hours
    assert prediction.usd
    assert prediction.tokens_per_second_range
    assert prediction.hours_range is not None
    assert prediction.usd_range is not None
    assert prediction.start_up
    slowest = 10**8 / prediction.tokens_per_second_range[0] / 3600 + prediction.start_up.hours
    assert prediction.hours_range[0] < prediction.hours < prediction.hours_range[1]
    assert prediction.hours_range[1] == pytest.approx(slowest)
    assert prediction.usd_range[1] == pytest.approx(slowest * (prediction.usd_per_hour or 0))
    for text in (render_summary(chosen), render(chosen)):
        assert f"{prediction.hours:.1f} h ({prediction.hours_range[0]:.1f} h to {slowest:.1f} h)" in text
        assert f"${prediction.usd:,.2f} (${prediction.usd_range[0]:,.2f} to" in text
