"""The plan as people see it."""

import pytest

from estimator import CannotFit, Job, Machine, Target, plan, render, render_cannot_fit
from estimator.changes import Change
from estimator.models import find
from estimator.plan import GIB

LAPTOP = Machine(cpu_cores=4, ram_bytes=16 * GIB, disk_free_bytes=100 * GIB)


@pytest.mark.parametrize("width", [60, 100])
def test_a_plan_shows_request_memory_price_and_reasons_within_the_width(width: int) -> None:
    made = plan(Job(model=find("llama-70b"), global_batch_size=64, steps=100), Target(kind="kubernetes"))
    text = render(made, width, verbose=True)
    assert max(len(line) for line in text.splitlines()) <= width
    assert made.prediction.memory.describe() in " ".join(render(made, width).split())
    assert "will show" not in render(made, width)
    flat = " ".join(text.split())
    for word in (
        "llama-70b",
        made.request.instance_type or "",
        "needs",
        "will show",
        "tokens/s",
        "$",
        "prices of 2026",
    ):
        assert word in flat
    for category, _ in made.prediction.memory.categories:
        assert category in text
    assert "Why" in text
    assert "Rejected" in text


def test_what_is_not_known_is_said_to_be_unknown() -> None:
    text = render(plan(Job(model=find("tiny-llama")), Target(machine=LAPTOP)))
    assert "Speed       unknown" in text
    assert "$" not in text


def test_a_job_that_does_not_fit_shows_what_it_needs_and_the_commands_that_would_work() -> None:
    with pytest.raises(CannotFit) as caught:
        plan(Job(model=find("llama-8b"), method="lora"), Target(machine=LAPTOP))
    text = render_cannot_fit(caught.value, "python flow.py run --model llama-8b --method lora")
    assert text.startswith("llama-8b has 8.0 billion parameters")
    assert "Here        no GPU, 4 CPU cores" in text
    assert "$" in text
    assert "  python flow.py run --model llama-8b --method lora --with kubernetes" in text


def test_a_suggested_value_replaces_the_one_that_was_given() -> None:
    error = CannotFit("no", suggestions=((Change("method", "qlora"),),))
    for given in ("--method lora", "--method=lora"):
        text = render_cannot_fit(error, f"python flow.py run {given} --nodes 1")
        assert "python flow.py run --nodes 1 --method qlora" in text
