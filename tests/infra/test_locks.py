"""Lock files match pyproject.toml and the lists, are complete, and name no package index."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.infra.test_docker import REQUIREMENTS, ROOT, TEXT, requirements_of

LOCKS = sorted((REQUIREMENTS / "locked").glob("*.txt"))
RENEW = "python .ci/locks.py"
EXTRAS = {
    "train": ("train", "rl", "diffusion", "eval", "liger", "kubernetes", "aws", "trackers"),
    "launcher": ("kubernetes", "aws"),
}
# What runs of the packages that an image's Python can use
HERE = {"python_version": "3.11", "python_full_version": "3.11.14", "sys_platform": "linux"}
HERE |= {"platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix", "extra": ""}


def locked(name: str) -> dict[str, str]:
    """Return package -> version of a lock file."""
    text = (REQUIREMENTS / "locked" / f"{name}.txt").read_text()
    return {
        canonicalize_name(versions_locked): version
        for versions_locked, version in re.findall(r"(?m)^(\S+)==(\S+) \\$", text)
    }


def listed(name: str) -> list[Requirement]:
    """Return the requirements of a list."""
    lines = (REQUIREMENTS / f"{name}.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and line[0] != "#"]


def outside(name: str, requirements: list[Requirement]) -> list[str]:
    versions = locked(name)
    return [
        f"{requirement} ({versions.get(canonicalize_name(requirement.name), 'missing')})"
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate(HERE)
        if versions.get(canonicalize_name(requirement.name), "") not in requirement.specifier
    ]


def test_every_requirements_list_has_a_lock() -> None:
    lists = {file.name for file in REQUIREMENTS.glob("*.txt")}
    assert {file.name for file in LOCKS} == lists | {"launcher.txt"}


@pytest.mark.parametrize("file", LOCKS, ids=lambda file: file.stem)
def test_every_locked_package_has_one_version_with_hashes(file: Path) -> None:
    text = file.read_text()
    assert RENEW in text
    entry = re.compile(r"[a-z0-9][a-z0-9._-]*==[\w.!]+(?: \\\n    --hash=sha256:[0-9a-f]{64})+\n")
    requirements_text = re.sub(r"(?m)^#.*\n", "", text)
    assert entry.sub("", requirements_text) == "", "options, addresses, or a package without hashes"
    names = re.findall(r"(?m)^([a-z0-9][^=\s]*)==", requirements_text)
    assert len(names) == len(set(names)) == len(locked(file.stem)) > 3


@pytest.mark.parametrize("name", [file.stem for file in LOCKS if file.stem != "launcher"])
def test_a_lock_has_the_versions_of_its_list(name: str) -> None:
    assert outside(name, listed(name)) == [], f"renew it: {RENEW}"


@pytest.mark.parametrize("name", EXTRAS)
def test_locks_respect_the_projects_version_bounds(name: str) -> None:
    assert outside(name, requirements_of(*EXTRAS[name])) == [], f"renew it: {RENEW}"


@pytest.mark.parametrize("pair", [*itertools.combinations(("train", "s3", "gs", "azure"), 2)], ids="-".join)
def test_locks_installed_together_agree(pair: tuple[str, str]) -> None:
    one, other = map(locked, pair)
    assert {
        name: (one[name], other[name]) for name in one.keys() & other.keys() if one[name] != other[name]
    } == {}


def test_images_install_only_locked_packages() -> None:
    installs = re.findall(r"(?:uv )?pip install ((?:[^&\n]|\\\n)*)", TEXT)
    assert len(installs) == 3
    for arguments in installs:
        assert "--require-hashes" in arguments or "--no-deps --editable ." in arguments
    assert set(re.findall(r"source=infra/docker/requirements(\S*),target=/requirements", TEXT)) == {"/locked"}
    assert "COPY infra/docker/requirements/locked/launcher.txt requirements.txt\n" in TEXT


def test_without_uv_the_locks_are_unchanged_and_one_line_names_it() -> None:
    before = {file: file.stat().st_mtime_ns for file in LOCKS}
    command = [sys.executable, str(ROOT / ".ci" / "locks.py")]
    done = subprocess.run(command, env={"PATH": "/nowhere"}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "uv is not installed: pip install uv\n")
    assert {file: file.stat().st_mtime_ns for file in LOCKS} == before


def test_every_lock_is_audited_each_week() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "audit.yml").read_text())
    assert workflow[True]["schedule"], "YAML reads `on` as true"
    job = workflow["jobs"]["locks"]
    assert job["strategy"]["matrix"]["lock"] == [file.stem for file in LOCKS]
    assert "infra/docker/requirements/locked/${{ matrix.lock }}.txt" in job["steps"][-1]["run"]
