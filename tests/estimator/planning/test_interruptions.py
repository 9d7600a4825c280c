"""Spot: the arithmetic beside a simulation of its own, what a plan says of it, and what is refused."""

from __future__ import annotations

import csv
import math
import re
from dataclasses import replace

import pytest

from benchmarks import spot
from estimator import Job, Target, UserError, hardware
from estimator.calibration import Calibration
from estimator.hardware.cluster import tables
from estimator.hardware.cluster.taints import tolerated
from estimator.models import find
from estimator.plan import Interruptions, Plan
from estimator.planning import interruptions
from estimator.planning.goals import Goals
from estimator.planning.interruption_rates import TABLE, rate_of
from estimator.planning.planner import plan
from estimator.planning.report import render
from tests.estimator.calibration.finished_runs import finished

JOB = Job(model=find("llama-8b"), method="lora")
GCP = Goals(spot=True, clouds=("gcp",), tokens=25 * 10**6)


def gang(nodes: int, **changed: float) -> Interruptions:
    return replace(spot.gang(nodes), **changed)  # type: ignore[arg-type]


def test_every_interruption_row_has_a_source_and_unknown_rates_say_where_to_look() -> None:
    with TABLE.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {row["cloud"] for row in rows} == {"aws", "azure", "gcp"}
    for row in rows:
        assert row["source"]
        assert row["where"]
        assert row["date"] >= "2026"
        assert not row["per_node_hour"] or 0 < float(row["per_node_hour"]) < 1
        assert row["cloud"] in hardware.clouds()
        if row["machines"]:
            assert any(re.match(row["machines"], item.name) for item in hardware.instances())


def test_a_user_rate_overrides_the_table_and_an_unknown_rate_is_none() -> None:
    assert rate_of("aws", "p3.2xlarge").per_node_hour == 0.2
    assert rate_of("aws", "p3.2xlarge", 0.01).per_node_hour == 0.01
    assert rate_of("aws", "p5.48xlarge").per_node_hour is None
    assert "Spot Instance Advisor" in rate_of("aws", "p5.48xlarge").where
    assert rate_of("cluster", "8x A100").per_node_hour is None
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(UserError, match="must be a number above 0"):
            Goals(interruption_rate=wrong)


def test_spot_labels_have_sources_and_tolerated_taints() -> None:
    for row in tables.spot_labels():
        assert row.source
        assert not row.taint or tolerated(row.taint) is not None


def test_a_day_on_eight_spot_nodes_with_two_retries_rarely_completes() -> None:
    assert interruptions.completion_probability(24, gang(8), 2) == pytest.approx(0.0038, abs=1e-4)
    said = interruptions.completion_obstacle(24, gang(8), 2)
    assert said is not None
    assert "24.0 h on 8 spot nodes" in said
    assert "9.6 expected interruptions, 2 allowed; 0.4% of such runs finish" in said
    assert interruptions.completion_obstacle(24, gang(8), 20) is None


def test_the_formula_agrees_with_runs_that_are_interrupted_at_random() -> None:
    simulated = spot.simulate(gang(8), work_hours=24, runs=400, seed=8)
    assert interruptions.wall_hours(24, gang(8)) == pytest.approx(simulated.mean_hours, rel=0.1)


def test_each_interruption_costs_the_training_during_an_upload_too() -> None:
    hours = [
        interruptions.wall_hours(24, gang(8, store_seconds=seconds, restart_seconds=600.0 - seconds))
        for seconds in (0.0, 300.0)
    ]
    assert hours[0] == pytest.approx(hours[1])


def test_the_planned_checkpoint_interval_is_near_the_optimum() -> None:
    best = gang(8)
    for factor in (0.25, 0.5, 2, 4):
        other = replace(best, interval_seconds=best.interval_seconds * factor)
        assert interruptions.wall_hours(24, best) < 1.01 * interruptions.wall_hours(24, other)


