"""Result rows of a session: they are read back as the measured steps and can be scored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.on_gpu import cases, rows
from benchmarks.on_gpu.cases import ON_GPUS, Case
from benchmarks.on_gpu.one_run import Outcome
from benchmarks.on_gpu.search import Found
from benchmarks.on_gpu.session import Measured
from benchmarks.published import rows as published
from benchmarks.published import scoring
from benchmarks.published.rows import PublishedRow
from estimator import memory
from estimator.engines.setups import setup_of
from estimator.job import Machine
from estimator.plan import GIB
from tests.benchmarks.on_gpu.machines import H100S, H200, job_of, plan_of, ran

ALONE = Machine(cpu_cores=2, ram_bytes=2**34, disk_free_bytes=2**40)
CASES = [case for case in cases.in_order(ON_GPUS, H100S) if not cases.unsupported_case(case, ON_GPUS)]


def written(folder: Path, *measured: Measured) -> Path:
    path = folder / "rows.csv"
    path.write_text(rows.as_csv(rows.rows(measured, source="a session", prefix="x")))
    return path


def read(folder: Path, *measured: Measured) -> list[PublishedRow]:
    return published.read(written(folder, *measured))


def needing(measured: Measured, gib: float) -> Measured:
    size = int(gib * GIB)
    measured.found = Found(runs_bytes=size, fails_bytes=size - 2**28, trials=3, finished=True)
    return measured


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_row_describes_the_step_that_the_launchers_planned(case: Case, tmp_path: Path) -> None:
    plan = plan_of(case, ON_GPUS, H100S)
    row = read(tmp_path, ran(case, plan))[0]
    assert row.setup is not None
    assert replace(row.setup, processes_per_node=8) == replace(
        setup_of(job_of(case, ON_GPUS), plan.layout), processes_per_node=8
    )


def test_each_measurement_is_a_row_with_its_own_prediction(tmp_path: Path) -> None:
    case = CASES[0]
    plan = plan_of(case, ON_GPUS, H200)
    measured = needing(ran(case, plan), 20.0)
    comparison = scoring.compare(written(tmp_path, measured))
    kinds = {item.row.kind: item for item in comparison.memory}
    predicted = plan.prediction.memory
    assert set(kinds) == {"reserved", "allocated", "process", "needed"}
    assert kinds["process"].predicted * GIB == pytest.approx(predicted.shows_bytes)
    assert kinds["needed"].predicted * GIB == pytest.approx(predicted.needs_bytes)
    # its own limit, and the GiB of CUDA's context that lie outside of what the limit holds
    assert kinds["needed"].measured == pytest.approx(21.0, abs=1e-3)
    assert kinds["allocated"].measured * GIB == pytest.approx(predicted.live_bytes, rel=1e-3)
    assert len(comparison.judged) == 1, "four figures of one run are one verdict"


def test_a_peak_that_nvml_missed_has_no_row(tmp_path: Path) -> None:
    case = CASES[0]
    measured = needing(ran(case, plan_of(case, ON_GPUS, H200), device_bytes=GIB // 2), 20.0)
    assert [row.kind for row in read(tmp_path, measured)] == ["reserved", "allocated"]


def test_a_speed_is_scored_once_and_only_of_packed_rows(tmp_path: Path) -> None:
    varying, packed = CASES[0], next(case for case in CASES if case.lengths == "fixed")
    measured = [ran(case, plan_of(case, ON_GPUS, H200)) for case in (varying, packed)]
    comparison = scoring.compare(written(tmp_path, *measured))
    (scored,) = comparison.throughput
    assert scored.row.id == "x-004"
    assert scored.measured == 2 * 2 * 2048 / 2.0  # whole sequences over the step's seconds


def test_a_run_out_of_memory_is_one_row_that_the_verdict_counts(tmp_path: Path) -> None:
    case = next(each for each in CASES if each.what.endswith("full deepspeed"))
    plan = plan_of(replace(case, model="llama-3.1-8b"), ON_GPUS, H200)
    case = replace(case, model="llama-3.1-8b")
    outcome = Outcome(
        ended="out of memory", plan=plan.to_json(), device_name="NVIDIA H200", message="CUDA out of memory"
    )
    (row,) = read(tmp_path, Measured(case=case, outcome=outcome))
    assert row.oom
    assert row.capacity_bytes is not None
    (judged,) = scoring.compare_rows([row]).judged
    assert judged.needs_gib == pytest.approx(memory.estimate(row.setup).needs_bytes / GIB)  # type: ignore[arg-type]


@pytest.mark.parametrize("ended", ["failed", "refused", "no time"])
def test_runs_that_failed_otherwise_have_no_row(tmp_path: Path, ended: Any) -> None:
    plan = plan_of(CASES[0], ON_GPUS, H200)
    measured = Measured(case=CASES[0], outcome=Outcome(ended=ended, plan=plan.to_json()))
    assert rows.rows([measured, Measured(case=CASES[1])], source="s", prefix="x") == []
