"""Work folders of running tasks, and error messages for full disks.

Work folders are created in a private folder of the user, below the machine's temporary folder (or
FINETUNE_WORK_DIR). That location may be shared by all users, so nothing is written before it is verified that
the private folder belongs to this user and that no one else can write to it. A task removes its folder when
it ends; folders of killed tasks are removed by the next task.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil

from estimator.errors import UserError
from launchers.cluster.processes import sigterm_raises

NO_SPACE = "No space left"  # beginning of the problem line
# Errors of torch.save and numpy after an incomplete write, whatever the cause
_TORN_WRITE = re.compile(
    r"PytorchStreamWriter failed|inline_container\.cc|iostream error|\d+ requested and \d+ written"
)
ROOM_ADVICE = (
    "Free some space, request a larger disk, or use another one: export FINETUNE_WORK_DIR=/a/larger/disk"
)
PLACE_ADVICE = "Use another folder: export FINETUNE_WORK_DIR=/a/folder/on/a/local/disk"


def make_folder(folder: Path, write: Callable[[Path], None], is_complete: Callable[[Path], bool]) -> Path:
    """Let ``write`` fill a temporary folder, then rename it to ``folder``. A complete folder is kept.

    An empty folder is replaced. If another process is first, its folder is kept. Raises UserError if the disk
    is full.
    """
    if is_complete(folder):
        return folder
    temporary = folder.with_name(f".{folder.name}-{uuid.uuid4().hex[:8]}")
    try:
        with full_disk_explained(folder.parent, "Free some space there, and run again."):
            temporary.mkdir(parents=True)
            write(temporary)
        temporary.rename(folder)
    except OSError:
        if not is_complete(folder):
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def place() -> Path:
    """Return the folder, possibly shared by all users, that contains each user's :func:`root`."""
    return Path(os.environ.get("FINETUNE_WORK_DIR") or tempfile.gettempdir())


def root() -> Path:
    """Return the folder of this user's work folders. It may be missing, or belong to another user."""
    return place() / f"metaflow-finetune-{os.getuid()}"


def check_root() -> None:
    """Raise UserError if :func:`root` exists and does not belong to this user; creates nothing."""
    base = root()
    with _explained(base):
        if os.path.lexists(base):
            _check_owner(base)


def _make_root() -> Path:
    """Create :func:`root`, or verify that it is this user's, and deny access to others.

    The check is by path: in a shared folder with the sticky bit, such as a temporary folder, no one else can
    replace a folder of this user.
    """
    base = root()
    base.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        base.mkdir(mode=0o700)
    _check_owner(base)
    base.chmod(0o700)
    if base.lstat().st_mode & 0o077:
        raise _unusable(base, "its file system ignores permissions")
    return base


def _check_owner(base: Path) -> None:
    status = base.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise _unusable(base, "it is a symbolic link")
    if not stat.S_ISDIR(status.st_mode):
        raise _unusable(base, "it is not a folder")
    if status.st_uid != os.getuid():
        raise _unusable(base, f"it belongs to user {status.st_uid}, this is user {os.getuid()}")


def _unusable(base: Path, reason: str) -> UserError:
    return UserError(f"Cannot use {base} for work folders: {reason}.", PLACE_ADVICE)


@contextmanager
def _explained(base: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"Cannot create a work folder in {base}: {error.strerror}.", PLACE_ADVICE) from None


@contextmanager
def work_folder(run_id: str, step: str, task_id: str) -> Iterator[Path]:
    """Create an empty folder for one attempt of one task, and remove it afterwards.

    Raises UserError if it cannot be created, and replaces the OSError of a full disk while it is in use.
    SIGTERM raises SystemExit meanwhile, unless it is handled already.
    """
    with sigterm_raises():
        with _explained(root()):
            base = _make_root()
            _sweep(base)
            folder = Path(tempfile.mkdtemp(prefix=f"{run_id}-{step}-{task_id}-", dir=base))
            owner = _mark_in_use(folder)
        try:
            with owner, full_disk_explained(folder, ROOM_ADVICE):
                yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _mark_in_use(folder: Path) -> IO[str]:
    """Mark a folder as in use for as long as the returned file is open.

    Uses a file lock, which the kernel releases when this process ends, because another container that shares
    the folder cannot see this process. The file's content is informational.
    """
    owner = (folder / "owner.new").open("w")
    _lock(owner)
    owner.write(f"{os.getpid()} {psutil.Process().create_time()}")
    owner.flush()
    (folder / "owner.new").rename(folder / "owner")
    return owner


def _sweep(base: Path) -> None:
    for path in base.glob("*/owner"):
        # A file that cannot be opened is being removed by its task, or belongs to another user
        with suppress(OSError), path.open("r+") as owner:
            if _lock(owner):
                shutil.rmtree(path.parent, ignore_errors=True)


def _lock(file: IO[str]) -> bool:
    """Try to take the lock; False if it is held, or if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


# Errors of writes for which there is no space, with a remark if the disk itself is not full
_NO_SPACE_ERRORS = {
    errno.ENOSPC: "",
    errno.EDQUOT: " (quota exceeded)",
    errno.EFBIG: " (largest size of a file there, or `ulimit -f`)",
}
_PROBE_BYTES = 16 * 2**20


def is_disk_full(error: BaseException) -> bool:
    """Whether the error reports a full disk, an exceeded quota or a file that is too large."""
    return isinstance(error, OSError) and error.errno in _NO_SPACE_ERRORS


def is_caused_by_full_disk(error: BaseException, folder: Path) -> bool:
    """Whether a full disk caused the error; errors of torch, numpy and safetensors have no errno."""
    for link in _chain(error):
        if is_disk_full(link) or "No space left on device" in str(link) or "os error 28" in str(link):
            return True
        if _TORN_WRITE.search(str(link)) and not _has_space(folder):
            return True
    return False


def _has_space(folder: Path) -> bool:
    """Whether a file of 16 MiB can be written to the folder: free space does not show a quota."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, _PROBE_BYTES)
    except OSError as error:
        return not is_disk_full(error)
    return True


def file_of_error(error: BaseException, otherwise: Path | str) -> str:
    """Return the file that could not be written, or ``otherwise``; with a remark on quotas and limits."""
    causes = [cause for cause in _chain(error) if isinstance(cause, OSError)]
    name = next((str(cause.filename) for cause in causes if cause.filename), str(otherwise))
    return name + next((_NO_SPACE_ERRORS[cause.errno] for cause in causes if is_disk_full(cause)), "")  # type: ignore[index]


@contextmanager
def full_disk_explained(folder: Path, advice: str) -> Iterator[None]:
    """Raise UserError instead of an error caused by a full disk; ``folder`` is being written to."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of tokenizers and torch, too, which raise no OSError
        if not is_caused_by_full_disk(error, folder):
            raise
        raise no_space_error(error, str(folder), advice) from None


def no_space_error(error: BaseException, otherwise: str, advice: str) -> UserError:
    """Return the message for a full disk; ``otherwise`` is named if the error has no file."""
    return UserError(f"{NO_SPACE} on {socket.gethostname()} for {file_of_error(error, otherwise)}.", advice)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Iterate over an exception and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
