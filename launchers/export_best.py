"""After training: the step that a run hands over, where that isn't the one that its ranks ended with.

Its checkpoint is fetched from the store, and a second, short gang loads it and writes the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from estimator.errors import UserError
from launchers.cluster.endpoint import NodeAddress
from launchers.gang.job import TrainJob
from launchers.gang.node import run_node
from launchers.report.evaluations import Losses, exported_step, is_over
from launchers.report.telemetry import Event
from launchers.store.checkpoints import Checkpoint, CheckpointStore, restore_newest

SEEN_S = 90.0  # for another node's files to show up: NFS looks anew after 60 s at most (nfs(5), acdirmax)


def has_ended(job: TrainJob) -> bool:
    """Whether the checkpoint that a job goes on from is of a run's end, so that nothing is trained."""
    if not job.evaluates:
        return False
    return job.start_step >= job.total_steps or is_over(job.evaluations, job.settings.evaluation)


def last_step(job: TrainJob, losses: Losses) -> int:
    """The step that a run ends with: the last of all, or the one that early stopping has ended it after."""
    return losses[-1].step if job.evaluates and is_over(losses, job.settings.evaluation) else job.total_steps


def export_best(
    job: TrainJob,
    losses: Losses,
    address: NodeAddress,
    checkpoints: CheckpointStore,
    folder: Path,
    on_event: Callable[[Event], None],
) -> int:
    """Have the result written that the run's ranks have not left; every node calls it alike.

    Parameters
    ----------
    job:
        As it was trained.
    losses:
        All of the run's.
    folder:
        Gets the checkpoint's files.

    Returns the step that is the result.
    """
    last = last_step(job, losses)
    wanted = exported_step(losses, job.settings.evaluation, last) if job.evaluates else last
    if wanted == last and not has_ended(job):
        return last
    checkpoint = _restored(checkpoints, wanted, address, folder)
    if checkpoint.step != wanted and address.node == 0:
        print(f"WARNING: the result is that of step {checkpoint.step}, not of step {wanted}", flush=True)
    exporting = replace(job, start_step=checkpoint.step, resume_dir=folder, exports_only=True)
    # A gang of its own, so that a node that is there first doesn't meet the one that is just ending
    run_node(exporting, replace(address, run=f"{address.run}/export"), on_event=on_event)
    return checkpoint.step


def _restored(store: CheckpointStore, step: int, address: NodeAddress, folder: Path) -> Checkpoint:
    """The step's checkpoint; where none of it is whole, the newest one."""
    deadline = time.monotonic() + (SEEN_S if address.node else 0.0)
    while True:
        checkpoint, damaged = restore_newest(store, folder, step=step)
        if checkpoint is not None:
            return checkpoint
        if damaged or time.monotonic() >= deadline:
            break
        time.sleep(1)
    if address.node == 0:
        for line in damaged or (f"step {step}: there is none",):
            print(f"a checkpoint can't be used: {line}", flush=True)
    checkpoint, _ = restore_newest(store, folder)
    if checkpoint is None:
        raise UserError(
            f"No checkpoint is left that the model of step {step} could be written from.",
            "Run it again; look at the disk or bucket that the datastore lies on.",
        )
    return checkpoint
