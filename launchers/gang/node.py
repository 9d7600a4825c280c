"""One node's part of a training job: :func:`run_node`.

Whatever fails on any node, every node's call ends within seconds with the same root cause and leaves no
process behind::

    node task -> agent (torchrun) -> ranks        processes; each dies with its parent
    node task <-> node 0's task                   launchers.gang.control: membership and failures
    telemetry, errors, logs in the work folder    launchers.gang.watch: reports of the ranks
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from estimator.errors import UserError
from estimator.masking import mask_secrets
from launchers.base.workdir import NO_SPACE
from launchers.cluster import processes
from launchers.cluster.endpoint import NodeAddress
from launchers.gang.allocator import allocator_environment
from launchers.gang.control import Control, Done, Failed, StepTimings, Timeouts, Verdict
from launchers.gang.departure import NO_GRACE, Departure, Grace
from launchers.gang.failures import Failure, GangFailed
from launchers.gang.hub import Hub
from launchers.gang.member import Member
from launchers.gang.script_job import GangJob
from launchers.gang.uploads import Uploads
from launchers.gang.watch import LocalRanks
from launchers.report.telemetry import Event, Follower, Step, StepTiming
from launchers.store.checkpoints import CheckpointStore

PARENT_GONE = "the end of the process that started its task"
_log = logging.getLogger(__name__)


def run_node(
    job: GangJob,
    address: NodeAddress,
    *,
    on_event: Callable[[Event], None],
    checkpoints: CheckpointStore | None = None,
    engine: str | None = None,
    timeouts: Timeouts | None = None,
    grace: Grace = NO_GRACE,
) -> None:
    """Run this node's ranks to the end of training; called on every node.

    Parameters
    ----------
    job:
        With a work folder for this node only; files of an earlier attempt in it are removed.
    on_event:
        Called from this thread with each telemetry event of the node's ranks. Its exceptions end the run.
    checkpoints:
        Store of finished checkpoints, uploaded during training. None: they stay in the work folder.
    engine:
        MODULE:CLASS to use instead of the job's engine.
    grace:
        Signals after which all nodes store a checkpoint before they end. Ignored without ``checkpoints``.

    Raises
    ------
    UserError
        A user error found by a rank, or a full disk; on every node.
    RankFailed, RankHung, NodeLost, GangFailed
        The root cause, the same on every node; ``.failure`` identifies the node.
    NodeLeft
        A node had to leave, and a checkpoint was stored before; on every node.
    SystemExit
        After SIGTERM, or when the process that started this one (Metaflow's scheduler) has ended.
    """
    layout = job.layout
    if layout.nodes != address.nodes:
        raise ValueError(f"the plan is for {layout.nodes} nodes, the address for {address.nodes}")
    timeouts = timeouts or Timeouts()
    control: Control = (Hub if address.node == 0 else Member)(address, timeouts, job.start_step)
    with processes.sigterm_raises(), contextlib.closing(control):
        _Node(job, address, on_event, checkpoints, engine, timeouts, control, grace).run()


class _OutcomeReport:
    """Reports to node 0 that this node has finished, or that an upload failed; each at most once."""

    def __init__(
        self,
        ranks: LocalRanks,
        uploads: Uploads,
        control: Control,
        timeouts: Timeouts,
        task_failure: Callable[[BaseException], Failure],
    ) -> None:
        self._ranks = ranks
        self._uploads = uploads
        self._control = control
        self._timeouts = timeouts
        self._task_failure = task_failure
        self._trained_at: float | None = None
        self._done_sent = self._failure_sent = False

    def poll(self) -> None:
        """Report a failed upload or the end of training. Raises UserError if the last upload is too slow."""
        if self._uploads.error is not None and not self._failure_sent:
            self._failure_sent = True
            self._control.report(Failed(failure=self._task_failure(self._uploads.error)))
        if self._done_sent or self._failure_sent or not self._ranks.finished():
            return
        self._trained_at = self._trained_at or time.monotonic()
        if self._uploads.idle and self._control.peers_done():
            self._done_sent = True
            self._control.report(Done())
        elif not self._uploads.idle and time.monotonic() - self._trained_at > self._timeouts.upload:
            raise UserError(
                f"The last checkpoint could not be stored within {self._timeouts.upload:g} s.",
                "Check the network to the datastore, or write fewer checkpoints.",
            )


class _Node:
    def __init__(
        self,
        job: GangJob,
        address: NodeAddress,
        on_event: Callable[[Event], None],
        store: CheckpointStore | None,
        engine: str | None,
        timeouts: Timeouts,
        control: Control,
        grace: Grace,
    ) -> None:
        self._job = job
        self._address = address
        self._on_event = on_event
        self._store = store
        self._engine = engine
        self._timeouts = timeouts
        self._control = control
        self._grace = grace if store is not None else NO_GRACE
        self._host = socket.gethostname()
        self._name = os.environ.get("NODE_NAME") or self._host  # as the checklist calls this node
        self._marker = uuid.uuid4().hex
        self._parent = os.getppid()
        self._follower = Follower(job.telemetry_dir)
        self._agent: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        _clear(self._job)
        job_file = self._job.save()
        uploads = Uploads(self._job, self._address.node, self._store, self._control)
        sweeper = processes.start_sweeper(self._marker)
        try:
            failure = self._train(job_file, uploads).failure
            try:
                self._finish(uploads, failure)
            except SystemExit:  # SIGTERM, which is ignored from now on
                if failure is None:
                    raise
                # A JobSet terminates all pods as soon as one has ended; the cause remains that of the gang
                self._finish(uploads, failure)
        except BaseException as error:
            failure = self._task_failure(error)
            if isinstance(error, SystemExit):  # has no message
                _log.warning("%s", failure.message)
            self._control.report(Failed(failure=failure))
            self._end_processes(well=False)
            uploads.remove_unfinished()
            self._await_verdict()
            raise
        finally:
            self._end_processes(well=False)
            sweeper.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # would replace the cause of the failure
                sweeper.wait(timeout=10)
        if failure is not None:
            raise self._with_last_checkpoint(failure).error()

    def _finish(self, uploads: Uploads, failure: Failure | None) -> None:
        """End the ranks after the verdict, and store what they have finished."""
        self._end_processes(well=failure is None)
        for event in self._follower.poll():  # before a checkpoint is committed that follows them
            self._on_event(event)
        uploads.remove_unfinished()
        self._drain(uploads, self._timeouts.upload_after_failure)

    def _train(self, job_file: Path, uploads: Uploads) -> Verdict:
        """Start the ranks and monitor them until the gang's outcome is decided."""
        try:
            port = self._control.join()
        except GangFailed as error:
            return Verdict(error.failure)
        self._agent = self._start_agent(job_file, port)
        ranks = LocalRanks(self._job, self._address.node, self._marker, self._agent, self._timeouts)
        departure = Departure(self._job, self._address.node, ranks.ranks, self._control, uploads, self._grace)
        outcome = _OutcomeReport(ranks, uploads, self._control, self._timeouts, self._task_failure)
        with processes.signals_wait() as signals:
            while True:
                departure.poll(signals)
                self._forward_events(ranks, departure)
                for failure in ranks.failures():
                    self._control.report(Failed(failure=failure))
                uploads.poll()
                outcome.poll()
                verdict = self._control.verdict()
                if verdict is not None:
                    if verdict.failure is not None:
                        signals.take()  # the task ends anyway, with the cause of the gang's end
                    return verdict
                if processes.lost_parent(self._parent):
                    raise SystemExit(PARENT_GONE)
                time.sleep(self._timeouts.poll)

    def _forward_events(self, ranks: LocalRanks, departure: Departure) -> None:
        """Pass on new events of the ranks. After the first step the node may leave with a checkpoint."""
        events = list(self._follower.poll())
        for event in events:
            ranks.add(event)
            self._on_event(event)
            departure.possible = departure.possible or isinstance(event, Step)
        self._report_timings(events)

    def _report_timings(self, events: Sequence[Event]) -> None:
        """Send this node's step timings to node 0; on node 0, emit the timings of all nodes as events."""
        layout = self._job.layout
        timings = tuple(
            StepTiming(
                rank=event.rank,
                local_rank=event.rank % layout.processes_per_node,
                node=self._address.node,
                host=self._name,
                step=event.step,
                dt=event.dt,
                in_collectives=event.in_collectives,
            )
            for event in events
            if isinstance(event, Step) and event.in_collectives is not None
        )
        if timings:
            self._control.report(StepTimings(timings=timings))
        for timing in self._control.step_timings():
            self._on_event(timing)

    def _start_agent(self, job_file: Path, port: int) -> subprocess.Popen[bytes]:
        """Start the node's agent (torchrun with static rendezvous) in a separate session.

        Called from the thread that lives as long as the agent should: the kernel treats the end of that
        thread as the end of the parent.
        """
        layout, address = self._job.layout, self._address
        logs_dir = self._job.logs_dir
        logs_dir.mkdir(parents=True, exist_ok=True)
        command = [
            *(sys.executable, "-m", "launchers.gang.agent"),
            *("--nnodes", str(address.nodes), "--node_rank", str(address.node)),
            *("--nproc_per_node", str(layout.processes_per_node)),
            *("--master_addr", address.main_host, "--master_port", str(port)),
            *("--rdzv_id", "gang", "--rdzv_conf", f"timeout={int(self._timeouts.rendezvous)}"),
            *("--max_restarts", "0", "--monitor_interval", "0.1"),
            *("--log_dir", str(logs_dir / self._marker), "--redirects", "3"),
            *("-m", "launchers.run.worker", str(job_file)),
            *(("--engine", self._engine) if self._engine else ()),
        ]
        environment = processes.rank_environment(
            processes=layout.processes_per_node,
            cores=self._job.cores,
            main_host=address.main_host,
            node=address.node,
            on_gpus=layout.device == "cuda",
        )
        environment |= allocator_environment(self._job, os.environ) | self._grace.environment()
        with (logs_dir / "agent.log").open("wb") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=processes.child_environment(self._marker, environment),
                start_new_session=True,  # Ctrl-C reaches only the task, which ends its processes in order
            )

    def _end_processes(self, *, well: bool) -> None:
        agent, self._agent = self._agent, None
        if well and agent is not None:
            # The agents leave their exit barrier together, so the wait is short
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(timeout=5)
        remaining = processes.end_all(self._marker, grace_s=self._timeouts.grace)
        if remaining:
            _log.warning("processes %s on %s could not be ended: stuck in the kernel", remaining, self._host)
        if agent is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(timeout=5)

    def _drain(self, uploads: Uploads, limit: float) -> None:
        """After a failure, store the checkpoints that every node has finished."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline and uploads.error is None:
            uploads.poll()
            if uploads.idle and not self._control.parts_missing():
                return
            time.sleep(self._timeouts.poll)

    def _await_verdict(self) -> None:
        """Wait for the verdict, so that the other nodes receive the cause."""
        deadline = time.monotonic() + 3 * self._timeouts.settle
        while self._control.verdict() is None and time.monotonic() < deadline:
            time.sleep(0.05)

    def _task_failure(self, error: BaseException) -> Failure:
        """Convert an error of this node's task: user error, stopped process, or defect with traceback."""
        node, host = self._address.node, self._host
        if isinstance(error, UserError):
            return Failure.now("user", node, host, error.problem, advice=error.advice)
        if not isinstance(error, Exception):
            cause = error.code if isinstance(error, SystemExit) else type(error).__name__
            if cause == 128 + signal.SIGTERM:
                cause = PARENT_GONE if self._parent_is_gone(within=0.3) else "SIGTERM"
            return Failure.now("node", node, host, f"node {node} ({host}) was stopped by {cause}")
        message = mask_secrets(f"the task of node {node} on {host} failed: {type(error).__name__}: {error}")
        trace = mask_secrets("".join(traceback.format_exception(error)))
        return Failure.now("task", node, host, message, traceback=trace)

    def _parent_is_gone(self, within: float) -> bool:
        """Whether the parent ends within these seconds; its death signal may precede its actual end."""
        deadline = time.monotonic() + within
        while not processes.lost_parent(self._parent) and time.monotonic() < deadline:
            time.sleep(0.02)
        return processes.lost_parent(self._parent)

    def _with_last_checkpoint(self, failure: Failure) -> Failure:
        if failure.kind != "user" or NO_SPACE not in failure.message or self._store is None:
            return failure
        last = self._store.latest()
        checkpoint = (
            f"The last complete checkpoint is of step {last.step}." if last else "No checkpoint was stored."
        )
        return dataclasses.replace(failure, advice=f"{checkpoint} {failure.advice}".strip())


def _clear(job: GangJob) -> None:
    """Remove an earlier attempt's files from the work folder, except its logs."""
    for name in ("errors", "ranks", "leave", *(() if job.exports_only else ("profile",))):
        shutil.rmtree(job.work_dir / name, ignore_errors=True)
    for path in job.telemetry_dir.glob("rank-*.jsonl"):
        path.unlink()
    for folder in job.checkpoints_dir.glob("step-*"):
        resumed = job.resume_dir
        if resumed is None or not (folder == resumed or folder in resumed.parents):
            shutil.rmtree(folder, ignore_errors=True)
