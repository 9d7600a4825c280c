"""Survival of a run after the shell that started it has ended, with ``nohup`` or without.

When a terminal or an ssh connection ends, the kernel and the shell send SIGHUP, and writes to the terminal
fail. Neither should cost hours of training: SIGHUP is ignored here and in all child processes, and once the
terminal (or the ``tee`` behind a pipe) is gone, output continues in ``nohup.out``, as with nohup.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import stat
import sys
from pathlib import Path
from typing import Any, TextIO

FILE = "nohup.out"
_READER_GONE = (errno.EIO, errno.EPIPE)


def outlive_shell() -> None:
    """Make this process survive SIGHUP and the loss of its output's reader."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for name in ("stdout", "stderr"):
        stream: TextIO | None = getattr(sys, name)
        with contextlib.suppress(OSError, ValueError, AttributeError):  # missing, closed, or no descriptor
            if stream is not None and not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                stream.flush()
                setattr(sys, name, _durable(stream))


def _durable(stream: TextIO) -> TextIO:
    raw = _Output(stream.fileno())
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=True,
    )


class _Output(io.RawIOBase):
    """Descriptor that is redirected to the file when its reader is gone."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.name = f"<{descriptor}>"

    def write(self, data: Any) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError as error:
            if error.errno not in _READER_GONE:
                raise
        self._redirect()
        return os.write(self._descriptor, data)

    def _redirect(self) -> None:
        for folder in (Path.cwd(), Path.home()):
            try:
                file = os.open(folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            except OSError:
                continue
            break
        else:
            file = os.open(os.devnull, os.O_WRONLY)
        os.dup2(file, self._descriptor)
        os.close(file)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)
