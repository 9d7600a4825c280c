"""Tests selected by a pytest command, and its number of processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.selection import FAST, WORKERS, default_marks, default_workers, only_slow

ROOT = Path(__file__).parents[1]
FILE = "tests/test_packaging.py"  # with fast and slow tests
FAST_TEST = f"{FILE}::test_no_extra_requires_the_package_itself"
SLOW_TEST = f"{FILE}::test_the_wheel_has_exactly_the_files_of_the_packages"


@pytest.mark.parametrize(
    ("arguments", "marks", "workers"),
    [
        (["tests"], FAST, WORKERS),
        (["tests/lab", FILE], FAST, WORKERS),
        ([FILE], FAST, 0),
        ([FAST_TEST], "", 0),
        ([SLOW_TEST, "tests/lab"], "", 0),
    ],
)
def test_folders_run_with_workers_and_named_tests_run_in_any_tier(
    arguments: list[str], marks: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert default_marks(arguments) == marks
    assert default_workers(arguments) == workers


@pytest.mark.parametrize(
    ("arguments", "fast", "slow"),
    [
        ([SLOW_TEST], False, True),
        (["-m", "", FILE], True, True),
        (["-mnot slow", FAST_TEST, SLOW_TEST], True, False),
    ],
)
def test_pytest_selects_tests_by_path_unless_marks_are_given(
    arguments: list[str], fast: bool, slow: bool
) -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (FAST_TEST in done.stdout, SLOW_TEST in done.stdout) == (fast, slow)


def test_folders_without_slow_tests_are_not_imported_if_only_slow_tests_run() -> None:
    assert all(only_slow(marks) for marks in ("slow", "slow and not nightly", "nightly"))
    assert not any(only_slow(marks) for marks in (FAST, "", "slow or fast", "not nightly"))
    command = [sys.executable, "-m", "pytest", "--collect-only", "-n0", "-p", "no:cacheprovider"]
    command += ["-m", "slow", "tests/estimator/hardware/prices"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert "collected 0 items" in done.stdout


def test_workers_inherit_the_tier_and_start_no_workers() -> None:
    command = [sys.executable, "-m", "pytest", "-v", "-n", "2", "-p", "no:cacheprovider", FILE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert FAST_TEST in done.stdout
    assert SLOW_TEST not in done.stdout