def test_the_checkpoint_interval_is_explained_by_the_time_between_interruptions_of_the_gang() -> None:
    (_, line) = interruptions.describe(
        gang(8, per_node_hour=0.125, interval_seconds=60.0, checkpoint_seconds=60.0)
    )
    assert "x 60 min between interruptions" in line
    (_, line) = interruptions.describe(gang(8, per_node_hour=0.125, interval_seconds=3600.0))
    assert "the duration of an upload" in line


def test_a_run_that_never_reaches_a_checkpoint_has_infinite_wall_time() -> None:
    hopeless = gang(64, per_node_hour=50.0, interval_seconds=3600.0 * 10)
    assert interruptions.wall_hours(24, hopeless) == math.inf
    assert interruptions.completion_probability(math.inf, hopeless, 20) == 0
    assert "it never reaches the next checkpoint" in (
        interruptions.completion_obstacle(math.inf, hopeless, 20) or ""
    )


def planned(goals: Goals, **job: object) -> Plan:
    return plan(replace(JOB, **job), Target(kind="catalogue"), goals)  # type: ignore[arg-type]


def test_a_spot_plan_includes_lost_work_and_names_the_checkpoint_interval() -> None:
    known = planned(replace(GCP, interruption_rate=0.05))
    found = known.prediction.interruptions
    assert found.expected is not None
    assert found.steps is not None
    assert known.request.spot
    assert not known.prepare.spot
    prediction = known.prediction
    trained = 25 * 10**6 / (prediction.tokens_per_second or 1) / 3600
    start = prediction.start_up.hours if prediction.start_up else 0.0
    assert prediction.hours == pytest.approx(trained + start + found.lost_hours)
    assert prediction.usd == pytest.approx((prediction.hours or 0) * (prediction.usd_per_hour or 0))
    seconds_a_step = JOB.tokens_per_step / (prediction.tokens_per_second or 1)
    assert found.steps == pytest.approx(found.interval_seconds / seconds_a_step, abs=1)
    text = " ".join(render(known).split())
    assert "lost to interruptions" in text
    assert f"a checkpoint every {found.steps:,} steps" in text
    assert "(bytes over the disk's rate)" in text
    assert Plan.from_json(known.to_json()) == known


def test_an_unknown_interruption_rate_is_reported_and_adds_no_hours() -> None:
    unknown = planned(GCP)
    assert unknown.prediction.interruptions is None
    assert unknown.request.spot
    assert any("unknown (see Compute Engine" in line for line in unknown.why)
    assert not any("interruption rate" in line for line in planned(replace(GCP, spot=False)).why)


def test_a_spot_gang_that_would_rarely_complete_is_refused_with_the_arithmetic() -> None:
    goals = replace(GCP, interruption_rate=10.0, tokens=10**10)
    with pytest.raises(UserError) as caught:
        planned(goals)
    assert re.search(
        r"On spot instances this run would hardly finish on .*: [\d,.]+ h on \d+ spot node",
        caught.value.problem,
    )
    assert "20 allowed" in caught.value.problem
    assert caught.value.advice.startswith("Remove --spot,")
    assert len(str(caught.value).splitlines()) == 2


def test_measured_checkpoint_rates_override_the_disk_rate() -> None:
    goals = replace(GCP, interruption_rate=0.05, instance_types=("a2-highgpu-1g",))
    bare = planned(goals)
    run = finished(
        "run/1",
        gpu=bare.request.gpu_type or "",
        method="dora",
        checkpoint_bytes=10**9,
        checkpoint_seconds=10.0,
    )
    measured = Calibration([run])
    again = plan(JOB, Target(kind="catalogue"), goals, calibration=measured)
    found = again.prediction.interruptions
    assert found.checkpoint_seconds == pytest.approx(again.prediction.checkpoint_bytes / 1e8)
    assert found.checkpoint_basis == "measured in earlier runs"
