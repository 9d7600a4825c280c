"""Masking of secrets in the errors that Metaflow prints and stores.

Metaflow prints the traceback of a failed step and stores it, as an artifact of the task and for ``@catch``.
The text of an exception may contain a token, or a URL with a login.
"""

from __future__ import annotations

import functools
import traceback
from types import SimpleNamespace
from typing import Any

from metaflow import exception, task
from metaflow.plugins import catch_decorator

from estimator.masking import MASK, mask_secrets


@functools.cache
def mask_errors() -> None:
    """Mask secrets in errors that this process prints and stores. Called once the flow's class exists."""
    from metaflow import cli

    for module in (exception, task, catch_decorator):
        module.traceback = SimpleNamespace(format_exc=_masked_traceback)
    cli.traceback = SimpleNamespace(format_exc=lambda: with_asterisks(_masked_traceback(), MASK))

    store = exception.MetaflowExceptionWrapper.__init__
    show = cli.print_metaflow_exception

    def store_masked(self: Any, exc: BaseException | None = None) -> None:
        store(self, exc)
        if exc is not None:
            self.exception = mask_secrets(self.exception)

    def show_masked(error: exception.MetaflowException) -> None:
        error.message = with_asterisks(mask_secrets(str(error.message)), MASK)
        show(error)

    exception.MetaflowExceptionWrapper.__init__ = store_masked
    cli.print_metaflow_exception = show_masked


def with_asterisks(text: str, part: str = "*") -> str:
    """Keep the asterisks of each ``part`` of a text, which Metaflow would drop: they mark emphasis."""
    return text.replace(part, part.replace("*", "\N{ASTERISK OPERATOR}"))


def _masked_traceback() -> str:
    return mask_secrets(traceback.format_exc())
