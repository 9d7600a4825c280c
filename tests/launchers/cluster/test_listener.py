"""Limit of open files of a process that listens for many nodes."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIMIT = """
import resource, sys
from launchers.cluster import listener
soft, hard, count = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
listener._allow_descriptors(count)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "count", "expected"),
    [(64, 900, 500, 500), (64, 900, 2000, 900), (600, 900, 500, 600), (500, 900, 500, 500)],
)
def test_the_limit_of_open_files_is_raised_as_far_as_allowed_and_never_lowered(
    soft: int, hard: int, count: int, expected: int
) -> None:
    command = [sys.executable, "-c", LIMIT, str(soft), str(hard), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == [str(expected), str(hard)]
