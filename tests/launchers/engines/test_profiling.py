"""A profiled window on every engine, on one node and two: trace and summary."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from launchers.gang.job import TrainJob
from launchers.models import tiny_llama
from launchers.report import telemetry
from launchers.report import trace as traces
from launchers.report.window import Window
from tests.launchers.engines import ranks
from tests.launchers.engines.loop import runs
from tests.optional import require_torchtune

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS, FIRST, LAST = 5, 3, 4


def _job(folder: Path, engine: str) -> TrainJob:
    if engine == "torchtune":
        require_torchtune()
        model = tiny_llama.make(folder / "weights")
    else:
        model = runs.make_model(folder / "weights")
    data = runs.make_data(folder / "data", runs.documents(40), batch=4, steps=STEPS)
    sharding = "zero2" if engine == "deepspeed" else "fsdp"
    return runs.make_job(folder / "plain", model, data, steps=STEPS, engine=engine, sharding=sharding)


def _profiled(job: TrainJob, folder: Path, nodes: int) -> list[TrainJob]:
    """Return the job of each node with a window on both ranks."""
    options = {"steps": f"{FIRST}:{LAST}", "ranks": [0, 1]}
    values = job.settings.model_dump(mode="json") | {"profile": options}
    layout = dataclasses.replace(job.plan.layout, nodes=nodes, processes_per_node=2 // nodes)
    return [
        dataclasses.replace(
            job,
            settings=type(job.settings).model_validate(values),
            plan=dataclasses.replace(job.plan, layout=layout),
            work_dir=folder / f"node-{node}",
        )
        for node in range(nodes)
    ]


def _run(jobs: list[TrainJob]) -> list[Any]:
    done = ranks.train(jobs)
    assert done.returncode == 0, done.stderr[-6000:]
    return [event for job in jobs for event in telemetry.Follower(job.telemetry_dir).poll()]


def _losses(events: list[Any]) -> list[float]:
    return [event.loss for event in events if event.kind == "step" and event.loss is not None]


@pytest.mark.parametrize(
    ("engine", "nodes"),
    [
        ("deepspeed", 2),
        pytest.param("deepspeed", 1, marks=pytest.mark.nightly),
        pytest.param("fsdp2", 2, marks=pytest.mark.nightly),
        pytest.param("torchtune", 2, marks=pytest.mark.nightly),
    ],
)
def test_the_parts_of_a_profile_add_up_to_its_steps_and_profiling_changes_no_loss(
    tmp_path: Path, engine: str, nodes: int
) -> None:
    job = _job(tmp_path, engine)
    plain = _run([job])
    assert not job.profile_dir.exists()
    jobs = _profiled(job, tmp_path, nodes)
    events = _run(jobs)
    assert _losses(events) == _losses(plain)

    reported = [event for event in events if event.kind == "profiled"]
    assert [event.problem for event in reported] == ["", ""]
    took = {
        rank: [e.dt for e in events if e.kind == "step" and e.rank == rank and FIRST <= e.step <= LAST]
        for rank in (0, 1)
    }
    for event in reported:
        profile = Window.from_dict(json.loads(json.dumps(event.window)))
        assert (profile.first, profile.last, profile.split.steps) == (FIRST, LAST, 2)
        seconds = dict(profile.split.seconds)
        mean = sum(took[profile.rank]) / len(took[profile.rank])
        assert sum(seconds.values()) == pytest.approx(profile.split.step_seconds, rel=1e-6)
        assert profile.split.step_seconds == pytest.approx(mean, rel=0.05, abs=2e-3)
        assert seconds[traces.PRODUCTS] > 0
        assert seconds[traces.OPTIMIZER] > 0
        assert set(traces.COLLECTIVES.values()) & (set(seconds) | set(dict(profile.split.hidden)))
        memory = dict(profile.memory)
        assert {traces.WEIGHTS, traces.GRADIENTS, traces.STATES} <= set(memory)
        of_node = jobs[profile.rank % nodes] if nodes > 1 else jobs[0]
        trace = json.loads(gzip.decompress((of_node.profile_dir / profile.trace).read_bytes()))
        names = {each.get("name", "") for each in trace["traceEvents"]}
        assert {f"{traces.STEP}{step}" for step in (FIRST, LAST)} <= names
        assert not {f"{traces.STEP}{step}" for step in (FIRST - 1, LAST + 1)} & names
