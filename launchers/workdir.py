"""Work folders, and a full disk in words.

The work folders of running tasks lie in a folder of the user's alone, below the machine's temporary folder
(FINETUNE_WORK_DIR changes it). That place may be everybody's, so nothing is written before it is known that
the folder in it was made by this user and that nobody else can write there. A task removes its own folder
when it ends; what a killed task has left is removed by the next one.
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import psutil

from estimator.errors import UserError

NO_SPACE = "No space left"  # how the problem begins
# What torch.save and numpy say when they could not write on, for whatever reason
_TORN_WRITE = re.compile(
    r"PytorchStreamWriter failed|inline_container\.cc|iostream error|\d+ requested and \d+ written"
)
ROOM = (
    "Free some space there, ask for a larger disk, or name another: export FINETUNE_WORK_DIR=/a/larger/disk"
)
PLACE = "Name another place: export FINETUNE_WORK_DIR=/a/folder/on/a/local/disk"


def place() -> Path:
    """The folder, perhaps of all users, in which each has a :func:`root` of his own."""
    return Path(os.environ.get("FINETUNE_WORK_DIR") or tempfile.gettempdir())


def root() -> Path:
    """Where this user's work folders lie on this machine. It need not be there, nor be this user's."""
    return place() / f"metaflow-finetune-{os.getuid()}"


def check_root() -> None:
    """Raise UserError where what lies in the place of :func:`root` is not this user's; makes nothing."""
    base = root()
    with _explained(base):
        if os.path.lexists(base):
            _check_ours(base)


def _make_root() -> Path:
    """Make :func:`root`, or see that it is this user's, and let nobody else in.

    By its path: of a folder of the user's that lies among others' (with the sticky bit, as temporary folders
    have it) nobody else can put anything in the place.
    """
    base = root()
    base.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        base.mkdir(mode=0o700)
    _check_ours(base)
    base.chmod(0o700)
    if base.lstat().st_mode & 0o077:
        raise _not_ours(base, "its file system lets others in, whatever is asked for")
    return base


def _check_ours(base: Path) -> None:
    found = base.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise _not_ours(base, "it is a link")
    if not stat.S_ISDIR(found.st_mode):
        raise _not_ours(base, "it is no folder")
    if found.st_uid != os.getuid():
        raise _not_ours(base, f"it belongs to user {found.st_uid}, this is user {os.getuid()}")


def _not_ours(base: Path, why: str) -> UserError:
    return UserError(f"{base} can't be the place of work folders: {why}.", PLACE)


@contextmanager
def _explained(base: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"No work folder can be made in {base}: {error.strerror}.", PLACE) from None


@contextmanager
def work_folder(run_id: str, step: str, task_id: str) -> Iterator[Path]:
    """An empty folder for one attempt of one task.

    Raises UserError where none can be made, and instead of an OSError of a full disk while it is in use.
    """
    with _explained(root()):
        base = _make_root()
        _sweep(base)
        folder = Path(tempfile.mkdtemp(prefix=f"{run_id}-{step}-{task_id}-", dir=base))
        owner = _own(folder)
    try:
        with owner, full_disk_explained(folder, ROOM):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _own(folder: Path) -> IO[str]:
    """Mark a folder as in use, as long as the file that is returned is open.

    By a lock, which the kernel lets go of when this process ends: a container that shares the folder can't
    see this process. The content is for people.
    """
    owner = (folder / "owner.new").open("w")
    _lock(owner)
    owner.write(f"{os.getpid()} {psutil.Process().create_time()}")
    owner.flush()
    (folder / "owner.new").rename(folder / "owner")
    return owner


def _sweep(base: Path) -> None:
    for path in base.glob("*/owner"):
        # One that can't be opened is being removed by its own task, or is another user's.
        with suppress(OSError), path.open("r+") as owner:
            if _lock(owner):
                shutil.rmtree(path.parent, ignore_errors=True)


def _lock(file: IO[str]) -> bool:
    """Whether nobody else holds the lock. A file system without locks has none to give: nothing is swept."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def is_disk_full(error: BaseException) -> bool:
    """Whether the system says that the disk is full, or this user's share of it."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_full_disk_behind(error: BaseException, folder: Path) -> bool:
    """Whether a full disk is behind this; torch's, numpy's and safetensors' own errors keep no errno."""
    for link in _chain(error):
        if is_disk_full(link) or "No space left on device" in str(link) or "os error 28" in str(link):
            return True
        if _TORN_WRITE.search(str(link)) and shutil.disk_usage(folder).free < 16 * 2**20:
            return True
    return False


def file_of_error(error: BaseException, otherwise: Path) -> str:
    """What could not be written, as far as that is told."""
    named = (str(each.filename) for each in _chain(error) if isinstance(each, OSError) and each.filename)
    return next(named, str(otherwise))


@contextmanager
def full_disk_explained(folder: Path, advice: str) -> Iterator[None]:
    """Raises UserError instead of an OSError that a full disk is behind; ``folder`` is what is written."""
    try:
        yield
    except OSError as error:
        if not is_full_disk_behind(error, folder):
            raise
        where = file_of_error(error, folder)
        raise UserError(f"{NO_SPACE} on {socket.gethostname()} for {where}.", advice) from None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
