"""Built and installed artifacts: extras, wheel, source distribution, and a run from the wheel alone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from metaflow_extensions.finetune.own_packages import ALL
from tests.flows.conftest import environment
from tests.metaflow_extensions.finetune.test_lazily import documented

ROOT = Path(__file__).parents[1]
if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
MADE_OF = {
    "train": ("torchtune", "deepspeed", "fsdp2"),
    "dev": (
        *("train", "rl", "diffusion", "eval", "kubernetes", "aws", "prices", "trackers", "metrics", "docs"),
        "test",
    ),
}
NOT_SHIPPED = {".git", ".venv", ".venv-vllm", "build", "dist", "finetuned", ".metaflow"}
BUILD = """
import sys
from setuptools import build_meta
place = sys.argv[1]  # setuptools puts its own words there
print(build_meta.build_wheel(place), build_meta.build_sdist(place))
"""


def by_name(extra: str) -> dict[str, list[Requirement]]:
    requirements: dict[str, list[Requirement]] = {}
    for requirement in map(Requirement, EXTRAS[extra]):
        requirements.setdefault(requirement.name, []).append(requirement)
    return requirements


def test_no_extra_requires_the_package_itself() -> None:
    """Metaflow would read it as an unmet dependency between extensions and fail to import."""
    requirement_list = [requirement for extra in EXTRAS for requirement in by_name(extra)]
    assert PROJECT["name"] not in requirement_list


@pytest.mark.parametrize("extra", MADE_OF)
def test_a_combined_extra_has_the_bounds_of_its_parts(extra: str) -> None:
    requirements_of_extra = by_name(extra)
    for part in MADE_OF[extra]:
        for name, requirements_of_part in by_name(part).items():
            (requirement,) = requirements_of_extra[name]
            assert {str(each.marker) for each in requirements_of_part} == {str(requirement.marker)}, name
            bounds = re.findall(
                r"\d+(?:\.\d+)*", f"{requirement.specifier} {[str(each) for each in requirements_of_part]}"
            )
            for version in {*map(Version, bounds), *(Version(f"{bound}.1") for bound in bounds)}:
                if requirement.specifier.contains(version):
                    assert all(each.specifier.contains(version) for each in requirements_of_part), (
                        name,
                        version,
                    )


def pins() -> dict[str, str]:
    """Return tool -> version in the lock file of tools."""
    text = (ROOT / "requirements" / "dev.lock").read_text()
    return dict(re.findall(r"(?m)^([\w-]+)==([\w.]+)", text))


def test_tools_are_pinned_to_versions_that_the_extra_allows_and_pre_commit_uses() -> None:
    allowed = by_name("dev")
    for tool, version in pins().items():
        (requirement,) = allowed[tool]
        assert requirement.specifier.contains(version), requirement
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    revisions = {repo["repo"].rpartition("/")[2]: repo["rev"] for repo in hooks if "rev" in repo}
    assert revisions == {"ruff-pre-commit": f"v{pins()['ruff']}"}
    assert {"mypy", "pre-commit", "pytest", "ruff"} <= set(pins())


def test_each_supported_python_version_has_a_classifier() -> None:
    prefix = "Programming Language :: Python :: 3."
    named = [text.removeprefix(prefix) for text in PROJECT["classifiers"] if text.startswith(prefix)]
    assert f">=3.{named[0]},<3.{int(named[-1]) + 1}" == PROJECT["requires-python"]


def test_a_tag_of_another_version_is_refused() -> None:
    def version(tag: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / ".ci" / "version.py"), tag]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    release = PROJECT["version"]
    assert version("").stdout == version(f"v{release}").stdout == f"version={release}\n"
    other = version("v99.0.0")
    assert other.returncode == 1
    assert (
        other.stderr
        == f"The tag is v99.0.0, and pyproject.toml has version {release}: it must be v{release}.\n"
    )


@dataclass
class Built:
    """The distributions of the working tree."""

    wheel: Path
    sdist: Path

    @property
    def files(self) -> set[str]:
        with zipfile.ZipFile(self.wheel) as archive:
            return set(archive.namelist())

    @property
    def metadata(self) -> Message:
        (name,) = (name for name in self.files if name.endswith(".dist-info/METADATA"))
        with zipfile.ZipFile(self.wheel) as archive:
            return Parser().parsestr(archive.read(name).decode())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    place = tmp_path_factory.mktemp("built")
    unwanted = shutil.ignore_patterns("*.egg-info", "__pycache__", ".*_cache", ".hypothesis", ".terraform")
    shutil.copytree(
        ROOT,
        place / "source",
        ignore=lambda folder, names: {*unwanted(folder, names), *NOT_SHIPPED.intersection(names)},
    )
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(place)],
        cwd=place / "source",
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    wheel, sdist = done.stdout.split()[-2:]
    return Built(place / wheel, place / sdist)


def packaged(*packages: str) -> Iterator[str]:
    """Return every file of these packages, or of all, in the working tree."""
    for name in packages or (*ALL, "metaflow_extensions"):
        for path in (ROOT / name).rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                yield path.relative_to(ROOT).as_posix()


@pytest.mark.slow
def test_the_wheel_has_exactly_the_files_of_the_packages(built: Built) -> None:
    files = {name for name in built.files if ".dist-info/" not in name}
    assert files == set(packaged())
    assert {f"{name}/py.typed" for name in (*ALL, "metaflow_extensions/finetune")} <= files
    assert built.metadata["License-Expression"] == "Apache-2.0"
    assert len(built.metadata.get_all("Project-URL") or []) == len(PROJECT["urls"])


@pytest.mark.slow
def test_the_source_distribution_has_the_files_of_the_repository(built: Built) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("this is no clone")
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if not archive.getmember(name).isdir()}
    missing = {name for name in listed.stdout.split("\n") if name and (ROOT / name).exists()} - names
    assert missing == set()
    assert {name.partition("/")[0] for name in names - set(listed.stdout.split("\n"))} <= {
        "PKG-INFO",
        "setup.cfg",
        "metaflow_finetune.egg-info",
    }


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel and its dependencies, without this source."""
    place = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True, timeout=60)
    pip = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), "install", "-q"]
    subprocess.run([*pip, "--compile", "--no-deps", "--no-index", str(built.wheel)], check=True, timeout=120)
    # Dependencies from this environment. Its own .pth files, an editable install's among them, are not read
    (packages,) = place.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return place / "bin"


