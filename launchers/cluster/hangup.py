"""A run outlives the shell that it was started from, with ``nohup`` and without.

When a terminal or an ssh connection ends, the kernel and the shell send SIGHUP, and what is written to the
terminal fails. Neither is a reason to lose hours of training: SIGHUP is ignored here and in all processes
that are started from here, and once the terminal (or the ``tee`` behind a pipe) has gone, output goes on in
``nohup.out``, where nohup itself would have put it.
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
_GONE = (errno.EIO, errno.EPIPE)


def outlive_shell() -> None:
    """From now on neither SIGHUP nor an output that nobody reads any more ends this process."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for name in ("stdout", "stderr"):
        stream: TextIO | None = getattr(sys, name)
        with contextlib.suppress(OSError, ValueError, AttributeError):  # none, closed, or not a file's
            if stream is not None and not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                stream.flush()
                setattr(sys, name, _lasting(stream))


def _lasting(stream: TextIO) -> TextIO:
    raw = _Output(stream.fileno())
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=True,
    )


class _Output(io.RawIOBase):
    """A descriptor that becomes that of the file when the one who reads it has gone."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.name = f"<{descriptor}>"

    def write(self, data: Any) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError as error:
            if error.errno not in _GONE:
                raise
        self._turn_to_file()
        return os.write(self._descriptor, data)

    def _turn_to_file(self) -> None:
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
