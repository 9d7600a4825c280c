"""The GitHub workflows: what is run there is what CONTRIBUTING.md says, by actions that can't change."""

from __future__ import annotations

import re
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
def test_a_workflow_uses_actions_at_a_commit_and_has_a_limit(file: Path) -> None:
    for job in jobs(file).values():
        assert job["timeout-minutes"] <= (240 if file.stem == "nightly" else 90)
        for step in job["steps"]:
            assert "uses" not in step or re.search(r"@[0-9a-f]{40}$", step["uses"]), step


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_a_workflow_may_only_read_unless_a_job_says_more(file: Path) -> None:
    assert yaml.safe_load(file.read_text())["permissions"] == {"contents": "read"}


@pytest.mark.parametrize("name", ["bug", "estimate", "wish"])
def test_an_issues_form_can_be_read_and_a_bugs_wants_what_doctor_says(name: str) -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text())
    assert form["name"]
    assert form["description"]
    asked = {field["id"]: field.get("validations", {}).get("required", False) for field in form["body"]}
    assert len(asked) == len(form["body"])
    assert any(asked.values())
    assert asked.get("doctor", name != "bug"), "bug.yml"


def test_every_change_is_tested_by_the_script_that_runs_the_readmes_command() -> None:
    ci = jobs(ROOT / ".github" / "workflows" / "ci.yml")
    assert ci["fast"]["steps"][-1] == {"run": "bash .ci/run fast"}
    assert ci["slow"]["steps"][-1] == {"run": "bash .ci/run slow ${{ matrix.shard }}"}
    script = (ROOT / ".ci" / "run").read_text()
    (command,) = re.findall(r"^(python3 -m venv .* pytest)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert command in script
    assert '.venv/bin/python -m pytest -m "$slow"' in script


def test_what_no_change_waits_for_is_tested_every_night() -> None:
    assert "slow='slow and not nightly'" in (ROOT / ".ci" / "run").read_text()
    file = ROOT / ".github" / "workflows" / "nightly.yml"
    assert jobs(file)["all"]["steps"][-1] == {"run": "bash .ci/run nightly"}
    assert yaml.safe_load(file.read_text())[True]["schedule"], "YAML reads `on` as true"


def test_a_release_is_tried_from_its_wheel_and_published_without_a_stored_password() -> None:
    file = ROOT / ".github" / "workflows" / "release.yml"
    publish = jobs(file)["publish"]
    assert publish["needs"] == ["build", "run"]
    assert publish["permissions"] == {"contents": "write", "id-token": "write", "attestations": "write"}
    assert "secrets." not in file.read_text()
    assert "finetune run\n" in jobs(file)["run"]["steps"][-1]["run"]
    assert not any("checkout" in step.get("uses", "") for step in jobs(file)["run"]["steps"]), "no source"


def test_every_file_with_slow_tests_is_in_one_shard() -> None:
    shards = jobs(ROOT / ".github" / "workflows" / "ci.yml")["slow"]["strategy"]["matrix"]["shard"]
    places = [ROOT / place for shard in shards for place in shard.split()]
    for file in (ROOT / "tests").rglob("test_*.py"):
        if "mark.slow" in file.read_text():
            assert len([place for place in places if file.is_relative_to(place)]) == 1, file
    assert all(place.exists() for place in places)


@pytest.mark.parametrize("job", ["fast", "slow"])
def test_every_version_of_python_that_the_project_allows_is_tested(job: str) -> None:
    tested = jobs(ROOT / ".github" / "workflows" / "ci.yml")[job]["strategy"]["matrix"]["version"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed = SpecifierSet(project["requires-python"])
    assert tested == [f"3.{minor}" for minor in range(30) if f"3.{minor}" in allowed]
