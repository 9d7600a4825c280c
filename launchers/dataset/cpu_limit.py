"""Limit of the processor time of code from other people, such as a chat template."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
