"""Logging setup for every command: level, destination, and masking of secrets.

Each module logs to ``logging.getLogger(__name__)``. Nothing is configured on import: without ``--log-level``
and ``FINETUNE_LOG``, Python prints warnings on standard error and drops the rest. Only loggers of this
project's packages are changed, so messages of torch or Metaflow stay as they are.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from estimator.errors import UserError
from estimator.formatting import printable
from estimator.masking import mask_secrets
from estimator.terminal import print

LEVEL_VARIABLE = "FINETUNE_LOG"
TRACEBACK_VARIABLE = "FINETUNE_TRACEBACK"
VARIABLES = (LEVEL_VARIABLE, TRACEBACK_VARIABLE)
"""Environment variables that remote steps need as well."""
LEVELS = ("debug", "info", "warning", "error")
PACKAGES = ("checklist", "decorators", "estimator", "flows", "launchers", "metaflow_extensions")
_DETAILED = "%(asctime)s %(levelname)s %(name)s[%(process)d]: %(message)s"
_NO = ("", "0", "false", "no", "off")
_log = logging.getLogger(__name__)


class SecretFilter(logging.Filter):
    """Filter of a handler that masks secrets and escapes control characters in message and traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Mask the record in place and accept it."""
        record.msg, record.args = printable(mask_secrets(record.getMessage())), None
        if record.exc_info:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
            record.exc_info = None
        if record.exc_text:
            record.exc_text = printable(mask_secrets(record.exc_text))
        if record.stack_info:
            record.stack_info = mask_secrets(record.stack_info)
        return True


class _StandardError(logging.StreamHandler):  # type: ignore[type-arg] # not subscriptable in Python 3.10
    """Handler that writes to the current ``sys.stderr``, which tests and Metaflow replace."""

    def __init__(self, level: int) -> None:
        logging.Handler.__init__(self, level)
        # Warnings that are shown by default look like other output
        self.setFormatter(logging.Formatter(_DETAILED if level < logging.WARNING else "%(message)s"))
        self.addFilter(SecretFilter())

    @property
    def stream(self) -> Any:
        return sys.stderr


_handlers: list[logging.Handler] = []


def setup(level: str | None = None) -> None:
    """Show log messages of at least this level on standard error, here and in every child process.

    ``level`` is the value of ``--log-level``; None reads ``FINETUNE_LOG``. Raises UserError for
    an unknown level.
    """
    source = "--log-level" if level is not None else LEVEL_VARIABLE
    value = (level if level is not None else os.environ.get(LEVEL_VARIABLE, "")).strip().lower()
    if not value:
        return
    if value not in LEVELS:
        raise UserError(f"{source} {value!r} is not a log level.", f"Use one of {', '.join(LEVELS)}.")
    if level is not None:
        os.environ[LEVEL_VARIABLE] = value
    _remove(_StandardError)
    _handlers.append(_StandardError(getattr(logging, value.upper())))
    _install()


@contextmanager
def recording(file: Path) -> Iterator[None]:
    """Append all log messages, from level debug, to a file of mode 0600 while the block runs.

    A file that cannot be opened is reported as a warning; the block runs without it.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        handler = logging.FileHandler(file, encoding="utf-8")
    except OSError as error:
        _log.warning("Cannot write the run log %s: %s", file, error.strerror)
        yield
        return
    handler.setFormatter(logging.Formatter(_DETAILED))
    handler.addFilter(SecretFilter())
    has_stderr = any(isinstance(existing, _StandardError) for existing in _handlers)
    handlers = [handler] if has_stderr else [handler, _StandardError(logging.WARNING)]
    _handlers.extend(handlers)
    _install()
    try:
        yield
    except BaseException as error:
        if not (isinstance(error, SystemExit) and not error.code):
            _log.debug("Ended by %s", type(error).__name__, exc_info=error)
        raise
    finally:
        _handlers[:] = [
            existing for existing in _handlers if existing not in handlers
        ]  # setup() may have replaced one
        _install()
        handler.close()


def reset() -> None:
    """Undo :func:`setup`: messages go where Python sends them by default."""
    _handlers.clear()
    _install()


def show_traceback(error: BaseException) -> None:
    """Print where an error was raised if ``FINETUNE_TRACEBACK=1``; log it at level debug otherwise."""
    text = "".join(traceback.format_exception(error)).rstrip()
    if os.environ.get(TRACEBACK_VARIABLE, "").strip().lower() not in _NO:
        print(mask_secrets(text), file=sys.stderr, flush=True)
    else:
        _log.debug("%s", text)


def _install() -> None:
    """Attach the current handlers, and no others of this module, to the project's loggers."""
    level = min((handler.level for handler in _handlers), default=logging.NOTSET)
    if any(isinstance(handler, logging.FileHandler) for handler in _handlers):
        level = logging.DEBUG
    for name in PACKAGES:
        logger = logging.getLogger(name)
        for handler in list(logger.handlers):
            if any(isinstance(log_filter, SecretFilter) for log_filter in handler.filters):
                logger.removeHandler(handler)
        for handler in _handlers:
            logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = not _handlers  # a handler of the root logger would show each message twice


def _remove(kind: type[logging.Handler]) -> None:
    _handlers[:] = [handler for handler in _handlers if not isinstance(handler, kind)]
