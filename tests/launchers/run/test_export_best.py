"""A killed run keeps its best step and its patience, exports the best step, and trains no further."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from launchers import engines
from launchers.cluster.endpoint import NodeAddress, Secret
from launchers.dataset.prepared import Prepared
from launchers.evaluation.held_out import scorer_of
from launchers.evaluation.loading import load_model
from launchers.gang.failures import RankFailed
from launchers.models import tiny_llama
from launchers.report.evaluations import HeldOutLoss
from launchers.report.telemetry import DistInfo, Evaluated, Event
from launchers.run.export_best import has_no_steps_left, last_step
from launchers.run.training import Attempt, train
from launchers.store.bundles import LocalStorage
from tests.launchers.engines.loop import runs

STEPS, EVERY, PATIENCE = 40, 3, 3
STOPPING = {"evaluation": {"every_steps": EVERY, "patience": PATIENCE}}
ALONE = NodeAddress(node=0, nodes=1, main_host="127.0.0.1", ports=(), secret=Secret(""), run="test")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_after_kill_9_the_best_step_is_exported_and_the_run_stops_at_the_same_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The learning rate is so high that every loss after the first is higher."""
    data = runs.make_data(tmp_path / "data", runs.documents(8), batch=4, steps=STEPS)
    runs.make_data(data / "heldout", runs.documents(7, seed=5), batch=1, steps=7)
    job = runs.make_job(
        tmp_path / "node",
        tiny_llama.make(tmp_path / "model"),
        data,
        steps=STEPS,
        world=1,
        micro=4,
        engine="fsdp2",
        sharding="none",
        settings=STOPPING,
        checkpoint_every=100,
    )
    store, pids, received = LocalStorage(tmp_path / "store"), list[int](), list[int]()

    def kill(event: Event) -> None:
        if isinstance(event, DistInfo):
            pids.append(event.pid)
        elif isinstance(event, Evaluated) and event.loss is not None:
            received.append(event.step)
            if event.step == 2 * EVERY:
                os.kill(pids[0], signal.SIGKILL)

    def attempt(number: int) -> Attempt:
        return Attempt(
            run="test", number=number, checkpoints="checkpoints", logs=f"logs/{number}", profile="profile"
        )

    with pytest.raises(RankFailed):
        train(job, attempt(0), ALONE, store, tmp_path / "first", on_event=kill)
    assert received == [EVERY, 2 * EVERY]
    trained = train(job, attempt(1), ALONE, store, tmp_path / "second")
    steps = [each.step for each in trained.evaluations]
    assert trained.resumed_from == EVERY  # the checkpoint of the best one so far: no other was due
    assert steps == [EVERY * number for number in range(1, PATIENCE + 2)]
    assert trained.metrics[-1].step == last_step(trained.job, trained.evaluations) == steps[-1]
    assert trained.exported_step == EVERY
    assert [exported_name for exported_name, _ in trained.exported] == ["exported", "stopped early"]
    output = capfd.readouterr().out
    assert f"stopped after step {steps[-1]}: {PATIENCE} evaluations without a " in output
    assert f"saving the model after step {EVERY}" in output
    engines.get("fsdp2").collect(trained.job, tmp_path / "finished")
    model = load_model(tmp_path / "finished" / "model", job.model_dir, "cpu", "fp32")
    score = scorer_of(job.settings, Prepared(job.held_out_dir), 256).score(model)
    assert score.loss == pytest.approx(min(each.loss for each in trained.evaluations), rel=1e-5)
    commits = {path.parent.name for path in (tmp_path / "store").rglob("checkpoint.json")}
    assert commits == {f"step-{EVERY:08d}.0", f"step-{steps[-1]:08d}.1"}


def test_a_run_that_stopped_or_reached_its_last_step_is_not_trained_further(tmp_path: Path) -> None:
    def job_at(start: int, losses: list[float], patience: int | None = PATIENCE) -> bool:
        evaluations = tuple(
            HeldOutLoss(step=EVERY * number, loss=loss, seconds=1.0) for number, loss in enumerate(losses, 1)
        )
        settings = {"evaluation": {"every_steps": EVERY, "patience": patience}}
        options = {"start_step": start, "evaluations": evaluations}
        job = runs.make_job(tmp_path, tmp_path, tmp_path, steps=STEPS, settings=settings, **options)
        return has_no_steps_left(job)

    assert not job_at(9, [1.0, 2.0, 2.0])
    assert job_at(12, [1.0, 2.0, 2.0, 2.0])
    assert not job_at(12, [1.0, 2.0, 2.0, 2.0], patience=4)  # given more of it, the run goes on
    assert job_at(STEPS, [1.0, 2.0])
