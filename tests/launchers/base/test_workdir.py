"""Work folders: one per task, removed when it ends for any reason."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from estimator.errors import UserError
from launchers.base import workdir

ROOT = Path(__file__).parents[3]
HOLD = """
from launchers.base.workdir import work_folder
with work_folder("7", "train", "3") as folder:
    print(folder, flush=True)
    input()
"""


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may act as another user")
STRANGER = 65534


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The work folder of the user before anything is created in it."""
    monkeypatch.setenv("FINETUNE_WORK_DIR", str(tmp_path / "work"))
    return workdir.root()


@pytest.fixture
def shared_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder shared by all users of a machine."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)
        monkeypatch.delenv("FINETUNE_WORK_DIR")
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def run_as_other_user(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", script, "sh", *arguments]
    return subprocess.run(
        command, user=STRANGER, group=STRANGER, extra_groups=(), cwd="/", capture_output=True, text=True
    )


def test_a_work_folder_exists_while_its_task_runs_and_is_removed_afterwards(base: Path) -> None:
    with workdir.work_folder("7", "train", "3") as folder:
        assert folder.is_dir()
        with workdir.work_folder("7", "train", "3") as second_folder:
            assert second_folder != folder
            assert folder.is_dir()
    assert not list(base.iterdir())


def test_the_folder_of_a_killed_task_is_removed_and_that_of_a_running_task_kept(base: Path) -> None:
    """Processes may be invisible to each other, as in containers that share a volume."""
    command = [sys.executable, "-c", HOLD]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as task:  # type: ignore[call-overload]
        try:
            folder = Path(task.stdout.readline().strip())
            (folder / "owner").write_text("999999999 0.0")  # a process that there isn't
            with workdir.work_folder("8", "train", "1"):
                assert folder.is_dir()
        finally:
            task.kill()
            task.wait(60)
    assert folder.is_dir()
    with workdir.work_folder("8", "train", "1") as work:
        assert list(base.iterdir()) == [work]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_task_that_a_signal_ends_leaves_no_folder(base: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", HOLD]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as task:  # type: ignore[call-overload]
        assert Path(task.stdout.readline().strip()).is_dir()
        task.send_signal(number)
        assert task.wait(60) != 0
    assert not list(base.iterdir())


def test_a_folder_that_cannot_be_written_is_reported_in_two_lines(base: Path) -> None:
    base.parent.write_text("a file")
    with (
        pytest.raises(UserError, match="Cannot create a work folder in") as caught,
        workdir.work_folder("1", "a", "1"),
    ):
        pass
    assert "FINETUNE_WORK_DIR" in caught.value.advice


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_disk_that_fills_up_during_a_task_is_reported_in_two_lines(base: Path) -> None:
    """The error of numpy has neither an error number nor a file name."""
    base.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(base)]).returncode != 0:
        pytest.skip("mount is not allowed here")
    try:
        with (
            pytest.raises(UserError, match=rf"No space left on .* for {base}") as caught,
            workdir.work_folder("1", "prepare", "1") as folder,
        ):
            np.save(folder / "tokens.npy", np.ones(100_000))
        assert "larger disk" in caught.value.advice
        assert not list(base.iterdir())
    finally:
        subprocess.run(["umount", str(base)], check=True)


def test_users_of_one_machine_do_not_share_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("named", None):
        if place is None:
            monkeypatch.delenv("FINETUNE_WORK_DIR")
        own_root = workdir.root()
        with monkeypatch.context() as another:
            another.setattr(os, "getuid", lambda: 4711)
            assert workdir.root() != own_root
            assert workdir.root().parent == own_root.parent


@needs_root
@pytest.mark.parametrize("expected", ['mkdir -m 777 "$1"', 'mkdir "$1-b"; ln -s "$1-b" "$1"', 'touch "$1"'])
def test_a_work_folder_created_by_another_user_is_refused_before_anything_is_written(
    shared_temporary_folder: Path, expected: str
) -> None:
    root = workdir.root()
    done = run_as_other_user(expected, str(root))
    assert done.returncode == 0, done.stderr
    before = {path: path.lstat().st_mtime_ns for path in shared_temporary_folder.rglob("*")}
    for way in (workdir.check_root, workdir.work_folder("7", "train", "3").__enter__):
        with pytest.raises(UserError) as caught:
            way()
        assert caught.value.problem.startswith(f"Cannot use {root} ")
        assert "\n" not in caught.value.problem
        assert "FINETUNE_WORK_DIR" in caught.value.advice
    assert {path: path.lstat().st_mtime_ns for path in shared_temporary_folder.rglob("*")} == before


def test_a_symbolic_link_as_the_work_folder_is_refused_even_if_the_user_owns_it(
    base: Path, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    base.parent.mkdir()
    base.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="it is a symbolic link"), workdir.work_folder("7", "train", "3"):
        pass
    assert not list((tmp_path / "elsewhere").iterdir())


@needs_root
def test_other_users_cannot_read_write_or_replace_a_work_folder(shared_temporary_folder: Path) -> None:
    """Also if the folder was left from a time when others could write into it."""
    workdir.root().mkdir()
    workdir.root().chmod(0o777)
    with workdir.work_folder("7", "train", "3") as folder:
        (folder / "job.json").write_text("{}")
        assert folder.parent.parent == shared_temporary_folder
        for script in ('cat "$1/job.json"', 'ls "$2"', 'mkdir "$2/more"', 'mv "$1" "$1-b"', 'mv "$2" "$2-b"'):
            done = run_as_other_user(script, str(folder), str(folder.parent))
            assert done.returncode != 0, script
            assert "Permission denied" in done.stderr or "not permitted" in done.stderr
        assert (folder / "job.json").is_file()


def test_checking_the_owner_of_the_work_folder_creates_no_folder(base: Path) -> None:
    workdir.check_root()
    assert not base.parent.exists()
