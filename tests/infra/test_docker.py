"""infra/docker: linted, at the tested versions, not root; the workflow builds each target."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from metaflow.metaflow_environment import MetaflowEnvironment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it there

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "infra" / "docker" / "Dockerfile"
REQUIREMENTS = DOCKERFILE.parent / "requirements"
TEXT = DOCKERFILE.read_text()
TARGETS = ("train", "launcher")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pinned(file: str) -> dict[str, str]:
    """Return package -> version of a list of requirements."""
    versions_pinned: dict[str, str] = {}
    for line in (REQUIREMENTS / file).read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = re.split("==|>=", line)
            versions_pinned[canonicalize_name(name)] = version
    return versions_pinned


def requirements_of(*extras: str) -> list[Requirement]:
    """Return the requirements of the project and these extras in pyproject.toml."""
    lines = [*PROJECT["dependencies"]]
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


def stages() -> dict[str, str]:
    """Return name -> instructions of each stage."""
    parts = re.split(r"^FROM (\S+) AS (\w+)$", TEXT, flags=re.MULTILINE)
    return {parts[index + 1]: parts[index + 2] for index in range(1, len(parts), 3)}


def test_dockerfiles_pass_hadolint() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "hadolint"), str(DOCKERFILE)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_images_have_the_versions_listed_as_tested() -> None:
    versions = pinned("train.txt")
    rows = re.findall(
        r"^\| ([\w-]+) \| `[^`]+` \| ([\d.]+) \|", (ROOT / "docs" / "pins.md").read_text(), re.M
    )
    assert len(rows) >= 10
    for name, tested in rows:
        assert versions[canonicalize_name(name)] == tested, name


@pytest.mark.parametrize("datastore", ["s3", "gs", "azure"])
def test_pods_install_nothing_at_start(datastore: str) -> None:
    """Metaflow then skips its installation, so its packages must exist in the image."""
    assert re.search(r"METAFLOW_SKIP_INSTALL_DEPENDENCIES=1\b", stages()["nodes"])
    command = MetaflowEnvironment(None)._get_install_dependencies_cmd(datastore)
    (packages,) = re.findall(r"pip install (.*?); fi", command)
    named = {canonicalize_name(word) for word in packages.split() if not word.startswith("-")}
    assert "requests" in named  # the pattern has found what it should
    assert named <= {*pinned(f"{datastore}.txt"), *pinned("train.txt")}
    assert '"/requirements/${DATASTORE}.txt"' in stages()["train"]


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_does_not_run_as_root(target: str) -> None:
    users = re.findall(r"^USER (\S+)$", stages()[target], re.MULTILINE)
    assert users[-1:] == ["1000:1000"]


def test_every_base_image_has_a_version_and_a_digest() -> None:
    named = re.findall(r"^FROM (\S+) AS", TEXT, re.MULTILINE)
    stage_names = stages().keys()
    for image in [*named, TEXT.partition("syntax=")[2].split()[0]]:
        assert image in stage_names or re.search(r":\d+\.\d+[\w.-]*@sha256:[0-9a-f]{64}$", image), image
    (python,) = set(re.findall(r"(?:uv venv --python |FROM python:)(\d+\.\d+)", TEXT))
    assert f"tested on Python {python}" in (ROOT / "docs" / "pins.md").read_text()


def test_the_launcher_image_copies_the_whole_project() -> None:
    ignored = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().splitlines()
    let_through = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    copied = {
        word
        for line in re.findall(r"^COPY (.*)$", stages()["launcher"], re.MULTILINE)
        for word in line.split()[:-1]
    }
    for path in copied:
        assert (ROOT / path).exists(), path
        assert any(path == allowed or path.startswith(f"{allowed}/") for allowed in let_through), path
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert {pattern.rstrip("*") for pattern in packages["find"]["include"]} <= copied


@pytest.mark.parametrize(("name", "option"), [("checklist", "--profile"), ("finetune", "--model")])
def test_a_flow_is_launched_without_torch(name: str, option: str) -> None:
    """The image of the launcher has no torch."""
    flow = ROOT / "flows" / f"{name}_flow.py"
    code = (
        "import runpy, sys\n"
        "for name in 'torch torchtune torchao transformers peft accelerate deepspeed'.split():\n"
        "    sys.modules[name] = None\n"
        f"sys.argv = [{str(flow)!r}, 'run', '--help']\n"
        f"runpy.run_path({str(flow)!r}, run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert option in done.stdout


# -- the workflow ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / "images.yml").read_text())
    return loaded


def test_the_workflow_builds_every_target(workflow: dict[str, Any]) -> None:
    job = workflow["jobs"]["build"]
    assert set(job["strategy"]["matrix"]["target"]) == set(TARGETS) <= stages().keys()
    build = job["steps"][-1]["with"]
    assert (ROOT / build["file"]) == DOCKERFILE
    assert build["target"] == "${{ matrix.target }}"


def test_the_workflow_names_every_image_and_pushes_none_of_a_pull_request(
    workflow: dict[str, Any], tmp_path: Path
) -> None:
    steps = workflow["jobs"]["build"]["steps"]
    only_tags = "startsWith(github.ref, 'refs/tags/v')"
    (name,) = [step for step in steps if step.get("id") == "image"]
    script = name["run"].replace("${{ matrix.target }}", "train")
    output = tmp_path / "output"
    for tag in ("v0.1.0", "0" * 40):
        variables = {"TAG": tag, "GITHUB_REPOSITORY_OWNER": "Some-Owner", "GITHUB_OUTPUT": str(output)}
        subprocess.run(["bash", "-euc", script], env={**os.environ, **variables}, check=True, timeout=60)
        assert re.fullmatch(r"name=ghcr\.io/[a-z0-9-]+/finetune-train:[\w.-]+\n", output.read_text())
        output.unlink()
    assert name["env"]["TAG"] == f"${{{{ {only_tags} && github.ref_name || github.sha }}}}"
    (login,) = [step for step in steps if "login-action" in step.get("uses", "")]
    assert login["if"] == only_tags
    assert steps[-1]["with"]["push"] == f"${{{{ {only_tags} }}}}"
