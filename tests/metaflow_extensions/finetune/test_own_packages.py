"""Foreign packages with names of the project: on the path, or installed over it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from estimator import errors
from metaflow_extensions.finetune import own_packages
from metaflow_extensions.finetune.own_packages import ALL, MARK, ROOT, find_problem

FINETUNE = "from metaflow_extensions.finetune.command import main; main()"


def python(code: str, path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process whose path starts with this folder."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=path,  # python -c would find those of the repository first
        env={**os.environ, "PYTHONPATH": str(path), "METAFLOW_USER": "tester"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with the packages of the project as installed by pip."""
    for name in ALL:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "metaflow_extensions", tmp_path / "metaflow_extensions")
    return tmp_path


def test_packages_of_this_project_are_recognized() -> None:
    assert find_problem() is None
    assert own_packages.EXIT_STATUS == errors.USER_ERROR_STATUS
    assert all(MARK in (ROOT / name / "__init__.py").read_text() for name in ALL)


@pytest.mark.parametrize("file", ["flows/__init__.py", "decorators.py"])
def test_a_foreign_package_that_shadows_one_of_the_project_ends_finetune_in_two_lines(
    tmp_path: Path, file: str
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("")
    done = python(FINETUNE, tmp_path, "gpus")
    assert (done.returncode, done.stdout) == (2, "")
    wrong, _ = done.stderr.splitlines()
    assert wrong.startswith(
        f"`import {file[: file.index('/') if '/' in file else -3]}` finds {tmp_path / file}"
    )


def test_an_overwritten_or_removed_package_of_the_project_is_reported(installed: Path) -> None:
    assert python(FINETUNE, installed, "--version").returncode == 0
    init = installed / "estimator" / "__init__.py"
    init.write_text('__version__ = "0.0.10"\n')
    done = python(FINETUNE, installed, "gpus")
    assert done.returncode == 2
    wrong, advice = done.stderr.splitlines()
    assert wrong.endswith(f"another package named estimator has overwritten {init}.")
    assert advice.startswith("pip uninstall estimator; pip install --force-reinstall")
    init.unlink()
    done = python(FINETUNE, installed, "gpus")
    assert done.returncode == 2
    assert f"{init} is missing" in done.stderr.splitlines()[0]


def test_metaflow_is_importable_with_foreign_packages_and_loads_none_of_the_project(tmp_path: Path) -> None:
    for name in ALL:
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('a stranger')\n")
    done = python("import metaflow; print(metaflow.gpu_profile.__name__)", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "gpu_profile\n", "")
