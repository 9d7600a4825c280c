"""SIGINT and SIGTERM: remove a run's remote jobs when a signal ends its launching process.

Ctrl-C reaches the whole process group; a canceled CI job, ``timeout`` or ``kill`` may reach only the
launching process. Metaflow expects the former and ends its remaining child processes with SIGKILL, so those
that wait for a remote job could not remove it.
"""

from __future__ import annotations

import contextlib
import signal
import time
from types import FrameType

import psutil

REMOVING_S = 30.0  # Metaflow kills child processes after 5 s, too short to remove a job on a busy machine
_WAITS = ({"kubernetes", "step"}, {"batch", "step"})  # arguments of processes that wait for a job


def end_with_jobs() -> None:
    """Handle SIGTERM like Ctrl-C in the launching process, and forward both to the processes that wait for
    jobs.

    An ignored SIGINT, as in a background job of a script, stays ignored.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def was_interrupted() -> bool:
    """Whether a signal ended this launch."""
    return _interrupted


_interrupted = False


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _interrupted
    _interrupted = True
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # timeout sends a second one
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C exits immediately
    removing = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it has ended
            waits = _waits_for_job(child)
            if number == signal.SIGTERM or waits:
                child.terminate()
            removing += [child] if waits else []
    until = time.monotonic() + REMOVING_S
    while any(_runs(child) for child in removing) and time.monotonic() < until:
        time.sleep(0.1)
    signal.default_int_handler(number, frame)


def remove_job_at_signal() -> None:
    """Exit on the first signal by raising SystemExit, in the process that waits for a remote job.

    Metaflow removes the job in its exit handler, which a second signal does not interrupt.
    """

    def end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        for handled in (signal.SIGINT, signal.SIGTERM):
            signal.signal(handled, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for handled in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(handled) is not signal.SIG_IGN:
            signal.signal(handled, end)


def _runs(process: psutil.Process) -> bool:
    """Whether the process still runs. Does not reap it, so that its parent can read the exit status."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _waits_for_job(process: psutil.Process) -> bool:
    arguments = set(process.cmdline())
    return any(command <= arguments for command in _WAITS)
