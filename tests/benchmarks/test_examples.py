"""examples/: each command of its README works as printed, from any folder, with the shipped data."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from benchmarks.documents import planned
from benchmarks.examples import FILES, FOLDER, README
from flows.commands import flow_commands
from launchers import __main__ as scheduler
from launchers import settings

ROOT = FOLDER.parent


def command_of(path: Path) -> list[str]:
    """Return the arguments of the command in the README row of ``path``."""
    (line,) = (line for line in README.read_text().splitlines() if line.startswith(f"| [{path.name}]"))
    return shlex.split(line.split("`")[-2])


def check_command(check_words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan the command with the machines of the catalog; raises UserError if it is refused."""
    if check_words[0] == "sbatch":
        file = Path(check_words[check_words.index("--settings") + 1])
        values = scheduler._settings(file, ()).model_dump(mode="json")
        backend = "kubernetes"
    else:
        flow, arguments = flow_commands.flow_arguments(check_words[1], check_words[2:])
        monkeypatch.setattr("sys.argv", [flow, *arguments])
        file = flow_commands.config_file(arguments, "settings")
        values = settings.parse_yaml(file.read_text(), file.parent)
        backend = check_words[check_words.index("--with") + 1] if "--with" in check_words else "kubernetes"
    parameters = {"settings": values, "from_catalogue": True}
    if "rejection" in check_words:
        parameters["score"] = ""
    assert planned(parameters, backend).startswith("Plan: ")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_command_of_each_example_works_as_printed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = command_of(path)
    monkeypatch.chdir(ROOT)
    check_command(arguments, monkeypatch)
    monkeypatch.chdir(FOLDER)
    check_command([word.removeprefix("examples/") for word in arguments], monkeypatch)


@pytest.mark.parametrize("name", ["kto.yaml", "grpo.yaml"])
def test_a_copied_example_works_in_another_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in (name, "short_answers.py"):
        shutil.copy(FOLDER / file, tmp_path)
    monkeypatch.chdir(tmp_path)
    check_command([word.removeprefix("examples/") for word in command_of(FOLDER / name)], monkeypatch)


def test_the_readme_lists_exactly_the_files() -> None:
    listed = [line for line in README.read_text().splitlines() if re.match(r"\| \[\w+\.yaml\]", line)]
    assert len(listed) == len(FILES)
