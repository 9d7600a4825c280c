"""One Slurm cluster for the tests of a file."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm import lab


@pytest.fixture(scope="module")
def slurm() -> Iterator[lab.Lab]:
    """Two nodes. The folder's path is short: a socket lies in it (108 characters at most)."""
    why = lab.missing()
    if why is not None:
        pytest.skip(why)
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as folder,
        contextlib.closing(lab.Lab(Path(folder) / "lab")) as slurm_lab,
    ):
        yield slurm_lab
