"""Ctrl-C during the imports of commands and flows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from estimator import interrupts

ROOT = Path(__file__).parents[2]
MAIN = "from metaflow_extensions.finetune.command import main; main()"


@pytest.mark.parametrize(
    ("program", "imported"),
    [
        (("-c", MAIN, "plan", "--model", "llama-8b"), "typer"),
        *(((str(file), "run", "--plan-only"), "metaflow") for file in sorted(ROOT.glob("flows/*_flow.py"))),
    ],
    ids=lambda value: Path(value[0]).name if isinstance(value, tuple) else "",
)
def test_ctrl_c_during_the_imports_prints_no_traceback(
    program: tuple[str, ...], imported: str, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", *program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    started = False
    for line in process.stderr:
        started = started or line.rstrip().endswith("estimator.interrupts")
        if started and f" {imported}." in line:
            break
    process.send_signal(signal.SIGINT)
    _, remaining = process.communicate(timeout=60)
    assert "KeyboardInterrupt" not in remaining
    assert process.returncode == -signal.SIGINT


def test_an_ignored_interrupt_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        interrupts.end_silently()
        interrupts.raise_again()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_default_handler_returns_after_the_imports() -> None:
    interrupts.end_silently()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    interrupts.raise_again()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
