"""Whether a full disk is behind an error, and that in words."""

from __future__ import annotations

import errno
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from estimator.errors import UserError

NO_SPACE = "No space left"  # how the problem begins
# What torch.save and numpy say when they could not write on, for whatever reason
_TORN_WRITE = re.compile(
    r"PytorchStreamWriter failed|inline_container\.cc|iostream error|\d+ requested and \d+ written"
)


def is_full(error: BaseException) -> bool:
    """Whether the system says that the disk is full, or this user's share of it."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_behind(error: BaseException, folder: Path) -> bool:
    """Whether a full disk is behind this; torch's, numpy's and safetensors' own errors keep no errno."""
    for link in _chain(error):
        if is_full(link) or "No space left on device" in str(link) or "os error 28" in str(link):
            return True
        if _TORN_WRITE.search(str(link)) and shutil.disk_usage(folder).free < 16 * 2**20:
            return True
    return False


def file_of(error: BaseException, otherwise: Path) -> str:
    """What could not be written, as far as that is told."""
    named = (str(each.filename) for each in _chain(error) if isinstance(each, OSError) and each.filename)
    return next(named, str(otherwise))


@contextmanager
def said(folder: Path, advice: str) -> Iterator[None]:
    """Raises UserError instead of an OSError that a full disk is behind; ``folder`` is what is written."""
    try:
        yield
    except OSError as error:
        if not is_behind(error, folder):
            raise
        where = file_of(error, folder)
        raise UserError(f"{NO_SPACE} on {socket.gethostname()} for {where}.", advice) from None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
