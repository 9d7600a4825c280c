"""The GitHub workflows run the commands of CONTRIBUTING.md with pinned actions."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it there

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def jobs(file: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(file.read_text())["jobs"])


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflows_pin_actions_to_commits_and_have_time_limits(file: Path) -> None:
    for job in jobs(file).values():
        assert job["timeout-minutes"] <= (240 if file.stem == "nightly" else 90)
        for step in job["steps"]:
            assert "uses" not in step or re.search(r"@[0-9a-f]{40}$", step["uses"]), step


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflows_have_read_permission_only_unless_a_job_adds_more(file: Path) -> None:
    assert yaml.safe_load(file.read_text())["permissions"] == {"contents": "read"}


def last_command(file: str, job: str) -> str:
    return str(jobs(ROOT / ".github" / "workflows" / f"{file}.yml")[job]["steps"][-1]["run"])


def test_the_workflow_for_changes_runs_the_test_command_of_the_readme() -> None:
    assert last_command("ci", "lint") == "bash .ci/run lint"
    assert last_command("ci", "test") == last_command("ci", "oldest-and-newest") == "bash .ci/run test"
    assert last_command("ci", "system") == "bash .ci/run system ${{ matrix.shard }}"
    script = (ROOT / ".ci" / "run").read_text()
    (command,) = re.findall(r"^(python3 -m venv .* pytest)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert command in script
    assert '.venv/bin/python -m pytest -m "$slow"' in script


def test_an_unknown_ci_part_is_refused_before_anything_is_installed() -> None:
    command = ["bash", str(ROOT / ".ci" / "run"), "sytem"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "system" in done.stderr
    assert done.stdout == ""


def test_workflows_run_existing_parts_of_the_ci_script() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    parts = {
        part for line in re.findall(r"^([a-z| ]+)\)", script, re.MULTILINE) for part in line.split(" | ")
    }
    for file in WORKFLOWS:
        for job in jobs(file).values():
            commands = [step["run"].split() for step in job["steps"] if ".ci/run" in step.get("run", "")]
            assert {arguments[2] for arguments in commands if len(arguments) > 2} <= parts, file


def test_a_release_is_tried_from_its_wheel_and_published_without_a_stored_password() -> None:
    file = ROOT / ".github" / "workflows" / "release.yml"
    publish = jobs(file)["publish"]
    assert publish["needs"] == ["build", "run"]
    assert publish["permissions"] == {"contents": "write", "id-token": "write", "attestations": "write"}
    assert "secrets." not in file.read_text()
    assert "finetune run\n" in jobs(file)["run"]["steps"][-1]["run"]
    assert not any("checkout" in step.get("uses", "") for step in jobs(file)["run"]["steps"]), "no source"


def test_every_file_with_slow_tests_is_in_one_shard() -> None:
    shards = jobs(ROOT / ".github" / "workflows" / "ci.yml")["system"]["strategy"]["matrix"]["shard"]
    places = [ROOT / place for shard in shards for place in shard.split()]
    for file in (ROOT / "tests").rglob("test_*.py"):
        if "mark.slow" in file.read_text():
            assert len([place for place in places if file.is_relative_to(place)]) == 1, file
    assert all(place.exists() for place in places)


def versions(file: str, job: str) -> list[str]:
    version_lists = jobs(ROOT / ".github" / "workflows" / f"{file}.yml")[job]["strategy"]["matrix"]["version"]
    return [str(each) for each in version_lists]


def test_changes_are_tested_on_the_oldest_and_newest_python_and_nightly_on_all() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    specifier = SpecifierSet(project["requires-python"])
    allowed = [f"3.{minor}" for minor in range(30) if f"3.{minor}" in specifier]
    assert versions("ci", "oldest-and-newest") == [allowed[0], allowed[-1]]
    # The job `all` has the one that changes are tested with
    assert sorted([*versions("nightly", "pythons"), *versions("ci", "system")]) == sorted(allowed)
