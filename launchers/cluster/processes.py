"""Processes of one node: start, search and termination.

Every process of a gang has ``FINETUNE_GANG=<marker>`` in its environment, and passes it to its children, so
all can be found in any session and under any parent. Three things end them: the node's task; if the task
itself is killed, the kernel (PR_SET_PDEATHSIG on each link of task -> agent -> rank); and the sweeper (this
module as a process), which also finds processes started by ranks (data loader workers, compilers).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType

MARKER = "FINETUNE_GANG"
_DEFERRED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # if a handler is installed for them
PARENT = "FINETUNE_PARENT_PID"  # expected parent of a process, for die_with_parent
_ROOT = Path(__file__).resolve().parents[2]  # folder of the import packages
_PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1
_KILL_S = 10.0  # time limit for a killed process to end
_parent_matters = True
# Format of Python's warnings module, which adds a line of source below
_WARNING = re.compile(r"^\S+:\d+: (?:User|Future|Deprecation|PendingDeprecation|Runtime)Warning: ")
_NOTICE = re.compile(_WARNING.pattern + "|^Skipping import of cpp extensions due to incompatible torch")


def marked_pids(marker: str) -> list[int]:
    """List running processes (without zombies) that have this marker in their environment."""
    variable = f"{MARKER}={marker}".encode()
    pids = []
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if variable in (entry / "environ").read_bytes().split(b"\0"):
                    pids.append(int(entry.name))
            except OSError:  # has just ended, or belongs to another user
                continue
    return pids


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        state = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def end_all(marker: str, *, grace_s: float, limit_s: float = _KILL_S) -> list[int]:
    """End all processes of a gang on this machine: SIGTERM, and SIGKILL after ``grace_s``.

    Returns the processes that still exist after ``limit_s`` more seconds (stuck in the kernel).
    """
    remaining = marked_pids(marker)
    deadline = time.monotonic() + grace_s
    if grace_s > 0:
        _signal(remaining, signal.SIGTERM)
        while remaining and time.monotonic() < deadline:
            time.sleep(0.05)
            remaining = [pid for pid in remaining if is_running(pid)]
    deadline = time.monotonic() + limit_s
    while ((remaining := marked_pids(marker)) or _any_in_exec()) and time.monotonic() < deadline:
        _signal(remaining, signal.SIGKILL)
        time.sleep(0.05)
    return remaining


def _any_in_exec() -> bool:
    """Whether a process is inside execve(2), where Linux does not show its environment with our marker yet.

    Such a process has memory, unlike a kernel thread, but neither arguments nor an environment.
    """
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (
                    not (entry / "environ").read_bytes()
                    and not (entry / "cmdline").read_bytes()
                    and not (entry / "statm").read_text().startswith("0 ")
                ):
                    return True
    return False


def _signal(pids: list[int], signal_number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal_number)


def child_environment(marker: str, extra: Mapping[str, str]) -> dict[str, str]:
    """Build the environment of a marked child process.

    CUDA numbers GPUs as NVML does, by PCI address, unless the user has chosen another order: its default, the
    fastest first, differs on machines with unequal GPUs.
    """
    environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **os.environ, **extra}
    environment |= {MARKER: marker, PARENT: str(os.getpid())}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    return environment


def rank_environment(
    *, processes: int, cores: int, main_host: str, node: int = 0, on_gpus: bool = False
) -> dict[str, str]:
    """Build the environment variables that engines need in a rank."""
    machine = len(os.sched_getaffinity(0))
    threads = max(1, (min(machine, cores) if cores > 0 else machine) // processes)
    environment = {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        # Spinning threads make a step many times slower on shared cores
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": os.environ.get("TRANSFORMERS_VERBOSITY", "error"),
        "TIKTOKEN_CACHE_DIR": "",  # no cache: it is keyed by path, so it would miss a changed tokenizer
    }
    if is_loopback(main_host):  # all nodes are on this machine, whatever its host name resolves to
        environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        if on_gpus:  # each local node uses its share of the machine's GPUs
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            gpus = visible.split(",") if visible else [str(index) for index in range((node + 1) * processes)]
            share = gpus[node * processes : (node + 1) * processes]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(share)
    return environment


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's loopback."""
    return host in ("localhost", "::1") or host.startswith("127.")


