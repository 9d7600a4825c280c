"""Limits on CPU time and memory for untrusted code, such as a chat template."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after the process has used ``seconds`` of CPU time in it.

    CPU time is used instead of elapsed time, so that a busy machine has no effect and the caller's SIGALRM is
    not replaced. Without effect outside the main thread, the only one that receives signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError(f"not finished after {seconds:g} s")

    previous = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


@contextmanager
def memory_limit(size: int) -> Iterator[None]:
    """Limit the process to ``size`` more bytes of memory in the block; beyond that, MemoryError is raised.

    Linux only. The limit is the kernel's (RLIMIT_DATA), which refuses even a single large allocation before
    any memory is used.
    """
    statistics = Path("/proc/self/statm")
    if not statistics.exists():
        yield
        return
    used = int(statistics.read_text().split()[5]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [used + size, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
