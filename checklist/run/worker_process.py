"""Handle of one rank's worker process: start, send commands, watch, kill with all children."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from checklist.probing.context import DIRECTORY, PARENT, PIPE
from checklist.probing.progress import Progress
from checklist.run.control import Position, Reply, WorkerCommand, WorkerEnded, WorkerReply
from checklist.run.rendezvous import SHARED_VARIABLE

_ROOT = Path(__file__).resolve().parents[2]  # holds the import packages
_FLIGHT_RECORDS = "200"  # entries; without the variable torch records nothing
_LOG_LINES = 3
_SEND_S = 2.0  # maximum wait for a worker that does not read: it is stopped, or a library blocks its threads


class WorkerProcess:
    """Worker process. Start it from a long-lived thread: the kernel ends it with that thread."""

    def __init__(
        self,
        *,
        rank: int,
        local_rank: int,
        node: int,
        directory: Path,
        environment: dict[str, str],
        report: Callable[[WorkerReply | WorkerEnded], object],  # called from a thread of the worker's own
    ) -> None:
        self.rank, self.directory = rank, directory
        self._own = {
            "CHECKLIST_RANK": str(rank),
            "CHECKLIST_LOCAL_RANK": str(local_rank),
            "CHECKLIST_NODE": str(node),
            DIRECTORY: str(directory),
            **environment,
        }
        self._report = report
        self._log = directory / f"rank{rank}.log"
        self._journal = (directory / f"rank{rank}.jsonl").open("ab", buffering=0)
        self.progress = Progress(directory / f"rank{rank}.progress", create=True)
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0
        self.start()

    def start(self) -> None:
        """Start the process, which waits for commands."""
        reader, writer = os.pipe()
        environment = {
            "TORCH_FR_BUFFER_SIZE": _FLIGHT_RECORDS,
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,NET,TUNING",
            "OMP_WAIT_POLICY": "passive",  # spinning threads slow down other processes on the same cores
            **os.environ,
            "NCCL_DEBUG_FILE": str(self.directory / f"rank{self.rank}.nccl"),
            **self._own,
            PIPE: str(writer),
            PARENT: str(os.getpid()),
        }
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        for name in (SHARED_VARIABLE, "RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE"):
            environment.pop(name, None)  # the node agent's commands define the process groups
        try:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "checklist.run.worker"],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    pass_fds=(writer,),
                    start_new_session=True,  # a process group that can be killed as one
                )
        finally:
            os.close(writer)
        self._started += 1
        threading.Thread(
            target=self._read, args=(reader, self._started), name=f"checklist-rank{self.rank}", daemon=True
        ).start()

    def send(self, command: WorkerCommand) -> None:
        """Send a command; the reply shows whether it was executed.

        A worker that does not read the whole command within ``_SEND_S`` gets no others until it is restarted.
        """
        process = self._process
        if process is None or process.stdin is None or process.stdin.closed:
            return
        os.set_blocking(process.stdin.fileno(), False)
        pipe, deadline = select.poll(), time.monotonic() + _SEND_S
        pipe.register(process.stdin, select.POLLOUT)
        remaining = memoryview(command.model_dump_json().encode() + b"\n")
        with contextlib.suppress(OSError):  # it has died, which its pipe says too
            while remaining:
                if not pipe.poll(1000 * max(0.0, deadline - time.monotonic())):
                    process.stdin.close()  # the worker ends if it reads the incomplete command
                    return
                remaining = remaining[os.write(process.stdin.fileno(), remaining) :]

    def restart(self) -> None:
        """Kill the process with all its children, and start a new one."""
        self.kill()
        self.start()

    def kill(self) -> None:
        """Kill the whole process group; nothing is left when this returns."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: a GPU that is gone
            process.wait(timeout=5)
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()

    def close(self) -> None:
        self.kill()
        self._journal.close()

    def at(self) -> Position:
        """Position of the worker: operation, sequence number, and the kernel's process state (T: stopped)."""
        operation, sequence = self.progress.read()
        return operation, sequence, self._state()

    def _state(self) -> str:
        process = self._process
        if process is None:
            return "X"
        try:
            return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "X"

    def _read(self, reader: int, started: int) -> None:
        """Forward the worker's messages, then the reason why it ended."""
        process = self._process
        with os.fdopen(reader, "rb") as lines:
            for line in lines:
                try:
                    reply = Reply.model_validate_json(line)
                except ValueError:
                    continue  # a last line that is not whole
                with contextlib.suppress(ValueError, OSError):  # the journal is closed because the run ended
                    self._journal.write(line)
                self._report(WorkerReply(rank=self.rank, reply=reply))
        if process is None or self._process is not process or started != self._started:
            return  # it was killed by us
        code = process.wait()
        outcome = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        log_tail = "" if code < 0 else self._log_tail()
        self._report(WorkerEnded(rank=self.rank, reason=outcome + log_tail, at=self.at()))

    def _log_tail(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return f": {' | '.join(lines[-_LOG_LINES:])[-500:]}" if lines else ""
