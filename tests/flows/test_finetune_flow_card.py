"""The card of a run, and settings from which the run can be repeated."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.browser import charts, first_screen, needs_browser, rows_with, widest, words
from tests.flows.conftest import FLOW, STEPS, FlowRun

pytestmark = pytest.mark.slow

MEASURED_GREEN, UPPER_BOUND_RED = (0x54, 0xA2, 0x4B), (0xE4, 0x57, 0x56)


@pytest.mark.nightly
@needs_browser
def test_a_run_has_a_card_and_can_be_repeated_from_its_settings(
    finished_run: Callable[[str, str, int], FlowRun], flow: Callable[..., FlowRun], tmp_path: Path
) -> None:
    run = finished_run("torchtune", "qlora", 1)
    first, run_id = run.artifacts(), run.run_id
    task = run.output.split(f"[{run_id}/train/")[1].split(" ")[0]
    page = tmp_path / "card.html"
    command = [sys.executable, str(FLOW), "card", "get", f"{run_id}/train/{task}", str(page)]
    command_result = subprocess.run(
        [*command, "--id", "finetune"],
        cwd=run.home,  # where Metaflow looks for local cards
        env=run.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert command_result.returncode == 0, command_result.stdout
    text = words(page)
    assert "tiny-llama \u00b7 qlora \u00b7 torchtune \u00b7 1 node x 1 CPU process" in text
    assert "Finished in" in text
    assert f"step {STEPS} of {STEPS}" in text
    assert charts(page) >= 3
    screen = first_screen(page)  # predicted next to measured values, before any scrolling
    assert widest(screen, MEASURED_GREEN) > 100
    assert rows_with(screen, UPPER_BOUND_RED) > 50

    used = Path(first["model_path"]).parent / "settings.yaml"
    repeated_run = flow("--config", "settings", str(used), "run")
    assert repeated_run.returncode == 0, repeated_run.output
    second = repeated_run.artifacts()
    assert second["used_settings"] == first["used_settings"]
    assert [row["loss"] for row in second["metrics"]] == [row["loss"] for row in first["metrics"]]
