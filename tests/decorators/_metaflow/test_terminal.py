"""The output of a run on a terminal."""

from __future__ import annotations

import sys

from tests.decorators.conftest import FLOWS, Home
from tests.terminal import shown_on_terminal


def test_on_a_terminal_training_steps_update_one_line_and_other_output_is_unchanged(home: Home) -> None:
    command = [sys.executable, str(FLOWS / "terminal.py"), "run"]
    status, text = shown_on_terminal(command, home.environment(), home.path, 60)
    assert status == 0, text
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    steps = [line for line in lines if "step " in line]
    assert len(steps) <= 4, "the rest was written over"
    assert "eta 0:01  0.5 GiB" in steps[-1], "without what Metaflow puts before a line"
    [checkpoint] = [line for line in lines if "checkpoint after step 20" in line]
    assert "/start/1 (pid " in checkpoint
    assert text.index("step 20/30") < text.index("checkpoint after") < text.index("step 21/30")
    assert text.index("step 30/30") < text.index("Done!")
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is there again"
