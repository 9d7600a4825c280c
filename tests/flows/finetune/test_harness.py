"""Files of custom harness tasks on their way to the scoring steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from decorators.packed_plan import STAGED_VARIABLE
from estimator import models
from flows.finetune import artifacts, harness
from launchers.settings import build
from launchers.store.bundles import LocalStorage
from tests.conftest import write_sums
from tests.launchers.harness.files import write_task


def test_harness_tasks_of_a_remote_run_are_fetched_from_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStorage(tmp_path / "store")
    for module in (artifacts, harness):
        monkeypatch.setattr(module, "datastore", lambda **_: store)
    monkeypatch.setenv(STAGED_VARIABLE, "")  # so that what carry() sets is taken back
    folder = tmp_path / "tasks"
    file = write_task(folder)
    write_sums(folder / "sums.jsonl")
    settings = build({"harness": {"tasks": [str(file), str(folder), "hellaswag"]}})
    assert harness.fetch_tasks(settings, tmp_path / "here") == settings
    staged = harness.stage_tasks(settings)
    assert list(staged) == [str(file), str(folder)]
    artifacts.carry(models.resolve("tiny-llama", online=False), staged)
    folder.rename(tmp_path / "gone")
    one, all_of_it, name = harness.fetch_tasks(settings, tmp_path / "there").harness.tasks
    assert name == "hellaswag"
    assert Path(one).name == "sums.yaml"
    for place in (Path(one).parent, Path(all_of_it)):
        assert {path.name for path in place.iterdir()} == {"sums.yaml", "sums.jsonl"}
