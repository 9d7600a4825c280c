"""benchmarks.silences: what it calls a silence, and its page."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from benchmarks import silences
from benchmarks.silences import listen

COMMAND = """#!/bin/sh
echo '2026-11-25 12:00:00.000 [1/start/1 (pid 7)] begins'
sleep 0.2
echo '2026-11-25 12:00:00.200 [1/train/2 (pid 8)] step 1'
sleep 1
printf 'ends'
exit 3
"""


def test_the_longest_silence_is_found_with_the_line_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(COMMAND)
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(python))
    found = listen("sft", ("run",), tmp_path)
    assert (found.status, found.after) == (3, "step 1")
    assert 1 <= found.longest_seconds <= found.seconds


def test_what_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho begins\nexec sleep 60\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(silences, "LIMIT_S", 0.5)
    with pytest.raises(TimeoutError, match="sft has not ended within 0 s; last said: begins"):
        listen("sft", ("run",), tmp_path)
