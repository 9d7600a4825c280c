"""The DCGM diagnostic, with a program that prints recorded output of dcgmi."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from checklist.checks.gpu.dcgm_probe import diagnose, read
from checklist.measurements import Diagnosed, record
from checklist.probing.context import Context
from launchers.cluster.processes import is_running
from tests.lab.control_plane import wait_for

SAMPLES = Path(__file__).with_name("samples")
FIRST, SECOND = "GPU-927d7444-b45a-7c49-8402-5e686e46a026", "GPU-f5046fa5-3db4-45e8-8703-1a2b3c4d5e6f"
IDS = {0: FIRST, 1: SECOND}
BLANK = Diagnosed(node=0, level=2)
SCRIPT = """#!/bin/sh
echo "$@" >> {place}/calls
if [ "$1" = discovery ]; then cat {samples}/dcgmi_discovery.txt; exit; fi
{then}
"""

ENGINE_AWAY = """#!/bin/sh
echo "$@" >> {place}/calls
echo "Error: unable to establish a connection to the specified host: localhost" >&2
echo "Error: Unable to connect to host engine. Host engine may not be running." >&2
exit 255  # {samples}{then}
"""


def run_dcgm(
    context: Context,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    gpus: tuple[str, ...] = (FIRST, SECOND),
    **reported: Any,
) -> tuple[Diagnosed, list[str]]:
    """Return the parsed result of such a program, and its calls."""
    program = context.directory / "bin" / "dcgmi"
    program.parent.mkdir()
    program.write_text(SCRIPT.format(place=context.directory, samples=SAMPLES, then=script))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    answer = record(Diagnosed, diagnose(context, gpus, **{"level": 2, "limit_s": 30, **reported}))
    return answer, (context.directory / "calls").read_text().splitlines()


def test_the_output_of_dcgm_4_is_read_with_the_severity_of_each_error() -> None:
    reported = read(BLANK, f"WARNING: a banner\n{(SAMPLES / 'dcgmi_diag_4.json').read_text()}", IDS)
    assert (reported.version, reported.error) == ("4.2.3", None)
    assert (reported.passed, reported.left_out) == (("pcie",), ("nvlink",))
    faults = [(fault.test, fault.failed, fault.gpu, fault.severities) for fault in reported.faults]
    assert faults == [
        ("software", True, FIRST, (5,)),
        ("software", True, SECOND, (5,)),
        ("memory", True, SECOND, (2,)),
    ]
    assert reported.faults[2].text.startswith("GPU 1 had uncorrectable memory errors")


def test_the_output_of_dcgm_3_is_read() -> None:
    reported = read(BLANK, (SAMPLES / "dcgmi_diag_3.json").read_text(), IDS)
    assert (reported.version, len(reported.passed), reported.left_out) == ("3.3.5", 10, ("Pulse Test",))
    (fault,) = reported.faults
    assert (fault.test, fault.failed, fault.gpu, fault.severities) == ("PCIe", True, SECOND, ())
    assert "12.41" in fault.text


@pytest.mark.parametrize(
    ("statuses", "passed"),
    [
        (["PASS", "Pass"], ("x",)),
        (["Pass", "Skip"], ("x",)),
        (["Pass", "Not Run"], ()),
        (["Skip"], ()),
        (["excellent"], ()),
    ],
)
def test_only_explicit_passes_count_as_passed(statuses: list[str], passed: tuple[str, ...]) -> None:
    results = [*({"gpu_ids": str(number), "status": word} for number, word in enumerate(statuses)), None]
    tests = [None, {"name": "x", "results": results}]  # the empty ones are DCGM 3's
    reported = read(BLANK, json.dumps({"DCGM Diagnostic": {"test_categories": [{"tests": tests}]}}), IDS)
    assert (reported.passed, reported.faults, reported.error) == (passed, (), None)
    assert reported.left_out == (() if passed else ("x",))


@pytest.mark.parametrize(
    ("output", "why"),
    [
        ("", "its output cannot be parsed: it said nothing"),
        (
            "Error: Unable to connect to host engine.\n",
            "cannot be parsed: Error: Unable to connect to host engine.",
        ),
        ('{"DCGM Diagnostic": {"test_categories": [{"tests": 1}]}}', "cannot be parsed"),
        ('{"something": "else"}', "cannot be parsed"),
        ('{"DCGM GPU Diagnostic": {"runtime_error": "nvvs was not found"}}', "nvvs was not found"),
        ('{"DCGM Diagnostic": {}}', "it has run no test"),
    ],
)
def test_unreadable_output_of_dcgm_gives_an_error(output: str, why: str) -> None:
    reported = read(BLANK, output, IDS)
    assert why in (reported.error or "")
    assert (reported.passed, reported.faults) == ((), ())


def test_dcgm_runs_on_the_gpus_of_the_job_and_its_exit_status_is_ignored(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"cat {SAMPLES}/dcgmi_diag_4.json; exit 226"
    reported, calls = run_dcgm(context, monkeypatch, script)
    assert calls == ["discovery -l", "diag -r 2 -j"]
    assert len(reported.faults) == 3
    assert reported.seconds > 0


def test_gpus_of_other_jobs_are_not_diagnosed(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    _, calls = run_dcgm(context, monkeypatch, f"cat {SAMPLES}/dcgmi_diag_4.json", (SECOND,))
    assert calls[1] == "diag -r 2 -i 1 -j"


def test_gpus_that_dcgm_does_not_list_are_not_diagnosed(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported, calls = run_dcgm(context, monkeypatch, "exit 1", ("GPU-00000000-0000-0000-0000-000000000000",))
    assert "DCGM does not list the GPUs of this node: other ones alone" in (reported.error or "")
    assert calls == ["discovery -l"]


def test_without_a_host_engine_its_error_message_is_shown(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SCRIPT", ENGINE_AWAY)
    reported, calls = run_dcgm(context, monkeypatch, "")
    assert (reported.installed, calls) == (True, ["discovery -l"])
    assert (reported.error or "").endswith(
        "Unable to connect to host engine. Host engine may not be running."
    )


def test_a_diagnosis_that_exceeds_its_time_limit_is_ended_with_its_child_processes(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("checklist.checks.gpu.dcgm_probe._LEAVE_S", 0.2)
    begin = time.monotonic()
    script = f"trap '' INT; sleep 300 & echo $! > {context.directory}/child; wait; sleep 300"
    reported, _ = run_dcgm(context, monkeypatch, script, limit_s=1.0)
    assert (reported.error or "").startswith("the diagnostic was ended after")
    assert time.monotonic() - begin < 20
    child = int((context.directory / "child").read_text())
    wait_for(lambda: not is_running(child), 5, "what it had started has ended")


def test_the_diagnosis_gets_sigint_first_so_that_the_host_engine_stops_it(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the worker has it
    try:
        script = f"trap 'touch {context.directory}/told; exit' INT; sleep 300 & wait"
        reported, _ = run_dcgm(context, monkeypatch, script, limit_s=1.0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (reported.error or "").startswith("the diagnostic was ended after")
    assert (context.directory / "told").exists()


def test_no_command_is_run_without_dcgm(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(context.directory))
    reported = record(Diagnosed, diagnose(context, [FIRST], 2, 30.0))
    assert (reported.installed, reported.error) == (False, "dcgmi is not on the path")
