"""A failed measurement or upload is reported, and the run continues with the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from estimator.errors import UserError
from launchers.results import hub_push
from launchers.run import stages
from launchers.settings import build


@pytest.mark.parametrize("error", [UserError("No memory.", "Use fewer rows."), RuntimeError("No memory.")])
def test_an_error_of_a_stage_is_returned_and_printed(
    capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fail() -> str:
        raise error

    assert stages.attempt("evaluation", fail) == stages.StageResult(error="No memory.")
    printed = capsys.readouterr().err
    assert "evaluation" in printed
    assert str(error) in printed
    assert stages.attempt("evaluation", lambda: "scores") == stages.StageResult(value="scores")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143), TypeError("a bug")])
def test_signals_and_bugs_end_the_run(error: BaseException) -> None:
    def fail() -> str:
        raise error

    with pytest.raises(type(error)):
        stages.attempt("evaluation", fail)


def test_a_refused_upload_prints_the_command_that_uploads_the_users_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> str:
        raise UserError("me/mine: the token may not write.", "Make another token.")

    monkeypatch.setattr(hub_push, "push", refuse)
    settings = build({"export": {"push": "me/mine"}})
    with pytest.raises(UserError, match="may not write") as refused:
        stages.push(tmp_path / "work", "page", settings, model_dir=tmp_path / "model")
    assert f"hf upload me/mine {tmp_path / 'model'}" in refused.value.advice


def test_the_report_ends_with_the_stages_that_failed(tmp_path: Path) -> None:
    errors = {stages.EVALUATION: "exit status -9", stages.PUSH: None}
    facts = [("steps", "8"), ("loss", "2"), ("memory", "x" * 80)]
    lines = stages.closing_lines(facts, None, tmp_path, errors=errors)
    assert lines[:3] == ["steps: 8; loss: 2", f"memory: {'x' * 80}", f"model: {tmp_path}"]
    facts = [("steps", "8"), ("memory", "x" * 62), ("loss", "2")]
    assert [len(line) for line in stages.closing_lines(facts, None, tmp_path)[:2]] == [80, len("loss: 2")]
    warnings = [line for line in lines if line.startswith("Warning: ")]
    assert len(warnings) == 1
    assert "exit status -9" in warnings[0]
