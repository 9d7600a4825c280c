"""Runner and parser of NVIDIA's diagnostic ``dcgmi diag``, with a time limit, if DCGM is installed.

Levels in its documentation (DCGM, "dcgmi diag"): 1 checks the deployment in seconds; 2 also tests PCIe,
NVLink and memory in about two minutes; 3 adds stress and takes about a quarter of an hour; 4 takes longer. It
requires idle GPUs. Its JSON results have two formats, up to DCGM 3 and from DCGM 4 on.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from checklist.measurements import Diagnosed, DiagnosticFault, to_dict
from checklist.probing.context import Context

_PROGRAM = "dcgmi"
_ROOTS = ("DCGM Diagnostic", "DCGM GPU Diagnostic")  # root keys of the document: since DCGM 4, and before
# "| 0      | Name: NVIDIA H100 80GB HBM3 |", then two lines later "|        | Device UUID: GPU-927d7444-...
# |"
_ID = re.compile(r"^\|\s*(\d+)\s*\|")
_UUID = re.compile(r"UUID:\s*(GPU-[0-9a-fA-F-]+)")
_DISCOVERY_S = 30.0
_LEAVE_S = 5.0  # time for dcgmi to stop the diagnostic in the host engine
_MAX_FAULTS, _MOST_LETTERS = 64, 300
# It must end with this process and react to an interrupt, which this process leaves to its node agent
_WITH_PARENT = (
    "import os, signal, sys; from launchers.cluster.processes import die_with_parent; "
    "die_with_parent(int(sys.argv[1])); signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)


@dataclass(frozen=True, slots=True)
class _Done:
    """Output of a program; ``ended``: it exceeded its time limit."""

    output: str
    ended: bool = False


def diagnose(context: Context, gpus: Sequence[str], level: int, limit_s: float) -> dict[str, Any]:
    """Run the diagnostic on idle GPUs (UUIDs) of this node, from one rank per node; return a Diagnosed."""
    start = time.monotonic()
    reported = _diagnose(Diagnosed(node=context.node, level=level), gpus, start + limit_s)
    return to_dict(replace(reported, seconds=time.monotonic() - start))


def _diagnose(blank: Diagnosed, gpus: Sequence[str], until: float) -> Diagnosed:
    if shutil.which(_PROGRAM) is None:
        return replace(blank, installed=False, error=f"{_PROGRAM} is not on the path")
    reply = _run(["discovery", "-l"], min(_DISCOVERY_S, until - time.monotonic()))
    ids = ids_of(reply.output)
    selected = [number for number, uuid in ids.items() if uuid in gpus]
    if len(selected) < len(gpus) or not selected:
        reason = "no answer in time" if reply.ended else "other ones alone" if ids else _last(reply.output)
        return replace(blank, error=f"DCGM does not list the GPUs of this node: {reason}")
    # Without a selection it loads all GPUs, including those of other jobs
    choice = [] if len(selected) == len(ids) else ["-i", ",".join(map(str, selected))]
    left_s = until - time.monotonic()
    done = _run(["diag", "-r", str(blank.level), *choice, "-j"], left_s)
    if done.ended:
        return replace(blank, error=f"the diagnostic was ended after {left_s:.0f} s")
    return read(blank, done.output, ids)


def ids_of(listing: str) -> dict[int, str]:
    """Parse DCGM's GPU numbers and their UUIDs from ``dcgmi discovery -l``."""
    ids: dict[int, str] = {}
    number = None
    for line in listing.splitlines():
        if match := _ID.match(line):
            number = int(match[1])
        if number is not None and (match := _UUID.search(line)):
            ids[number] = match[1]
    return ids


def read(blank: Diagnosed, output: str, ids: Mapping[int, str]) -> Diagnosed:
    """Parse the results printed by ``dcgmi diag -j``, ignoring surrounding text."""
    try:
        document = json.loads(output[output.find("{") : output.rfind("}") + 1])
        root = next(document[name] for name in _ROOTS if name in document)
        categories = [category for category in root.get("test_categories", ()) if category]
        tests = [test for category in categories for test in category["tests"] if test]
        # 3.x stores its version inside the results, 4.x next to them
        version = root.get("version") or document.get("metadata", {}).get("version")
        read_tests = [(str(test["name"]), [result for result in test["results"] if result]) for test in tests]
        faults = [fault for name, results in read_tests for fault in _faults(name, results, ids)]
        failed = {fault.test for fault in faults}
        passed = [name for name, results in read_tests if name not in failed and _passed(results)]
    except (ValueError, TypeError, KeyError, AttributeError, StopIteration):
        return replace(blank, error=f"its output cannot be parsed: {_last(output)}")
    problem = root.get("runtime_error") or (None if tests else "it has run no test")
    return replace(
        blank,
        version=None if version is None else str(version),
        passed=tuple(passed),
        left_out=tuple(name for name, _ in read_tests if name not in failed and name not in passed),
        faults=tuple(faults[:_MAX_FAULTS]),
        error=None if problem is None else _short(str(problem)),
    )


def _passed(results: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether a test passed everywhere it was not skipped."""
    statuses = {str(result["status"]).lower() for result in results}
    return "pass" in statuses and statuses <= {"pass", "skip", "skipped"}


def _faults(test: str, results: Iterable[Mapping[str, Any]], ids: Mapping[int, str]) -> list[DiagnosticFault]:
    faults = []
    for result in results:
        status = str(result["status"]).lower()
        if status not in ("fail", "warn"):
            continue
        warnings = [_warning(item) for item in _as_list(result.get("warnings"))]
        severities = [severity for _, severity in warnings if severity is not None]
        faults.append(
            DiagnosticFault(
                test=test,
                failed=status == "fail",
                gpu=_gpu(result, ids),
                text=_short("; ".join(text for text, _ in warnings)),
                severities=tuple(dict.fromkeys(severities)),
            )
        )
    return faults


def _warning(reported: Any) -> tuple[str, int | None]:
    """Parse a warning's text and severity; only DCGM 4 and the last versions of 3 report the severity."""
    if not isinstance(reported, Mapping):
        return str(reported), None
    severity = reported.get("error_severity")
    return str(reported.get("warning", "")), severity if isinstance(severity, int) else None


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _gpu(result: Mapping[str, Any], ids: Mapping[int, str]) -> str | None:
    """Return the UUID of a result's single GPU; None for several GPUs or another entity."""
    if result.get("entity_group", "GPU") != "GPU":
        return None
    reported = next((result[name] for name in ("entity_id", "gpu_id", "gpu_ids") if name in result), "")
    text = str(reported)
    return ids.get(int(text)) if text.isdigit() else None


def _run(arguments: Sequence[str], limit_s: float) -> _Done:
    """Run dcgmi and capture both streams. At the limit, interrupt it, then kill its process group."""
    command = [sys.executable, "-c", _WITH_PARENT, str(os.getpid()), _PROGRAM, *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
            return _Done(output.decode(errors="replace"))
        except subprocess.TimeoutExpired:
            # The test itself runs in the host engine, which dcgmi stops when it is interrupted
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LEAVE_S)
            return _Done("", ended=True)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _last(output: str) -> str:
    """Return the last line that is not blank."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return _short(lines[-1]) if lines else "it said nothing"


def _short(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS else text[: _MOST_LETTERS - 3] + "..."
