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
    """Two nodes. The path of the folder is short because of a socket (at most 108 characters)."""
    why = lab.missing()
    if why is not None:
        pytest.skip(why)
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as folder,
        contextlib.closing(lab.Lab(Path(folder) / "lab")) as slurm_lab,
    ):
        yield slurm_lab
