"""Experiment trackers receive the metrics of every step."""

from __future__ import annotations

import importlib.util
import threading
import time
from pathlib import Path

import pytest

from estimator.errors import UserError
from launchers import settings
from launchers.report import trackers
from launchers.report.metrics import Metrics
from launchers.report.trackers import Trackers, _flat, check_installed


def metrics(step: int) -> Metrics:
    times = {"dt": 0.5, "dtf": 0.2, "dtb": 0.3, "eta_seconds": 10.0}
    speeds = {"samples_per_second": 16.0, "samples_per_second_per_gpu": 8.0}
    speeds |= {"tokens_per_second": 1000.0, "tokens_per_second_per_gpu": 500.0}
    return Metrics(step=step, loss=8.0 - step, lr=1e-3, grad_norm=1.5, mfu=None, **times, **speeds)


def track(name: str, folder: Path) -> None:
    result = Trackers(settings.build({"tracker": [name]}), run_name="run-1", folder=folder)
    for step in (1, 2, 3):
        result.log(step, metrics(step).figures())
    result.close()


def losses_in(folder: Path) -> list[float]:
    """Return the losses that TensorBoard reads for the run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "run-1")).Reload()
    assert "mfu" not in events.Tags()["scalars"]  # not known is not 0
    return [event.value for event in events.Scalars("loss")]


def test_tensorboard_gets_every_step(tmp_path: Path) -> None:
    track("tensorboard", tmp_path)
    assert losses_in(tmp_path) == [7.0, 6.0, 5.0]


def test_wandb_stores_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("wandb is not installed: pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    track("wandb", tmp_path)
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))


def test_mlflow_gets_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("mlflow") is None:
        pytest.skip("mlflow is not installed: pip install mlflow-skinny")
    import mlflow

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    mlflow.set_tracking_uri(uri)
    track("mlflow", tmp_path)
    run = mlflow.search_runs(experiment_names=["metaflow-finetune"], output_format="list")[0]
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert [point.value for point in history] == [7.0, 6.0, 5.0]


def test_a_missing_tracker_package_is_named_with_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="pip install wandb"):
        check_installed(["wandb"])


def test_a_failing_tracker_stops_neither_the_run_nor_other_trackers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from accelerate import tracking

    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("no answer from\nhttps://me:s3cret@mlflow.example.com/api with correct-horse")

    monkeypatch.setattr(tracking, "MLflowTracker", refuse)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "correct-horse")
    used_trackers = Trackers(
        settings.build({"tracker": ["mlflow", "tensorboard"]}), run_name="run-1", folder=tmp_path
    )
    for step in (1, 2, 3):
        used_trackers.log(step, metrics(step).figures())
    used_trackers.close()
    assert losses_in(tmp_path) == [7.0, 6.0, 5.0]
    output = capsys.readouterr().err
    assert output.count("receives no more metrics of this run: ConnectionError: ") == 1
    assert "mlflow.example.com" in output
    assert "s3cret" not in output
    assert "correct-horse" not in output


def test_a_hanging_tracker_delays_neither_the_run_nor_other_trackers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from accelerate import tracking

    answers = threading.Event()

    def hang(*_: object, **__: object) -> None:
        answers.wait(60)
        raise ConnectionError("at last")

    monkeypatch.setattr(tracking, "MLflowTracker", hang)
    monkeypatch.setattr(trackers, "CLOSE_S", 2.0)
    used_trackers = Trackers(
        settings.build({"tracker": ["mlflow", "tensorboard"]}), run_name="run-1", folder=tmp_path
    )
    began = time.monotonic()
    for step in (1, 2, 3):
        used_trackers.log(step, metrics(step).figures())
    assert time.monotonic() - began < 1
    used_trackers.close()
    assert time.monotonic() - began < 30
    assert "tracker mlflow did not receive all metrics within 2 s" in capsys.readouterr().err
    answers.set()
    assert losses_in(tmp_path) == [7.0, 6.0, 5.0]


def test_nothing_is_written_without_a_tracker(tmp_path: Path) -> None:
    used_trackers = Trackers(settings.build({}), run_name="run-1", folder=tmp_path / "none")
    used_trackers.log(1, metrics(1).figures())
    used_trackers.close()
    assert not (tmp_path / "none").exists()


def test_tracker_configurations_are_flat_and_omit_unset_values() -> None:
    values = {"a": {"b": 1, "c": {"d": None, "e": Path("x")}}, "f": True}
    assert _flat(values) == {"a.b": 1, "a.c.e": "x", "f": True}
