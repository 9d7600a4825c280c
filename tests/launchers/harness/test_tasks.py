"""Unusable harness tasks are refused before a run in two lines; usable ones are packaged with their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from estimator.errors import UserError
from launchers.harness import tasks
from launchers.settings import build
from tests.conftest import write_sums
from tests.launchers.harness.files import SUMS, write_task


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("task: [", "cannot be used"),
        ("- a\n- b\n", "no `key: value` lines"),
        ("group: all\ntask: [a, b]\n", "no `task: NAME`"),
        ("task: sums\n", "no `dataset_path`"),
        (SUMS.replace("sums.jsonl", "none.jsonl"), "there is no none.jsonl"),
        ("include: none.yaml\ntask: sums\n", "it includes none.yaml"),
        ("include: sums.yaml\ntask: sums\n", "which includes it"),
    ],
)
def test_a_file_that_is_not_a_task_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    write_sums(tmp_path / "sums.jsonl")
    file = write_task(tmp_path, text)
    with pytest.raises(UserError, match=expected) as error:
        tasks.check(build({"harness": {"tasks": [str(file)]}}))
    assert len(str(error.value).splitlines()) == 2


@pytest.mark.parametrize("name", ["none.yaml", "some/folder"])
def test_a_missing_task_file_is_not_taken_for_a_task_name(name: str) -> None:
    with pytest.raises(UserError, match=f"no file or folder {name}"):
        tasks.check(build({"harness": {"tasks": name}}))


def test_a_folder_without_tasks_and_a_reward_model_are_refused(tmp_path: Path) -> None:
    (tmp_path / "part.yaml").write_text("dataset_path: json\n")
    with pytest.raises(UserError, match="has a `task: NAME`"):
        tasks.check(build({"harness": {"tasks": [str(tmp_path)]}}))
    with pytest.raises(UserError, match="generates no answers"):
        tasks.check(build({"task": "reward", "harness": {"tasks": [str(tmp_path)]}}))


def test_a_task_is_packaged_with_its_includes_data_and_functions(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_sums(tmp_path / "data" / "sums.jsonl")
    (tmp_path / "_common.yaml").write_text("dataset_path: json\nprocess_docs: !function code.utils.keep\n")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "utils.py").write_text("def keep(docs):\n    return docs\n")
    (tmp_path / "unused.txt").write_text("x")
    text = "include: _common.yaml\ntask: sums\ndataset_kwargs: {data_files: {test: data/*.jsonl}}\n"
    file = write_task(tmp_path, text)
    expected = {"sums.yaml", "_common.yaml", "code/utils.py", "data/sums.jsonl"}
    assert set(tasks.portable(str(file))) == expected
    assert set(tasks.portable(str(tmp_path))) == expected


def test_a_task_with_data_outside_its_folder_cannot_be_sent_to_another_machine(tmp_path: Path) -> None:
    data = write_sums(tmp_path / "sums.jsonl")
    file = write_task(tmp_path / "tasks", SUMS.replace("sums.jsonl", str(data)))
    tasks.check(build({"harness": {"tasks": [str(file)]}}))
    with pytest.raises(UserError, match="cannot be sent"):
        tasks.portable(str(file))


def test_a_local_run_is_refused_without_the_harness_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "PACKAGE", "no_such_package")
    with pytest.raises(UserError, match=r"pip install -e '.\[eval\]'"):
        tasks.check_installed(build({"harness": {"tasks": ["hellaswag"]}}))
    tasks.check_installed(build({}))
