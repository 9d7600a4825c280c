"""Ctrl-C while a program imports its modules: the program ends without a traceback."""

from __future__ import annotations

import signal


def end_silently() -> None:
    """Let SIGINT end this process at once, until :func:`raise_again`. An ignored SIGINT stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_again() -> None:
    """Let SIGINT raise KeyboardInterrupt again, as Python does by default."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
