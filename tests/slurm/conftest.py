"""One Slurm cluster for all tests of this folder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm import lab


@pytest.fixture(scope="session")
def slurm() -> Iterator[lab.Lab]:
    """Two nodes. The folder's path is short: a socket lies in it (108 characters at most)."""
    why = lab.missing()
    if why is not None:
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
        made = lab.Lab(Path(folder) / "lab")
        try:
            yield made
        finally:
            made.close()
