"""The documentation site: built without warnings, complete, and usable without a network."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.flows.conftest import environment

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "tutorial.md"


def pages(value: object) -> list[str]:
    """All pages of a navigation, in order."""
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return [page for item in items for page in pages(item)]  # type: ignore[attr-defined]


def test_every_document_is_in_the_navigation_once() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert sorted(pages(config["nav"])) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    built = list(site.rglob("*.html"))
    assert len(built) > 30
    for path in built:
        shown = re.findall(r"<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=\"([^\"]*)\"", path.read_text())
        assert shown
        assert [url for url in shown if re.match(r"(https?:)?//", url)] == [], path


def test_links_outside_docs_lead_to_the_repository(site: Path) -> None:
    page = (site / "accuracy" / "index.html").read_text()
    assert re.search(r'href="https://github.com/[^"]+/blob/main/benchmarks/results/estimators.md"', page)
    assert 'href="../../' not in page.replace('href="../assets', "")


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_the_commands_of_the_tutorial_give_the_documented_results(tmp_path: Path) -> None:
    """All commands are run in order in an empty folder."""
    results: dict[str, str] = {}
    for block in re.findall(r"^```bash\n(.*?)^```$", TUTORIAL.read_text(), re.DOTALL | re.MULTILINE):
        for command in block.splitlines():
            scripts = str(Path(sys.executable).parent)
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=tmp_path,
                env=environment(tmp_path) | {"PATH": f"{scripts}:{os.environ['PATH']}"},
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
            assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
            results[command] = done.stdout + done.stderr
    assert sum(text.count("Done!") for text in results.values()) >= 2
    counts = [
        re.findall(r"held-out answers right: \d+ of \d+ before, (\d+) of (\d+) after", text)
        for text in results.values()
    ]
    right = [(int(counted[-1][0]), int(counted[-1][1])) for counted in counts if counted]
    assert [of for _, of in right] == [150, 51]
    assert all(count > 0.9 * of for count, of in right), right
    assert any("held-out loss" in text for text in results.values())
    assert len((tmp_path / "train.html").read_text()) > 100_000
    (first, *_) = (tmp_path / "finetuned").iterdir()
    assert (first / "model" / "README.md").is_file()
    assert len((tmp_path / "reviews.jsonl").read_text().splitlines()) == 1024


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_all_cells_of_the_notebook_run(tmp_path: Path) -> None:
    cells = json.loads((ROOT / "examples" / "plan_run_read.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    done = run_python(tmp_path, code)
    assert done.returncode == 0, done.stdout + done.stderr
    for expected_text in ("Plan: llama-8b, lora", "successful FinetuneFlow/", "held-out loss: "):
        assert expected_text in done.stdout
    assert '{"area":"delivery","product":"laptop","urgent":true}' in done.stdout


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_all_snippets_of_the_python_page_run_in_order(tmp_path: Path) -> None:
    """The last snippet deploys a flow and stops where it needs a cluster."""
    page = (ROOT / "docs" / "python.md").read_text()
    *snippets, deploy = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "my.yaml").write_text("model: tiny-llama\n")
    done = run_python(tmp_path, "\n".join(snippets))
    assert done.returncode == 0, done.stdout + done.stderr
    for expected_text in (
        "Plan: llama-8b, lora",
        "successful FinetuneFlow/",
        "held-out loss: ",
        "lora torchtune 4",
    ):
        assert expected_text in done.stdout
    assert "There is no kubeconfig at" in run_python(tmp_path, deploy).stderr


def run_python(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    (folder / "cells.py").write_text(code)
    return subprocess.run(
        [sys.executable, "cells.py"],
        cwd=folder,
        env=environment(folder) | {"KUBECONFIG": str(folder / "none")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
