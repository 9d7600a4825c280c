"""Work folders: each task's own, gone when it ends, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from estimator.errors import UserError
from launchers import workdir

ROOT = Path(__file__).parents[2]
HOLD = """
from launchers.workdir import work_folder
with work_folder("7", "train", "3") as folder:
    print(folder, flush=True)
    input()
"""


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FINETUNE_WORK_DIR", str(tmp_path / "work"))
    return tmp_path / "work"


def test_a_folder_is_there_while_its_task_runs_and_then_gone(base: Path) -> None:
    with workdir.work_folder("7", "train", "3") as folder:
        assert folder.is_dir()
        with workdir.work_folder("7", "train", "3") as again:
            assert again != folder
            assert folder.is_dir()
    assert not list(base.iterdir())


def test_what_a_killed_task_has_left_is_removed_and_no_running_ones(base: Path) -> None:
    """Also where the processes can't see each other, as in containers that share a volume."""
    command = [sys.executable, "-c", HOLD]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as task:  # type: ignore[call-overload]
        try:
            assert task.stdout is not None
            folder = Path(task.stdout.readline().strip())
            (folder / "owner").write_text("999999999 0.0")  # a process that there isn't
            with workdir.work_folder("8", "train", "1"):
                assert folder.is_dir()
        finally:
            task.kill()
            task.wait(60)
    assert folder.is_dir()
    with workdir.work_folder("8", "train", "1") as own:
        assert list(base.iterdir()) == [own]


def test_a_place_where_nothing_can_be_made_is_said_in_two_lines(base: Path) -> None:
    base.write_text("a file")
    with (
        pytest.raises(UserError, match="No work folder can be made in") as caught,
        workdir.work_folder("1", "a", "1"),
    ):
        pass
    assert "FINETUNE_WORK_DIR" in caught.value.advice


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_disk_that_fills_up_under_a_task_is_said_in_two_lines(base: Path) -> None:
    """numpy's own error holds neither the system's number nor the file."""
    base.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(base)]).returncode != 0:
        pytest.skip("mount is not allowed here")
    try:
        with (
            pytest.raises(UserError, match=rf"No space left on .* for {base}") as caught,
            workdir.work_folder("1", "prepare", "1") as folder,
        ):
            np.save(folder / "tokens.npy", np.ones(100_000))
        assert "ask for a larger disk" in caught.value.advice
        assert not list(base.iterdir())
    finally:
        subprocess.run(["umount", str(base)], check=True)


def test_users_of_one_machine_do_not_share_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FINETUNE_WORK_DIR")
    own = workdir.root()
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert workdir.root() != own
