"""Export of the best step after training, if it differs from the last step, which is in memory.

The step's checkpoint is fetched from the store, and a second, short gang loads it and writes the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from estimator.errors import UserError
from estimator.terminal import print
from launchers.cluster.endpoint import NodeAddress
from launchers.gang.job import TrainJob
from launchers.gang.node import run_node
from launchers.report.evaluations import Losses, exported_step, stops_early
from launchers.report.telemetry import Event
from launchers.store.checkpoints import Checkpoint, CheckpointStore, restore_newest

# Maximum wait until another node's files become visible: NFS caches directories for 60 s (nfs(5), acdirmax)
VISIBLE_S = 90.0


def has_no_steps_left(job: TrainJob) -> bool:
    """Whether the job resumes from the final checkpoint of its run, so that only the export is left."""
    if not job.evaluates:
        return False
    return job.start_step >= job.total_steps or stops_early(job.evaluations, job.settings.evaluation)


def last_step(job: TrainJob, losses: Losses) -> int:
    """Return the last step of a run: the planned total, or the step at which it was stopped early."""
    return (
        losses[-1].step if job.evaluates and stops_early(losses, job.settings.evaluation) else job.total_steps
    )


def export_best(
    job: TrainJob,
    losses: Losses,
    address: NodeAddress,
    checkpoints: CheckpointStore,
    folder: Path,
    on_event: Callable[[Event], None],
) -> int:
    """Export the best step unless the ranks have exported it already; called on every node.

    Parameters
    ----------
    job:
        The trained job.
    losses:
        All evaluation losses of the run.
    folder:
        Empty folder for the checkpoint's files.

    Returns the exported step.
    """
    last = last_step(job, losses)
    target_step = exported_step(losses, job.settings.evaluation, last) if job.evaluates else last
    if target_step == last and not has_no_steps_left(job):
        return last
    checkpoint = _restore(checkpoints, target_step, address, folder)
    if checkpoint.step != target_step and address.node == 0:
        print(f"WARNING: exported step {checkpoint.step} instead of step {target_step}", flush=True)
    exporting = replace(job, start_step=checkpoint.step, resume_dir=folder, exports_only=True)
    # A separate run name, so that a node that starts early cannot join the gang that is just ending
    run_node(exporting, replace(address, run=f"{address.run}/export"), on_event=on_event)
    return checkpoint.step


def _restore(store: CheckpointStore, step: int, address: NodeAddress, folder: Path) -> Checkpoint:
    """Restore the step's checkpoint; the newest one if that step has no complete checkpoint."""
    deadline = time.monotonic() + (VISIBLE_S if address.node else 0.0)
    while True:
        checkpoint, damaged = restore_newest(store, folder, step=step)
        if checkpoint is not None:
            return checkpoint
        if damaged or time.monotonic() >= deadline:
            break
        time.sleep(1)
    if address.node == 0:
        for line in damaged or (f"step {step}: not found",):
            print(f"unusable checkpoint: {line}", flush=True)
    checkpoint, _ = restore_newest(store, folder)
    if checkpoint is None:
        raise UserError(
            f"No usable checkpoint is left to export the model of step {step} from.",
            "Run it again, and check the disk or bucket of the datastore.",
        )
    return checkpoint
