"""Planning: from flags to settings to a plan, and what is refused on the way."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from estimator import calibration
from estimator.errors import Change, UserError
from flows import finetune_launch
from launchers import settings

PARAMETERS = {"model": "tiny-llama", "global_batch_size": 8}
Usage = namedtuple("Usage", "total used free")


def test_flags_win_over_the_file_and_set_over_both() -> None:
    made = finetune_launch.settings_from(
        {"seed": 1, "epochs": 2, "global_batch_size": 4},
        {"epochs": 3, "global_batch_size": 6, "set": ("global_batch_size=8",)},
    )
    assert (made.seed, made.epochs, made.global_batch_size) == (1, 3, 8)


def test_an_empty_flag_leaves_the_file_as_it_is() -> None:
    made = finetune_launch.settings_from({"optimizer": {"lr": 1e-4}}, {"lr": "", "nodes": None})
    assert made.optimizer.lr == 1e-4


def test_trackers_may_be_given_with_commas() -> None:
    assert finetune_launch.settings_from({}, {"tracker": "tensorboard, wandb"}).tracker == (
        "tensorboard",
        "wandb",
    )


def test_every_flag_is_a_setting() -> None:
    names = settings.dotted_names()
    assert [name for name in finetune_launch.FLAGS.values() if name not in names] == []


def test_a_plan_of_a_local_file_knows_its_steps_and_reads_it_whole(dataset: Path) -> None:
    made = finetune_launch.plan_from_parameters({**PARAMETERS, "dataset": str(dataset)}, "local")
    assert made.layout.global_batch_size == 8
    dataset.write_text(dataset.read_text() + "{broken\n")
    with pytest.raises(UserError, match="line 61"):
        finetune_launch.plan_from_parameters({**PARAMETERS, "dataset": str(dataset)}, "local")


def test_advice_names_every_setting_as_the_flow_takes_it() -> None:
    for name in settings.dotted_names():
        flag, *value = finetune_launch.FLOW.words(Change(name, "x"))
        if flag == "--set":
            assert value == [f"{name}=x"]
        else:
            assert finetune_launch.FLAGS[flag.removeprefix("--").replace("-", "_")] == name
            assert finetune_launch.FLOW.name(name) == flag


def test_a_disk_without_room_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**30, 2**30, 1000))
    with pytest.raises(UserError, match="FINETUNE_WORK_DIR") as caught:
        finetune_launch.plan_from_parameters(PARAMETERS, "local")
    assert "0.0 GiB free" in caught.value.problem


def test_finished_runs_correct_the_plan_unless_told_not_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(calibration.VARIABLE, str(tmp_path / "runs.jsonl"))
    before = finetune_launch.plan_from_parameters(PARAMETERS, "local").prediction.memory
    calibration.Store().add(
        calibration.Finished(
            engine="torchtune",
            method="full",
            gpu="cpu",
            model="tiny-llama",
            setup="",
            formulas=calibration.formulas("torchtune", "full"),
            predicted_bytes=10**9,
            predicted_upper_bytes=13 * 10**8,
            measured_bytes=12 * 10**8,
            measured_kind="resident",
            date="2026-01-02T03:04:05+00:00",
            run="FinetuneFlow/1/train/2",
        )
    )
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write("half a li")
    capsys.readouterr()
    after = finetune_launch.plan_from_parameters({**PARAMETERS, "device": "cpu"}, "local").prediction.memory
    assert after.shows_bytes > before.shows_bytes
    assert after.uncorrected is not None
    assert after.uncorrected.categories == before.categories
    assert "calibrated on 1 run: x1.06" in after.shows_basis
    assert "line 2, is left out" in capsys.readouterr().err
    plain = finetune_launch.plan_from_parameters({**PARAMETERS, "no_calibration": True}, "local")
    assert plain.prediction.memory.shows_bytes == before.shows_bytes
