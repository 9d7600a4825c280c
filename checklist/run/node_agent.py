"""Parent process of a node's ranks. It runs no collective, so it can always end them and report their state.

:func:`run` is what ``python -m checklist`` and a flow's task call, once for each node (or each rank).
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from checklist import measurements
from checklist.measurements import Measurements
from checklist.options import Options
from checklist.run import control
from checklist.run.control import (
    BEAT_S,
    ClockQuery,
    Hub,
    Limits,
    PositionQuery,
    Positions,
    Restart,
    RunMessage,
    WorkerCommand,
)
from checklist.run.coordinator import Coordinator
from checklist.run.phases import limits_of
from checklist.run.rendezvous import Rendezvous
from checklist.run.worker_process import WorkerProcess
from estimator.errors import UserError
from launchers.cluster.channel import Connection
from launchers.cluster.processes import sigterm_raises
from launchers.cluster.rendezvous import Beat, receive_all

_END_S = 15.0  # time for the last results, in addition to the run's limit


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """End of a run, the same on every node."""

    measurements: Measurements
    status: int | None
    """Exit status decided by rank 0; None if the caller gave no ``conclude``."""


def run(
    options: Options,
    rendezvous: Rendezvous,
    *,
    directory: Path | None = None,
    on_measured: Callable[[Measurements], None] | None = None,
) -> Measurements:
    """Like :func:`take_part`, but return only the measurements."""
    return take_part(options, rendezvous, directory=directory, on_measured=on_measured).measurements


def take_part(
    options: Options,
    rendezvous: Rendezvous,
    *,
    directory: Path | None = None,
    on_measured: Callable[[Measurements], None] | None = None,
    conclude: Callable[[Measurements], int] | None = None,
) -> End:
    """Take part in one run; return all measurements on every node.

    In large runs only node 0 has all, the others the condensed form (checklist/condensed.py).

    Ends in bounded time whatever hangs or dies, and leaves no process behind.

    Parameters
    ----------
    options:
        The same on every node.
    rendezvous:
        Ranks supervised by this process, and rank 0's address.
    directory:
        Folder for logs and journals. None: a temporary one, which is removed.
    on_measured:
        Called next to rank 0, in another thread, with the measurements so far: after each phase, and when a
        node is lost.
    conclude:
        Called next to rank 0, in another thread, with all measurements; returns every node's exit status.

    Raises
    ------
    UserError
        If rank 0 is unreachable, refuses this process, or is lost before the end.
    """
    keep_folder = directory is not None
    folder = directory or Path(tempfile.mkdtemp(prefix="checklist-"))
    folder.mkdir(parents=True, exist_ok=True)
    limits = limits_of(options)
    hub = Hub(rendezvous, limits) if rendezvous.is_leader else None
    coordinator = (
        Coordinator(options, rendezvous, hub, limits, on_measured, conclude) if hub is not None else None
    )
    try:
        if coordinator is not None:
            threading.Thread(target=coordinator.run, name="checklist-coordinator", daemon=True).start()
        connection = control.join(rendezvous, limits)
        with sigterm_raises():
            end = _NodeAgent(rendezvous, limits, connection, folder).serve()
            measurements = None if coordinator is None else coordinator.measured
            return end if measurements is None else replace(end, measurements=measurements)
    finally:
        if coordinator is not None:
            coordinator.stop()
        if hub is not None:
            hub.close()
        if not keep_folder:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class _Rank0Lost:
    """The connection to rank 0 has ended."""

    reason: str


class _NodeAgent:
    def __init__(
        self,
        rendezvous: Rendezvous,
        limits: Limits,
        connection: Connection[RunMessage],
        directory: Path,
    ) -> None:
        self._connection, self._limits = connection, limits
        self._received: queue.Queue[RunMessage | _Rank0Lost] = queue.Queue()
        environment = _environment(rendezvous)
        self._workers: dict[int, WorkerProcess] = {}
        try:
            for rank, local_rank in zip(rendezvous.ranks, rendezvous.local_ranks, strict=True):
                self._workers[rank] = WorkerProcess(
                    rank=rank,
                    local_rank=local_rank,
                    node=rendezvous.node,
                    directory=directory,
                    environment=environment,
                    report=connection.send,
                )
        except BaseException:
            self._close()
            raise

    def serve(self) -> End:
        """Execute rank 0's messages until the run ends."""
        deadline = time.monotonic() + self._limits.rendezvous + self._limits.run + _END_S
        threading.Thread(target=self._listen, name="checklist-link", daemon=True).start()
        next_heartbeat = 0.0
        try:
            while time.monotonic() < deadline:
                if time.monotonic() >= next_heartbeat:
                    next_heartbeat = time.monotonic() + BEAT_S
                    self._connection.send(Beat())
                with contextlib.suppress(queue.Empty):
                    message = self._received.get(timeout=BEAT_S)
                    if isinstance(message, control.End):
                        return _result(message)
                    self._handle(message)
            raise UserError("The run did not end within its limit.", "See the output of rank 0.")
        finally:
            self._close()

    def _handle(self, message: RunMessage | _Rank0Lost) -> None:
        if isinstance(message, WorkerCommand):
            self._workers[message.rank].send(message)
        elif isinstance(message, Restart):
            for rank in message.ranks:
                self._workers[rank].restart()
        elif isinstance(message, PositionQuery):
            self._connection.send(Positions(ranks={rank: self._workers[rank].at() for rank in message.ranks}))
        elif isinstance(message, _Rank0Lost):
            raise UserError(
                f"The connection to rank 0 was lost: {message.reason}.",
                "See the output of rank 0. If its host is gone, check that host.",
            )

    def _listen(self) -> None:
        self._received.put(_Rank0Lost(str(receive_all(self._connection, self._receive))))

    def _receive(self, message: RunMessage) -> None:
        if isinstance(message, ClockQuery):  # answered in this thread, at once
            self._connection.send(ClockQuery(round=message.round, at=message.at, now=time.time()))
        else:
            self._received.put(message)

    def _close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._connection.close()


def _result(message: control.End) -> End:
    if message.error is not None or message.measurements is None:
        raise UserError(message.error or "Rank 0 ended the run without a reason.", message.advice)
    record = measurements.record(Measurements, message.measurements)
    return End(measurements=record, status=message.status)


def _environment(rendezvous: Rendezvous) -> dict[str, str]:
    """Return the variables that workers need in addition to those of this process."""
    cores = len(os.sched_getaffinity(0))
    processes = len(rendezvous.ranks) * (rendezvous.nodes if rendezvous.simulated else 1)
    environment = {}
    if "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = str(max(1, cores // processes))
    if rendezvous.simulated:
        # One kernel simulates several hosts, whose traffic goes over loopback.
        environment["CHECKLIST_HOST_ID"] = f"{socket.gethostname()}/{rendezvous.node}"
        environment["NODE_NAME"] = f"local{rendezvous.node}"
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            environment[name] = os.environ.get(name, "lo")
    return environment
