"""Workers and tier of a pytest run if the command line names neither.

| Arguments | Workers | Tests |
|---|---|---|
| none, or a folder | 4 | fast |
| files | none | fast |
| a test (``PATH::TEST``) | none | all that are named, slow ones included |
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

WORKERS = 4  # also on two cores: most tests wait for processes
FAST = "not slow"
MARK = "mark.slow"  # in the text of each file with slow tests


def default_marks(arguments: Sequence[str]) -> str:
    """Return the default of ``-m``: the fast tier, or everything if a test is named."""
    return "" if _names_tests(arguments) else FAST


def default_workers(arguments: Sequence[str]) -> int:
    """Return the default of ``-n``: workers only for folders."""
    if _names_tests(arguments) or all(Path(each).is_file() for each in arguments):
        return 0
    return WORKERS


def only_slow(marks: str) -> bool:
    """Whether an expression of ``-m`` selects slow tests only."""
    return marks in ("slow", "nightly") or marks.startswith("slow and ")


def names_slow(file: Path) -> bool:
    """Whether a file may have slow tests, without importing it."""
    return MARK in file.read_text(encoding="utf-8")


def _names_tests(arguments: Sequence[str]) -> bool:
    return any("::" in each for each in arguments)