@contextlib.contextmanager
def started(
    module: str,
    request: Path,
    log: Path,
    *,
    on_cpu: bool,
    gpu: int | None = None,
    offline: bool = True,
    python: str | None = None,
    grace_s: float = 0,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``python -m module request`` until the context is left or this process ends.

    ``log`` receives its output. ``on_cpu`` hides all GPUs from it; ``gpu`` hides all but that one of the GPUs
    visible to this process; ``offline`` disables the Hugging Face Hub. ``python``: interpreter to use instead
    of this one. Its child processes end with the context, too. ``grace_s``: seconds between SIGTERM and
    SIGKILL at the end.
    """
    extra = {"TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "passive", "PYTHONUNBUFFERED": "1"}
    if offline:
        extra["HF_HUB_OFFLINE"] = "1"
    if on_cpu:
        extra["CUDA_VISIBLE_DEVICES"] = ""
    elif gpu is not None:
        extra["CUDA_VISIBLE_DEVICES"] = one_gpu(gpu, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    marker = uuid.uuid4().hex
    with log.open("wb") as output:
        process = subprocess.Popen(
            [python or sys.executable, "-m", module, str(request)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=child_environment(marker, extra),
        )
        try:
            yield process
        finally:
            if grace_s and process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(grace_s)
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel
                process.wait(_KILL_S)
            end_all(marker, grace_s=0)


def one_gpu(number: int, visible: str) -> str:
    """Return CUDA_VISIBLE_DEVICES for a single GPU among the ``visible`` ones ("": all)."""
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return names[number] if names else str(number)


def start_sweeper(marker: str) -> subprocess.Popen[bytes]:
    """Start the small process that ends the gang's processes after this one has ended."""
    return subprocess.Popen(
        [sys.executable, "-S", "-m", "launchers.cluster.processes", marker, str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"PYTHONPATH": str(_ROOT), "PATH": os.environ.get("PATH", "")},
        start_new_session=True,
    )


def die_with_parent(parent_pid: int, death_signal: signal.Signals = signal.SIGKILL) -> None:
    """Make Linux send ``death_signal`` to this process when its parent ends (prctl(2), PR_SET_PDEATHSIG).

    ``parent_pid`` is the expected parent: if it has already ended, this process ends at once. The kernel
    treats the end of the thread that started this process as the end of its parent.
    """
    import ctypes  # imported here, as the sweeper does not need it

    with contextlib.suppress(AttributeError):  # no such call outside Linux
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), death_signal)


def outlive_parent() -> None:
    """Ignore the end of the parent from now on, which is a shell and not a scheduler's process."""
    global _parent_matters
    _parent_matters = False


def lost_parent(parent_pid: int) -> bool:
    """Whether the process that started this one, and that this one should end with, has ended."""
    return _parent_matters and os.getppid() != parent_pid


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """Make SIGTERM raise SystemExit for cleanup, unless a handler is already installed."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return

    def stop(number: int, _: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class WaitingSignals:
    """Received signals that were not handled yet."""

    def __init__(self, handlers: Mapping[int, Callable[[int, FrameType | None], object]]) -> None:
        self._handlers = handlers
        self.numbers: list[int] = []

    def take(self) -> int | None:
        """Remove and return the first one, for the caller to handle; None if there is none."""
        return self.numbers.pop(0) if self.numbers else None

    def act(self, number: int) -> None:
        """Run the signal's original handler."""
        self._handlers[number](number, None)


@contextlib.contextmanager
def signals_wait() -> Iterator[WaitingSignals]:
    """Defer signals with a handler until the caller takes them; a repeated signal is not deferred.

    A handler's exception can occur between acquiring a lock and the block that releases it, which would block
    other users of the lock forever. Has no effect outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield WaitingSignals({})
        return
    handlers = {int(number): signal.getsignal(number) for number in _DEFERRED}
    deferred = {number: handler for number, handler in handlers.items() if callable(handler)}
    waiting = WaitingSignals(deferred)

    def defer(number: int, frame: FrameType | None) -> None:
        if number in waiting.numbers:
            deferred[number](number, frame)
        else:
            waiting.numbers.append(number)

    for number in deferred:
        signal.signal(number, defer)
    try:
        yield waiting
    finally:
        for number, handler in deferred.items():
            if signal.getsignal(number) is defer:  # a handler may have replaced it
                signal.signal(number, handler)
    if (pending := waiting.take()) is not None:
        waiting.act(pending)


def tail(path: Path, lines: int = 20) -> str:
    """Return the last lines of a log; empty if it cannot be read."""
    return "\n".join(_read_end(path, 16_384).splitlines()[-lines:])


def _read_end(path: Path, size: int) -> str:
    """Return the end of a log with secrets masked; empty if it cannot be read."""
    from estimator.masking import mask_secrets  # imported here, as the sweeper does not need it

    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            return mask_secrets(file.read().decode(errors="replace"))
    except OSError:
        return ""


def rank_log_tail(logs_dir: Path) -> str:
    """Return the last lines of the newest standard error of the node's first rank; empty if there is none."""
    logs = logs_dir.glob("*/gang_*/attempt_0/0/stderr.log")
    newest = max(logs, key=lambda path: path.stat().st_mtime, default=None)
    return "" if newest is None else relevant_tail(newest, 15)


def relevant_tail(path: Path, lines: int = 20) -> str:
    """Return the last lines like :func:`tail`, without library warnings and outdated progress bar states."""
    text = _read_end(path, 65_536).rstrip()
    # A progress bar overwrites its line; only the last state is relevant
    cleaned = [line.rstrip("\r").rpartition("\r")[2][:300] for line in text.split("\n")]
    after_warning = [False, *(bool(_WARNING.search(line)) for line in cleaned)]
    relevant = (
        line
        for line, follows_warning in zip(cleaned, after_warning, strict=False)
        if line.strip() and not _NOTICE.search(line) and not (follows_warning and line.startswith("  "))
    )
    return "\n".join([*relevant][-lines:])


def sweep(marker: str, task_pid: int) -> None:
    """Run the sweeper: wait for a node's task to end, then end all remaining processes of its gang."""
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_IGN)
    while os.getppid() == task_pid:
        time.sleep(0.5)
    # Two empty passes, because a process could be starting another one during the first
    clean = 0
    deadline = time.monotonic() + 60
    while clean < 2 and time.monotonic() < deadline:
        pids = marked_pids(marker)
        clean = 0 if pids else clean + 1
        _signal(pids, signal.SIGKILL)
        time.sleep(0.2)


if __name__ == "__main__":
    sweep(sys.argv[1], int(sys.argv[2]))
