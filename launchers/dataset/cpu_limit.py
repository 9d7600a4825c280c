"""Limits of processor time and memory of code from other people, such as a chat template."""

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
    """Raise TimeoutError in the block after it has used this much processor time of the process.

    Processor time instead of elapsed time, so that a busy machine changes nothing and a SIGALRM of the caller
    stays as it is. Applies in the main thread alone, which is the only one that receives signals.
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
    """Let the process allocate at most ``size`` more bytes in the block; beyond that, MemoryError is raised.

    Linux only. The kernel refuses the allocation (RLIMIT_DATA), so that one large one takes nothing either.
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
