"""``python -m benchmarks.on_gpu.calls``: time limits, what is repeated, and results of earlier calls."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.gpu_speed.suites import H100, SUITES, suite_of
from benchmarks.on_gpu import calls
from benchmarks.on_gpu.calls import CALLS, Call
from launchers.cluster.processes import is_running

SLEEPING = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


def options_of(folder: Path, **changes: object) -> argparse.Namespace:
    values = {"tiny": False, "nccl": None, "out": folder, "minutes": 1.0, "earlier": None}
    return argparse.Namespace(**{**values, **changes})


def call_of(name: str, *module: str, continues: bool = False) -> Call:
    return Call(name=name, question="", module=module, minutes=1.0, continues=continues)


def test_a_command_and_its_processes_are_ended_at_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "ENDING_S", 8.0)
    (tmp_path / "sleeping.py").write_text(SLEEPING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    row = calls.run(call_of("sleeping", "sleeping"), options_of(tmp_path), minutes=0.0)
    pids = (tmp_path / calls.LOGS / "sleeping.unfinished.txt").read_text().split()
    assert len(pids) == 2
    deadline = time.monotonic() + 60
    while any(is_running(int(pid)) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_running(int(pid)) for pid in pids)
    assert row["status"] != 0


def test_a_later_call_repeats_what_failed_and_what_continues(tmp_path: Path) -> None:
    commands = [
        call_of("done", "timeit", "-n", "1", "pass"),
        call_of("continued", "timeit", "-n", "1", "pass", continues=True),
        call_of("failed", "timeit", "-n", "1", "1 / 0"),
    ]
    for number in (1, 2):
        earlier = tmp_path / "1" if number == 2 else None
        out = tmp_path / str(number)
        assert calls.measure(commands, options_of(out, minutes=2.0, earlier=earlier)) == 1
    rows = json.loads((out / calls.RECORD).read_text())["calls"]
    statuses = [("done", 0), ("continued", 0), ("failed", 1), ("continued", 0), ("failed", 1)]
    assert [(row["name"], row["status"]) for row in rows] == statuses
    assert "loop" in (out / calls.LOGS / "done.txt").read_text()


def test_a_rehearsal_counts_as_no_measurement(tmp_path: Path) -> None:
    commands = [call_of("done", "timeit", "-n", "1", "pass")]
    rehearsed = [dataclasses.replace(each, tiny=()) for each in commands]
    calls.measure(rehearsed, options_of(tmp_path, tiny=True, minutes=2.0))
    calls.measure(commands, options_of(tmp_path, minutes=2.0))
    rows = json.loads((tmp_path / calls.RECORD).read_text())["calls"]
    assert [(row["name"], row["tiny"]) for row in rows] == [("done", True), ("done", False)]


def test_results_of_an_earlier_call_are_copied_where_there_are_none(tmp_path: Path) -> None:
    earlier, out = tmp_path / "earlier", tmp_path / "out"
    for folder, text in ((earlier, "earlier"), (out, "newer")):
        (folder / "varying").mkdir(parents=True)
        (folder / "gpu_speed.json").write_text(text)
    (earlier / "varying" / "on_gpu.json").write_text("earlier")
    calls.measure([], options_of(out, earlier=earlier))
    assert (out / "gpu_speed.json").read_text() == "newer"
    assert (out / "varying" / "on_gpu.json").read_text() == "earlier"


def test_nothing_is_started_without_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert calls.measure([call_of("late", "timeit")], options_of(tmp_path, minutes=0.5)) == 0
    assert capsys.readouterr().out == "late: no time left\n"


def test_the_commands_select_existing_runs_of_all_suites(tmp_path: Path) -> None:
    selected = set()
    for call in CALLS:
        words = call.command(options_of(tmp_path), 1.0)
        if "benchmarks.gpu_speed" not in words:
            continue
        options = dict(pairwise(words))
        name = options.get("--suite", "speed")
        selected.add(name)
        suite = suite_of(name, is_tiny=False, target=H100)
        names = [run.name.replace(",", "").split() for run in suite.runs]
        for option in ("--only", "--profile"):
            assert any(set(options.get(option, "").split()) <= set(each) for each in names)
    assert selected == set(SUITES)
