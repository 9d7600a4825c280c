"""Uploads of checkpoint folders to the store, without ranks."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from launchers.gang.control import Timeouts
from launchers.gang.hub import Hub
from launchers.gang.job import TrainJob
from launchers.gang.uploads import Uploads
from launchers.store.bundles import LocalStorage
from launchers.store.checkpoints import CheckpointStore
from tests.launchers.gang.conftest import make_job
from tests.launchers.gang.test_leaving import ALONE


def write(job: TrainJob, step: int, ranks: int = 2) -> Path:
    """Write a checkpoint finished by this many ranks."""
    folder = job.checkpoints_dir / f"step-{step}"
    folder.mkdir(parents=True)
    for rank in range(ranks):
        (folder / f"rank-{rank:05d}.json").touch()
    return folder


def upload(job: TrainJob, store: CheckpointStore | None) -> Uploads:
    """Upload all finished parts, including commits."""
    hub = Hub(ALONE, Timeouts())
    uploads = Uploads(job, 0, store, hub)
    deadline, polls = time.monotonic() + 20, 0
    while polls < 3 and time.monotonic() < deadline:
        if uploads.idle:
            uploads.poll()
            polls += 1
        time.sleep(0.01)
    hub.close()
    return uploads


def test_finished_checkpoints_are_stored_and_committed_and_then_removed(tmp_path: Path) -> None:
    job, store = make_job(tmp_path, processes=2), CheckpointStore(LocalStorage(tmp_path / "store"), "run")
    finished, unfinished = write(job, 2), write(job, 4, ranks=1)
    uploads = upload(job, store)
    assert [checkpoint.step for checkpoint in store.candidates()] == uploads.committed == [2]
    assert (finished.exists(), unfinished.exists()) == (False, True)
    uploads.remove_unfinished()
    assert not unfinished.exists()


@pytest.mark.parametrize("inside", [".", "model"])
def test_the_checkpoint_that_a_run_resumes_from_is_neither_stored_nor_removed(
    tmp_path: Path, inside: str
) -> None:
    job, store = make_job(tmp_path, processes=2), CheckpointStore(LocalStorage(tmp_path / "store"), "run")
    folder = write(job, 2)
    uploads = upload(dataclasses.replace(job, resume_dir=folder / inside), store)
    uploads.remove_unfinished()
    assert list(store.candidates()) == []
    assert folder.exists()


def test_the_newest_checkpoints_stay_on_disk_without_a_store(tmp_path: Path) -> None:
    job = make_job(tmp_path, processes=2)
    folders = [write(job, step) for step in range(1, 6)]
    upload(job, None)
    assert [folder for folder in folders if folder.exists()] == folders[-job.keep_checkpoints :]
