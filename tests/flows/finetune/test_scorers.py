"""Scoring functions that are sent along with a run, and those that are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from decorators.packed_plan import STAGED_VARIABLE
from estimator import models
from flows.finetune import artifacts, scorers
from launchers.store.bundles import LocalStorage


def test_the_scorer_file_of_a_remote_run_is_uploaded_to_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = tmp_path / "functions.py"
    functions.write_text("def length(prompt, answer):\n    return len(answer)\n")
    store = LocalStorage(tmp_path / "store")
    monkeypatch.setattr(scorers, "datastore", lambda **_: store)
    monkeypatch.delenv(STAGED_VARIABLE, raising=False)
    score = f"{functions}:length"
    staged = scorers.stage_scorer(score)
    assert list(staged) == [score]
    assert scorers.fetch_scorer(score, None, tmp_path / "local") == score
    monkeypatch.setenv(STAGED_VARIABLE, "")  # so that what carry() sets is taken back
    artifacts.carry(models.resolve("tiny-llama", online=False), staged)
    functions.rename(tmp_path / "gone.py")
    file, _, name = scorers.fetch_scorer(score, None, tmp_path / "fetched").rpartition(":")
    assert (Path(file).read_text(), name) == ((tmp_path / "gone.py").read_text(), "length")


def test_a_scorer_module_is_not_uploaded_to_the_store(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(scorers, "datastore", lambda **_: LocalStorage(tmp_path))
    assert (scorers.stage_scorer("package.module:f"), scorers.stage_scorer(None)) == ({}, {})
    assert scorers.fetch_scorer("package.module:f", None, tmp_path) == "package.module:f"


@pytest.mark.parametrize("staged", ["bundles/1", None])
def test_a_reward_model_is_fetched_once_unless_the_launch_uploaded_it(
    staged: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(artifacts, "staged_key", lambda _: staged)
    monkeypatch.setattr(models, "locate", lambda name: name)
    monkeypatch.setattr(artifacts, "fetch_weights_once", lambda name, *_, **__: f"fetched {name}")
    monkeypatch.setattr(artifacts, "fetch_tokenizer", lambda reference, _: reference)
    monkeypatch.setattr(scorers, "check_reward_model", lambda *arguments: checked.append(arguments))
    folder = scorers.fetch_reward_model_once(str(tmp_path), "rl.reward", tmp_path)
    assert folder == (staged or f"fetched {tmp_path}")
    assert checked == [(folder, "rl.reward", str(tmp_path))]
    assert scorers.fetch_reward_model_once("module:function", "rl.reward", tmp_path) is None
