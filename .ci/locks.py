"""Renew infra/docker/requirements/locked/: every package of the tested set, with its version and hashes.

    pip install uv && python .ci/locks.py

A lock is resolved from the list of the same name next to that folder; `launcher`, which has no list, from
pyproject.toml. The nodes' image installs `train` together with one datastore's lock, so these are resolved
with the same versions. All locks are for Linux on x86-64 and Python 3.11, like the images.
tests/infra/test_locks.py fails if one is outdated.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LISTS = Path("infra", "docker", "requirements")
LOCKED = LISTS / "locked"
IMAGES = ("train", "s3", "gs", "azure")  # each has the versions of those before it
PYTHON = "3.11"
PLATFORM = "x86_64-manylinux_2_28"


def lock(name: str, into: Path, *arguments: str, agree_with: tuple[Path, ...] = ()) -> Path:
    """Write the lock ``name`` into a folder; ``arguments``: requirements files and options of uv."""
    file = into / f"{name}.txt"
    command = ["uv", "pip", "compile", "--quiet", "--no-config", "--generate-hashes", "--no-annotate"]
    command += ["--python-version", PYTHON, "--python-platform", PLATFORM, "--output-file", str(file)]
    command += ["--custom-compile-command", "python .ci/locks.py", "--no-emit-index-url"]
    command += [word for other in agree_with for word in ("--constraint", str(other))]
    # A private index may serve other files, whose hashes would fail elsewhere
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("UV_", "PIP_"))}
    if subprocess.run([*command, *arguments], cwd=ROOT, env=environment, check=False).returncode != 0:
        sys.exit(f"{LOCKED / name}.txt could not be resolved; no lock was changed.")
    return file


def main() -> None:
    """Renew all locks; if one fails, none is changed."""
    if shutil.which("uv") is None:
        sys.exit("uv is not installed: pip install uv")
    with tempfile.TemporaryDirectory() as folder:
        resolved: tuple[Path, ...] = ()
        for name in IMAGES:
            resolved += (lock(name, Path(folder), str(LISTS / f"{name}.txt"), agree_with=resolved),)
        extras = ("--extra", "kubernetes", "--extra", "aws", "--constraint", str(LISTS / "train.txt"))
        lock("launcher", Path(folder), "pyproject.toml", *extras)
        for file in Path(folder).iterdir():
            shutil.copyfile(file, ROOT / LOCKED / file.name)


if __name__ == "__main__":
    main()
