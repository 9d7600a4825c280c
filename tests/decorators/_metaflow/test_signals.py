"""Signals to the launching process and to the processes that wait for remote jobs."""

from __future__ import annotations

import signal
from typing import Any

import psutil
import pytest

from decorators._metaflow import signals

WAITS = ("python", "flow.py", "kubernetes", "step", "train")
LOCAL = ("python", "flow.py", "step", "train")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_that_waits_for_a_job_exits_with_the_status_of_the_signal(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers: dict[int, Any] = {}
    with monkeypatch.context() as patched:
        patched.setattr(signal, "signal", handlers.__setitem__)
        signals.remove_job_at_signal()
        with pytest.raises(SystemExit) as ended:
            handlers[number](number, None)
    assert ended.value.code == 128 + number
    assert handlers == dict.fromkeys((signal.SIGINT, signal.SIGTERM), signal.SIG_IGN), "a second signal"


class Child:
    """A child process of the launch."""

    def __init__(self, *arguments_of_process: str) -> None:
        self._words, self.ended = arguments_of_process, False

    def cmdline(self) -> list[str]:
        return [*self._words]

    def terminate(self) -> None:
        self.ended = True

    def status(self) -> str:
        return psutil.STATUS_ZOMBIE if self.ended else psutil.STATUS_RUNNING


@pytest.mark.parametrize(("number", "all_end"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_a_signal_is_forwarded_to_processes_that_wait_for_jobs_and_sigterm_to_all(
    number: signal.Signals, all_end: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = [Child(*WAITS), Child(*LOCAL)]
    monkeypatch.setattr(signals, "_interrupted", False)
    with monkeypatch.context() as patched:
        patched.setattr(signal, "signal", lambda *_: None)
        patched.setattr(psutil.Process, "children", lambda _: children)
        with pytest.raises(KeyboardInterrupt):
            signals._interrupt(number, None)
    assert [child.ended for child in children] == [True, all_end]
    assert signals.was_interrupted()
