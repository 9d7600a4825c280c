"""The card of a running and of a finished step in a real browser without a network."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.browser import charts, needs_browser, words
from tests.decorators.conftest import Home, wait_until

MEASURED_GREEN, UPPER_BOUND_RED = (0x54, 0xA2, 0x4B), (0xE4, 0x57, 0x56)

pytestmark = [needs_browser, pytest.mark.slow]


def _get(home: Home, name: str) -> Path | None:
    if not list(home.path.glob(".metaflow/mf.cards/**/steps/train/**/*.html")):
        return None  # without a Python that looks for it
    page = home.path / name
    home.run("profiled.py", "card", "get", "train", name)
    return page if page.exists() and page.stat().st_size else None


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The page of the card while the step runs, and after it has ended."""
    home = Home(tmp_path_factory.mktemp("cards"))
    (home.path / ".metaflow").mkdir()
    options = ("--model", "llama-8b", "--steps", "120", "--of-steps", "400", "--until", "running.html")
    flow = home.start("profiled.py", "run", *options)
    try:
        running = wait_until(lambda: _get(home, "running.html"), 60)
        assert flow.wait(120) == 0, (home.path / "output.txt").read_text()
    finally:
        flow.kill()
        flow.wait()
    finished = _get(home, "finished.html")
    assert finished is not None
    return running, finished


def test_the_card_of_a_running_step_shows_progress_and_predicted_next_to_measured_values(
    pages: tuple[Path, Path],
) -> None:
    text = words(pages[0])
    assert "llama-8b · full · torchtune · 1 node x 8 A100-80GB" in text
    for expected_texts in ("Running for", "step 120 of 400 · loss 1.2", "ETA 9:"):
        assert expected_texts in text
    assert re.search(r"reserved by torch 33.0 GiB, at most 39.0 GiB 31.9 GiB", text)
    assert re.search(r"tokens/s 24,000 16,391", text)
    assert charts(pages[1]) == 9
