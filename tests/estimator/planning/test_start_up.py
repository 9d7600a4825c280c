"""Minutes before the first step: their parts, and that they are in the hours and the price."""

from __future__ import annotations

import csv
from dataclasses import replace

from estimator import Job, Target, hardware
from estimator.models import find
from estimator.planning.goals import Goals
from estimator.planning.places import choose_places
from estimator.planning.planner import plans
from estimator.planning.start_up import TABLE

ANY = Target(kind="catalogue")
SMALL, LARGE = find("llama-8b"), find("llama-70b")


def place_of(name: str):  # type: ignore[no-untyped-def]
    return choose_places(Job(model=SMALL), replace(ANY, instance_type=name), Goals())[0]


def test_every_figure_has_its_source_and_date() -> None:
    with TABLE.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {row["what"] for row in rows if row["cloud"] == "*"} == {"machine", "image", "disk"}
    for row in rows:
        assert float(row["value"]) > 0
        assert row["source"]
        assert row["date"] >= "2026"
        assert row["cloud"] == "*" or row["cloud"] in hardware.clouds()


def test_a_short_job_is_not_planned_on_many_expensive_machines() -> None:
    job = Job(model=SMALL, global_batch_size=64)
    ranked = plans(job, replace(ANY, capacity="any"), Goals(tokens=10**9, budget_usd=300, max_nodes=64))
    for made in ranked.plans:
        assert (made.prediction.hours or 0) > 3 * made.prediction.start_up.hours
