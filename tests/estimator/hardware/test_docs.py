"""docs/hardware.md: its commands run, its tables are read, its messages are those of the code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from estimator import hardware
from estimator.cli.gpus import gpus
from estimator.errors import UserError
from estimator.hardware.cluster import inventory, nodes
from estimator.hardware.prices import refresh as refreshing

PAGE = Path(__file__).parents[3] / "docs" / "hardware.md"
APP = typer.Typer()
APP.command()(gpus)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines()]


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the file that the page names; nobody is asked over a network."""
    (tmp_path / "my-prices.csv").write_text(blocks("csv")[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FINETUNE_HARDWARE", raising=False)
    monkeypatch.setattr(refreshing, "PROVIDERS", ())
    monkeypatch.setattr(
        inventory, "fetch", lambda context, _: inventory.ClusterState(context=context or "current", nodes=())
    )
    hardware.clear_cache()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_page_runs(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(command.partition(" >")[0])
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    assert words[:2] == ["finetune", "gpus"]
    result = CliRunner().invoke(APP, words[2:])
    assert result.exit_code == 0, result.exception
    assert result.stdout


@pytest.mark.parametrize("text", blocks("csv"))
def test_every_csv_table_of_the_documentation_is_valid(text: str, tmp_path: Path) -> None:
    file = tmp_path / "example.csv"
    file.write_text(text)
    assert hardware.catalogue(file) != hardware.catalogue()


def test_the_documented_error_message_is_that_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("my.csv").write_text("gpu,vram_GB\nH100 SXM,80000\n")
    with pytest.raises(UserError) as caught:
        hardware.catalogue(Path("my.csv"))
    assert f"{caught.value}\n" in blocks("text")
    assert f"{nodes.RULE}\n" in blocks("text")
