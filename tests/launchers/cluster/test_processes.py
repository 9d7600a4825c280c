"""Deferred signals, and processes that end with their children."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from launchers.cluster import processes


def poll(signals: processes.WaitingSignals) -> None:
    if (number := signals.take()) is not None:
        signals.act(number)


def interrupted(done: list[str], *, look_at: int | None = None, times: int = 1) -> None:
    """Do a few things and receive a signal before each of the first ones."""
    with processes.signals_wait() as signals:
        for number in range(3):
            if number < times:
                os.kill(os.getpid(), signal.SIGINT)
            done.append(f"thing {number}")
            if look_at == number:
                poll(signals)


def test_a_signal_is_deferred_until_it_is_polled() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(done, look_at=1)
    assert done == ["thing 0", "thing 1"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_that_was_not_polled_is_raised_at_the_end() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(done)
    assert len(done) == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_signal_is_raised_at_once() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(done, times=2)
    assert done == ["thing 0"]


def terminated() -> None:
    with processes.sigterm_raises(), processes.signals_wait() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        poll(signals)


def test_sigterm_raises_an_exception_where_it_is_polled() -> None:
    with pytest.raises(SystemExit) as ended:
        terminated()
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_signal_handlers_are_unchanged_if_another_thread_defers_signals() -> None:
    before = signal.getsignal(signal.SIGINT)
    thread_handlers = []

    def block() -> None:
        with processes.signals_wait() as signals:
            poll(signals)
            thread_handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=block)
    thread.start()
    thread.join(10)
    assert thread_handlers == [before]


def test_the_tail_of_a_log_omits_uninformative_lines(tmp_path: Path) -> None:
    log = tmp_path / "stderr.log"
    log.write_text(
        "Skipping import of cpp extensions due to incompatible torch version 2.13 for torchao version 0.15\n"
        "/x/y.py:379: UserWarning: 'set_vital' is deprecated\n"
        "  torch.set_vital('Dataloader')\n"
        "  0%|  | 0/3\r 33%|# | 1/3\r100%|###| 3/3\n"
        "  an indented line that is none of a warning's\n"
        "RuntimeError: the cause\n"
    )
    assert processes.relevant_tail(log).splitlines() == [
        "100%|###| 3/3",
        "  an indented line that is none of a warning's",
        "RuntimeError: the cause",
    ]
    assert processes.relevant_tail(log, lines=1) == "RuntimeError: the cause"
    assert processes.relevant_tail(tmp_path / "none") == ""


def test_child_processes_end_with_the_process_that_started_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "starts_another.py").write_text(
        "import subprocess, time\n"
        "print(subprocess.Popen(['sleep', '600']).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    log, deadline = tmp_path / "log", time.monotonic() + 60
    with processes.started("starts_another", tmp_path / "request", log, on_cpu=True):
        while not (reported := log.read_text().strip()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert processes.is_running(int(reported))
    assert not processes.is_running(int(reported))


@pytest.mark.parametrize(
    ("files", "starts"),
    [
        ({"environ": "", "cmdline": "", "statm": "33 1 0"}, True),
        ({"environ": "", "cmdline": "", "statm": "0 0 0"}, False),  # a kernel thread
        ({"environ": "", "cmdline": "sleep", "statm": "33 1 0"}, False),  # without an environment for good
    ],
)
def test_a_process_inside_exec_is_waited_for_because_its_marker_is_not_visible_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], starts: bool
) -> None:
    (tmp_path / "1234").mkdir()
    for name, text in files.items():
        (tmp_path / "1234" / name).write_text(text)
    monkeypatch.setattr(processes, "_PROC", tmp_path)
    began = time.monotonic()
    assert processes.end_all("marker", grace_s=0, limit_s=0.3) == []
    assert (time.monotonic() - began >= 0.3) is starts


@pytest.mark.parametrize(
    ("number", "visible", "one"), [(1, "", "1"), (1, "4,5", "5"), (0, " GPU-ab , GPU-cd ", "GPU-ab")]
)
def test_a_process_for_one_gpu_sees_one_of_the_visible_gpus(number: int, visible: str, one: str) -> None:
    assert processes.one_gpu(number, visible) == one


def test_cuda_numbers_gpus_as_nvml_does_unless_the_user_has_chosen_an_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert processes.child_environment("marker", {})["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert processes.child_environment("marker", {})["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"
