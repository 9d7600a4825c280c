"""SIGINT and SIGTERM: a launch that one of them ends takes its remote jobs with it.

Ctrl-C reaches a terminal's whole group of processes; a cancelled CI job, ``timeout`` or ``kill`` may reach
the launching process alone. Metaflow expects the former, and ends what is left of its tasks' processes with
SIGKILL, by which those that wait for a remote job leave it behind.
"""

from __future__ import annotations

import contextlib
import signal
import time
from types import FrameType

import psutil

REMOVING_S = 30.0  # Metaflow kills what hasn't ended in 5 s, in which a busy machine removes no job
_WAITS = ({"kubernetes", "step"}, {"batch", "step"})  # in the command of a process that waits for a job


def end_with_jobs() -> None:
    """For the process that launches: SIGTERM is taken as Ctrl-C, and both are told to those that wait.

    Where SIGINT is ignored, as in a script's background, it stays so.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def was_interrupted() -> bool:
    """Whether a signal has ended this launch."""
    return _interrupted


_interrupted = False


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _interrupted
    _interrupted = True
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # timeout sends a second one
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C waits for nothing
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
    """For the process that waits for a remote job: the first of either signal ends it as Python ends.

    Metaflow removes the job there, which a second signal doesn't break off.
    """

    def end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for each in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, end)


def _runs(process: psutil.Process) -> bool:
    """Whether it hasn't ended; its status is left to who has started it."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _waits_for_job(process: psutil.Process) -> bool:
    words = set(process.cmdline())
    return any(waits <= words for waits in _WAITS)
