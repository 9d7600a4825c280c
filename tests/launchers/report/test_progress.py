"""One line that is renewed on a terminal, lines every so many steps elsewhere."""

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
progress = Progress(total_steps=30, every=10)
for step in range(1, 31):
    progress.step(metrics(step), 2**30)
    if step == 20:
        print("checkpoint after step 20")
progress.close()
print("the end")
"""


@pytest.mark.parametrize(("every", "shown"), [(1, [4, 5, 6, 7, 8, 9, 10, 11, 12]), (5, [4, 5, 10, 12])])
def test_elsewhere_every_so_many_steps_have_a_line_and_so_have_the_first_and_the_last(
    capsys: pytest.CaptureFixture[str], every: int, shown: list[int]
) -> None:
    progress = Progress(total_steps=12, every=every)
    for step in range(4, 13):  # it goes on from a checkpoint
        progress.step(metrics(step), None)
    progress.close()
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split("/")[0].removeprefix("step ")) for line in lines] == shown


def test_on_a_terminal_one_line_is_renewed_and_others_come_above_it() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    status, text = shown_on_terminal([sys.executable, "-c", _TRAINS], environment, ROOT, 60)
    assert status == 0
    assert text.count("step ") >= 30
    below = text.split("\n")
    assert len([line for line in below if line.strip()]) <= 4, below  # the rest was written over
    assert text.index("step 19/30") < text.index("checkpoint after step 20") < text.index("step 21/30")
    assert text.rstrip().endswith("the end")