def run(program: Path, home: Path, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    home.mkdir(exist_ok=True)
    (home / ".metaflow").mkdir(exist_ok=True)
    done = subprocess.run(
        [str(program), *arguments],
        cwd=home,
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert str(ROOT / "flows") not in done.stdout + done.stderr
    return done


@pytest.mark.slow
def test_an_installed_wheel_plans_and_packages_only_its_sources(installed: Path, tmp_path: Path) -> None:
    assert list(installed.parent.glob("lib/python*/site-packages/flows/__pycache__/*.pyc")), "pip compiles"
    planned = run(installed / "finetune", tmp_path, "run", "--plan-only")
    assert planned.returncode == 0, planned.stderr
    assert planned.stdout.startswith("Plan: tiny-llama")
    packed = run(installed / "finetune", tmp_path, "flow", "package", "list")
    assert packed.returncode == 0, packed.stderr
    files = packed.stderr.split()
    assert [file for file in files if file.endswith(".pyc")] == []
    for name in packaged("decorators", "estimator", "flows", "launchers", "metaflow_extensions"):
        assert any(file.endswith(name) for file in files), name


@pytest.mark.slow
@pytest.mark.nightly
def test_an_installed_wheel_trains_checks_and_measures_a_users_flow(installed: Path, tmp_path: Path) -> None:
    trained = run(installed / "finetune", tmp_path, "run", "--max-steps=4", timeout=400)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert list(tmp_path.glob("finetuned/*/model/model.safetensors"))
    checked = run(installed / "finetune", tmp_path, "check", "--only", "gemm", "--nodes=1", timeout=300)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    (tmp_path / "my_flow.py").write_text(documented())
    measured = run(installed / "python", tmp_path, "my_flow.py", "run", timeout=120)
    assert measured.returncode == 0, measured.stdout + measured.stderr
