"""Fixtures shared by the tests of the documentation site."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the documentation site, built without warnings."""
    pytest.importorskip("mkdocs", reason="mkdocs-material is not installed: pip install -e '.[docs]'")
    if shutil.which("npm") is None:
        pytest.skip("needs npm, which fetches Python for browsers")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    output = done.stdout + done.stderr
    if "npm cannot fetch Pyodide" in output or "npm has not fetched Pyodide" in output:
        pytest.skip("needs the npm registry, which has Python for browsers")
    assert done.returncode == 0, output
    return folder
