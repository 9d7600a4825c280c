"""One updated line on a terminal, or a line every few steps elsewhere."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from launchers.report.progress import Progress
from tests.launchers.report.test_trackers import metrics
from tests.terminal import shown_on_terminal

ROOT = Path(__file__).parents[3]
_TRAINS = """
from launchers.report.progress import Progress
from tests.launchers.report.test_trackers import metrics
progress = Progress(total_steps=30, interval=10)
for step in range(1, 31):
    progress.step(metrics(step), 2**30)
    if step == 20:
        print("checkpoint after step 20")
progress.close()
print("the end")
"""


@pytest.mark.parametrize(("every", "shown"), [(1, list(range(4, 13))), (5, [4, 5, 10, 12])])
def test_without_a_terminal_the_first_the_last_and_every_nth_step_are_logged(
    capsys: pytest.CaptureFixture[str], every: int, shown: list[int]
) -> None:
    progress = Progress(total_steps=12, interval=every)
    for step in range(4, 13):  # it goes on from a checkpoint
        progress.step(metrics(step), None)
    progress.close()
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split("/")[0].removeprefix("step ")) for line in lines] == shown


@pytest.mark.parametrize(
    ("total", "step_seconds", "fewest", "line_limit"),
    [
        (180, 0.25, 9, 12),  # a tenth of the run
        (40, 0.01, 2, 3),  # at most one line per second
        (200, 30.0, 90, 110),  # at least one line per minute
    ],
)
def test_by_default_a_short_run_logs_about_ten_lines_and_a_long_run_one_line_per_minute(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    total: int,
    step_seconds: float,
    fewest: int,
    line_limit: int,
) -> None:
    now = 1000.0
    monkeypatch.setattr("launchers.report.progress.time.monotonic", lambda: now)
    progress = Progress(total_steps=total, interval="auto")
    for step in range(1, total + 1):
        now += step_seconds
        progress.step(metrics(step), None)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 1/")
    assert lines[-1].startswith(f"step {total}/")
    assert fewest <= len(lines) <= line_limit


def test_by_default_checkpoints_are_logged_at_most_once_per_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("launchers.report.progress.time.monotonic", lambda: now)
    progress = Progress(total_steps=200, interval="auto")
    printed = []
    for minute in (0.1, 0.99, 1.0, 1.5, 2.0):
        now = 1000.0 + 60 * minute
        printed.append(progress.prints_checkpoint())
    assert printed == [False, False, True, False, True]
    assert Progress(total_steps=200, interval=1).prints_checkpoint()


@pytest.mark.parametrize(("columns", "bar"), [(79, False), (80, True)])
def test_on_a_terminal_one_progress_line_is_updated_and_messages_appear_above_it(
    columns: int, bar: bool
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    status, text = shown_on_terminal([sys.executable, "-c", _TRAINS], environment, ROOT, columns)
    assert status == 0
    assert ("\N{BOX DRAWINGS HEAVY HORIZONTAL}" in text) == bar
    assert text.count("step ") >= 30
    below = text.split("\n")
    assert len([line for line in below if line.strip()]) <= 4, below  # the rest was written over
    assert text.index("step 19/30") < text.index("checkpoint after step 20") < text.index("step 21/30")
    assert text.rstrip().endswith("the end")
