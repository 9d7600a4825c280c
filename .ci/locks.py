"""Renew infra/docker/requirements/locked/: every package of the tested set, with its version and hashes.

    pip install uv && python .ci/locks.py

A lock is made of the list of the same name beside that folder; `launcher`, which has none, of pyproject.toml.
The nodes' image installs `train` and one datastore's lock together, so these are resolved to agree. All are
for Linux on x86-64 and Python 3.11, as the images are. tests/infra/test_locks.py says when one is too old.
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
IMAGES = ("train", "s3", "gs", "azure")  # each agrees with those before it
PYTHON = "3.11"
PLATFORM = "x86_64-manylinux_2_28"


def lock(name: str, into: Path, *arguments: str, agree_with: tuple[Path, ...] = ()) -> Path:
    """Write the lock ``name`` into a folder; ``arguments``: what uv is to make it of."""
    file = into / f"{name}.txt"
    command = ["uv", "pip", "compile", "--quiet", "--no-config", "--generate-hashes", "--no-annotate"]
    command += ["--python-version", PYTHON, "--python-platform", PLATFORM, "--output-file", str(file)]
    command += ["--custom-compile-command", "python .ci/locks.py", "--no-emit-index-url"]
    command += [word for other in agree_with for word in ("--constraint", str(other))]
    # An index of this machine's own would give other files, whose hashes nobody else could use
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("UV_", "PIP_"))}
    if subprocess.run([*command, *arguments], cwd=ROOT, env=environment, check=False).returncode != 0:
        sys.exit(f"{LOCKED / name}.txt could not be made; all locks are as they were.")
    return file


def main() -> None:
    """Make all locks anew; none is changed where one fails."""
    if shutil.which("uv") is None:
        sys.exit("uv is not installed: pip install uv")
    with tempfile.TemporaryDirectory() as folder:
        made: tuple[Path, ...] = ()
        for name in IMAGES:
            made += (lock(name, Path(folder), str(LISTS / f"{name}.txt"), agree_with=made),)
        extras = ("--extra", "kubernetes", "--extra", "aws", "--constraint", str(LISTS / "train.txt"))
        lock("launcher", Path(folder), "pyproject.toml", *extras)
        for file in Path(folder).iterdir():
            shutil.copyfile(file, ROOT / LOCKED / file.name)


if __name__ == "__main__":
    main()
