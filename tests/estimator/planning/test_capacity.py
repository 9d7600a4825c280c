"""What can rarely be had: which machines, why, and that they come after the others."""

from __future__ import annotations

import csv
import re
from dataclasses import replace

import pytest

from estimator import Job, Plan, Target, hardware
from estimator.models import find
from estimator.planning.capacity import TABLE, why_rare
from estimator.planning.goals import Goals
from estimator.planning.measured_gpus import UNMEASURED
from estimator.planning.places import Place, choose_places
from estimator.planning.planner import plan, plans
from estimator.planning.report import render

USUAL, WHATEVER = Target(kind="catalogue"), Target(kind="catalogue", capacity="any")
FULL = Job(model=find("llama-8b"), global_batch_size=16)


def place_of(name: str) -> Place:
    return choose_places(FULL, replace(USUAL, instance_type=name), Goals())[0]


def test_every_row_names_machines_of_the_table_with_reason_source_and_date() -> None:
    names = [(item.cloud, item.name) for item in hardware.instances()]
    with TABLE.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            pattern = re.compile(row["machines"], re.IGNORECASE)
            assert any(cloud == row["cloud"] and pattern.match(name) for cloud, name in names), row
            assert row["reason"]
            assert row["source"]
            assert row["date"] >= "2026"


@pytest.mark.parametrize(
    ("name", "rare"),
    [("p5.48xlarge", True), ("a3-highgpu-1g", True), ("a3-highgpu-8g", False), ("p4d.24xlarge", False)],
)
def test_machines_sold_in_capacity_blocks_have_low_availability(name: str, rare: bool) -> None:
    place = place_of(name)
    assert bool(why_rare(place)) == rare
    assert why_rare(replace(place, free_nodes=2)) == ""  # a cluster's own node is there
    assert why_rare(replace(place, spot=True)) == ""
    assert why_rare(None) == ""


def test_low_availability_ranks_last_with_a_reason_unless_capacity_is_any() -> None:
    usual = plans(FULL, USUAL, top=500)
    # Plans with unknown host memory, unmeasured GPUs or machines used in part rank after all of these
    known = [made for made in usual.plans if _has_known_memory(made) and UNMEASURED not in made.why]
    marks = [bool(made.prediction.low_availability) for made in known]
    assert any(marks)
    first = marks.index(True)
    behind = [made for made in known[first:] if not made.prediction.low_availability]
    cheaper = {_gpus_of(made) for made in known if made.prediction.low_availability}
    assert all(_gpus_of(made) in cheaper or _is_used_in_part(made) for made in behind), "dearer, of the same"
    assert "last: low on-demand availability" in usual.order
    rejected = plans(FULL, USUAL, top=3).rejected
    assert any("low availability: sold ahead" in line.reason for line in rejected)
    whatever = plans(FULL, WHATEVER, top=500)
    marks = [bool(made.prediction.low_availability) for made in whatever.plans if _has_known_memory(made)]
    assert marks != sorted(marks)
    assert "availability" not in whatever.order


def _gpus_of(made: Plan) -> tuple[object, ...]:
    return made.request.gpu_type, made.request.nodes, made.request.gpus_per_node


def _is_used_in_part(made: Plan) -> bool:
    return hardware.instance(made.request.instance_type or "").gpu_count > made.request.gpus_per_node


def _has_known_memory(made: Plan) -> bool:
    return hardware.instance(made.request.instance_type or "").ram_bytes is not None


def test_a_requested_machine_of_low_availability_is_planned_and_marked() -> None:
    chosen = plan(FULL, replace(USUAL, gpu="H100 SXM", instance_type="p5.48xlarge"))
    assert "Capacity Blocks" in chosen.prediction.low_availability
    assert "low availability: sold ahead in Capacity Blocks" in " ".join(render(chosen).split())
