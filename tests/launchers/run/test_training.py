"""What a node does before and after training, which is replaced here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from estimator.planning import trials
from launchers.cluster.endpoint import NodeAddress, Secret
from launchers.dataset.prepared import Prepared
from launchers.gang.failures import Failure, GangFailed
from launchers.gang.job import TrainJob
from launchers.report.state import RunState
from launchers.report.telemetry import Event, Step, Warned
from launchers.run import training, trial
from launchers.run.replanning import Replanning
from launchers.run.training import Attempt, train
from launchers.run.trial import Decision, find_decision, run_trials
from launchers.store.bundles import LocalStorage
from launchers.store.checkpoints import CheckpointStore
from tests.launchers.engines.loop import runs

STEPS = 8


@pytest.fixture
def job(tmp_path: Path) -> TrainJob:
    data = runs.make_data(tmp_path / "data", runs.documents(8), batch=4, steps=STEPS)
    settings = {"profile": {"steps": "3:6"}, "global_batch_size": 4}
    options: dict[str, Any] = {"world": 1, "micro": 4, "engine": "fsdp2", "sharding": "none"}
    return runs.make_job(tmp_path / "node", tmp_path, data, steps=STEPS, settings=settings, **options)


@pytest.fixture
def store(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "store")


def address(node: int) -> NodeAddress:
    address_values = {"main_host": "127.0.0.1", "ports": (1,), "secret": Secret("s"), "run": "test"}
    return NodeAddress(node=node, nodes=2, **address_values)  # type: ignore[arg-type]


def attempt(number: int = 0) -> Attempt:
    return Attempt(
        run="7", number=number, checkpoints="checkpoints", logs="logs", profile="profile", plans="plans"
    )


def step(number: int, seconds: float = 1.0) -> Step:
    return Step(
        rank=0,
        step=number,
        loss=2.0,
        lr=1e-5,
        grad_norm=1.0,
        samples=4,
        tokens=40,
        dt=seconds,
        dtf=None,
        dtb=None,
    )


def failure(*, out_of_memory: bool) -> GangFailed:
    return GangFailed(Failure.now("rank", 0, "here", "rank 0 failed\nmore", out_of_memory=out_of_memory))


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize("node", [0, 1])
def test_every_node_resumes_from_the_newest_checkpoint_and_node_0_logs_it_and_has_metrics(
    job: TrainJob,
    store: LocalStorage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    node: int,
) -> None:
    before, part = RunState(job.plan), tmp_path / "part"
    for number in range(1, 5):
        before.add(step(number))
    part.mkdir()
    (part / "state").write_text("of step 4")
    checkpoints = CheckpointStore(store, f"checkpoints/{Prepared(job.data_dir).info.fingerprint}")
    checkpoints.put_part(4, 0, part)
    checkpoints.commit(4, nodes=1, world_size=1, extra=before.notes(4, keeps_best=False))
    trained: list[TrainJob] = []
    monkeypatch.setattr(training, "run_node", lambda job, *_, **__: trained.append(job))
    result = train(job, attempt(1), address(node), store, tmp_path / "work")
    assert (trained[0].start_step, result.resumed_from) == (4, 4)
    assert (tmp_path / "work" / "resume" / "state").read_text() == "of step 4"
    assert [metrics.step for metrics in result.metrics] == ([] if node else [1, 2, 3, 4])
    output = capsys.readouterr().out
    assert ("resuming from the checkpoint of step 4 of 8" in output) == (node == 0)
    assert ("profile.steps 3:6: only steps 5:6 are left to profile" in output) == (node == 0)


def test_a_warning_of_several_ranks_is_printed_once(
    job: TrainJob,
    store: LocalStorage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run_node(*_: Any, on_event: Callable[[Event], None], **__: Any) -> None:
        for rank in (0, 1):
            on_event(Warned(rank=rank, text="compile off: CppCompileError"))

    monkeypatch.setattr(training, "run_node", run_node)
    train(job, attempt(), address(0), store, tmp_path / "work")
    assert capsys.readouterr().out.count("WARNING: compile off: CppCompileError\n") == 1


@pytest.mark.parametrize("in_trial", [False, True])
@pytest.mark.parametrize("node", [0, 1])
def test_the_next_attempt_gets_another_plan_only_after_running_out_of_memory(
    job: TrainJob,
    store: LocalStorage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    node: int,
    in_trial: bool,
) -> None:
    if in_trial:
        job = dataclasses.replace(job, settings=job.settings.model_copy(update={"trial": 2}))
    plans = Replanning(storage=store, prefix="plans")
    for out_of_memory in (False, True):
        fails = raising(failure(out_of_memory=out_of_memory))
        monkeypatch.setattr(training, "run_trials" if in_trial else "run_node", fails)
        with pytest.raises(GangFailed):
            train(job, attempt(), address(node), store, tmp_path / "work")
        assert plans.has_plan_after(0) == out_of_memory
        printed = "out of memory: a retry will use micro batch 4 -> " in capsys.readouterr().out
        assert printed == (out_of_memory and node == 0)
    monkeypatch.setattr(training, "run_node", lambda *_, **__: None)
    assert train(job, attempt(1), address(node), store, tmp_path / "work").job.plan != job.plan
    assert ("because an earlier attempt ran out of memory" in capsys.readouterr().out) == (node == 0)


def test_only_the_first_attempt_measures_plans_and_later_attempts_use_its_choice(
    job: TrainJob, store: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = dataclasses.replace(job, settings=job.settings.model_copy(update={"trial": 2}))
    other = dataclasses.replace(job.plan, layout=dataclasses.replace(job.plan.layout, micro_batch_size=2))
    monkeypatch.setattr(training, "run_node", lambda *_, **__: None)
    monkeypatch.setattr(training, "run_trials", raising(AssertionError("a later attempt")))
    assert train(job, attempt(1), address(0), store, tmp_path / "work").job.plan.layout == job.plan.layout
    trial._store_decision(store, "trials/7", Decision(plan=other, results=()))
    assert train(job, attempt(0), address(0), store, tmp_path / "work").job.plan.layout == other.layout


@pytest.mark.parametrize("node", [0, 1])
def test_all_nodes_use_the_fastest_of_the_measured_plans(
    job: TrainJob, store: LocalStorage, monkeypatch: pytest.MonkeyPatch, node: int
) -> None:
    job = dataclasses.replace(job, settings=job.settings.model_copy(update={"trial": 3}))
    layouts = [dataclasses.replace(job.plan.layout, micro_batch_size=size) for size in (4, 2, 1)]
    tried = [dataclasses.replace(job.plan, layout=layout) for layout in layouts]
    monkeypatch.setattr(trials, "trial_plans", lambda *_: tuple(tried))
    runs_of, results = [], []

    def run_node(job: TrainJob, address: NodeAddress, *, on_event: Callable[[Step], None]) -> None:
        runs_of.append(address.run)
        size = job.plan.layout.micro_batch_size
        if size == 1:
            raise failure(out_of_memory=True)
        for number in range(1, job.total_steps + 1):
            on_event(step(number, 9.0 if number <= trial.WARM_UP else float(size)))

    monkeypatch.setattr(trial, "run_node", run_node)
    if node:
        trial._store_decision(store, "trials/7", Decision(plan=tried[1], results=()))
    decision = run_trials(job, address(node), store, "trials/7", on_result=results.append)
    assert runs_of == ["test/trial-1", "test/trial-2", "test/trial-3"]
    assert decision.plan.layout == tried[1].layout
    if node:
        assert results == []
        return
    assert find_decision(store, "trials/7") == decision
    assert list(decision.results) == results
    assert [(result.steps, result.failure, result.out_of_memory) for result in results] == [
        (3, None, False),
        (3, None, False),
        (0, "rank 0 failed", True),
    ]
    slow, fast, failed = (result.tokens_per_second for result in results)
    assert slow is not None
    assert fast is not None
    assert failed is None
    assert fast > slow


@pytest.mark.parametrize("out_of_memory", [False, True])
def test_the_last_failure_is_raised_if_every_measured_plan_fails(
    job: TrainJob, store: LocalStorage, monkeypatch: pytest.MonkeyPatch, out_of_memory: bool
) -> None:
    job = dataclasses.replace(job, settings=job.settings.model_copy(update={"trial": 3}))
    monkeypatch.setattr(trial, "run_node", raising(failure(out_of_memory=out_of_memory)))
    with pytest.raises(GangFailed, match="rank 0 failed"):
        run_trials(job, address(0), store, "trials/7")
    assert find_decision(store, "trials/7") is None
