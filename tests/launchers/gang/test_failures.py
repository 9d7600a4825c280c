"""Selection of the failure shown as the cause, and recognition of a full disk."""

from __future__ import annotations

import errno
import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launchers.base.workdir import file_of_error, is_caused_by_full_disk
from launchers.gang.failures import Failure, Kind, root_cause

MIB = 2**20


def failure(kind: Kind, at: float, *, secondary: bool = False) -> Failure:
    return Failure(kind=kind, node=0, host="a", at=at, message=f"{kind} at {at}", secondary=secondary)


def test_the_first_failure_is_the_cause_unless_it_is_marked_as_a_consequence() -> None:
    assert root_cause([failure("rank", 2.0), failure("agent", 1.0)]).kind == "agent"
    assert root_cause([failure("rank", 1.0, secondary=True), failure("node", 2.0)]).kind == "node"


def test_a_users_error_is_shown_before_its_consequences_on_other_nodes() -> None:
    assert root_cause([failure("rank", 1.0), failure("user", 2.0)]).kind == "user"


def test_a_failure_message_with_the_tail_of_a_log_ends_with_the_cause() -> None:
    killed = replace(failure("rank", 1.0), traceback="The end of its log:\nstep 3\nstep 4\n")
    assert str(killed.error()).splitlines()[-1] == "rank at 1.0"
    raised = replace(failure("rank", 1.0), traceback="Traceback (most recent call last):\nValueError: x\n")
    assert str(raised.error()).splitlines()[-1] == "ValueError: x"


@pytest.mark.parametrize(
    ("error", "limit", "full"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/x"), None, True),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "/x"), None, True),
        (OSError(errno.EFBIG, "File too large", "/x"), None, True),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"), MIB, True),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"), None, False),
        (RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"), MIB, True),
        (OSError("25000 requested and 16368 written"), MIB, True),
        (RuntimeError("the loss is not a number"), MIB, False),
    ],
)
def test_a_full_disk_is_recognized_by_torchs_message(
    small_files: Callable[[int | None], None],
    tmp_path: Path,
    error: Exception,
    limit: int | None,
    full: bool,
) -> None:
    small_files(limit)
    outer = RuntimeError("rank 0 could not write its part")
    outer.__cause__ = error
    assert is_caused_by_full_disk(outer, tmp_path) == full
    assert list(tmp_path.iterdir()) == [], "no file is left"


def test_an_error_by_a_limit_on_file_sizes_names_the_file_and_the_limit(tmp_path: Path) -> None:
    assert file_of_error(OSError(errno.EFBIG, "File too large", "/x"), tmp_path).startswith("/x (largest")
    assert file_of_error(OSError(errno.EDQUOT, "Quota", "/x"), tmp_path) == "/x (quota exceeded)"
    assert file_of_error(RuntimeError("torn"), tmp_path) == str(tmp_path)


@pytest.fixture
def small_files() -> Iterator[Callable[[int | None], None]]:
    """``small_files(MIB)``: files of this process cannot grow beyond this size, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size is None else size, hard))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
