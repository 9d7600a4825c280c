"""Printing of text that may come from other people: control and formatting characters are escaped.

Modules that print such text write ``from estimator.terminal import print``; tables use :func:`console`.
"""

from __future__ import annotations

import builtins
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import IO, TYPE_CHECKING, Any

from estimator.formatting import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.segment import Segment

PIPE_CLOSED = 141  # exit status in a shell of a program ended by SIGPIPE


def print(
    *values: object, sep: str = " ", end: str = "\n", file: IO[str] | None = None, flush: bool = False
) -> None:
    """Print like the built-in function, with escaped control characters (:func:`printable`)."""
    builtins.print(printable(sep.join(map(str, values))), end=end, file=file, flush=flush)


def open_closed_streams() -> None:
    """Redirect standard streams that the caller closed (``>&-``) to nowhere.

    Otherwise Python has no ``sys.stdout``, and the next file that is opened gets its descriptor.
    """
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", closefd=False))


def discard_output() -> None:
    """Redirect standard output to nowhere: buffered output would raise again when Python exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def ended_by_closed_pipe() -> Iterator[None]:
    """Context for text on standard output: a closed pipe ends the process, as SIGPIPE does by default.

    Python ignores the signal; typer and the interpreter's exit then end with other statuses.
    """
    previous = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        yield
        sys.stdout.flush()
    finally:
        signal.signal(signal.SIGPIPE, previous)


def write_data(text: str) -> None:
    """Write text for programs (YAML, CSV) to standard output; only a terminal gets it escaped."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def console(**options: Any) -> Console:
    """Return a rich console that escapes control characters and takes text literally.

    Without markup, a name such as ``[link=...]`` or ``[/x]`` is neither a link nor an error.
    """
    return _console_class()(highlight=False, markup=False, emoji=False, **options)


@cache
def _console_class() -> type[Console]:
    from rich.console import Console
    from rich.segment import Segment

    class PrintableConsole(Console):
        """Console that escapes control characters after the layout, so that columns stay aligned."""

        def on_broken_pipe(self) -> None:
            """End as a program that SIGPIPE ends, where rich ends with status 1."""
            discard_output()
            raise SystemExit(PIPE_CLOSED)

        def render(self, *arguments: Any, **options: Any) -> Iterable[Segment]:
            for segment in super().render(*arguments, **options):
                if segment.control:
                    yield segment
                else:
                    yield Segment(printable(segment.text), segment.style)

    return PrintableConsole
