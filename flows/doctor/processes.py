"""Run probes in separate processes, a few at a time, with time limits and cleanup."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from flows.doctor.line import Line, without_secrets
from flows.doctor.probes import Probe
from flows.doctor.worker import ANSWER
from launchers.cluster.processes import sigterm_raises, started

WORKER = "flows.doctor.worker"
_MAX_WORKERS = 4  # concurrent probes: imports need cores, the others mostly wait
_PAUSE_S = 0.05


def run_probes(probes: Sequence[Probe], limit_s: float | None = None) -> Iterator[tuple[Probe, list[Line]]]:
    """Yield each probe with its lines as soon as it ends. ``limit_s`` replaces the probes' own limits."""
    stop = threading.Event()

    def one(probe: Probe) -> list[Line]:
        return [without_secrets(line) for line in _lines(probe, limit_s or probe.limit_s, stop)]

    with sigterm_raises(), ThreadPoolExecutor(max(2, min(_MAX_WORKERS, os.cpu_count() or 1))) as pool:
        try:
            quickest_first = sorted(probes, key=lambda probe: probe.limit_s)
            futures = {pool.submit(one, probe): probe for probe in quickest_first}
            for done in as_completed(futures):
                yield futures[done], done.result()
        except BaseException:
            stop.set()
            raise


def _lines(probe: Probe, limit_s: float, stop: threading.Event) -> list[Line]:
    with tempfile.TemporaryDirectory(prefix="finetune-doctor-") as name:
        request, log = Path(name, "request.json"), Path(name, "log")
        request.write_text(json.dumps(asdict(probe)))
        with started(WORKER, request, log, on_cpu=False) as process:
            finished = _wait_for_end(process, limit_s, stop)
        result_file = request.with_name(ANSWER)
        if result_file.is_file():
            return [
                Line(**{**line, "needs": tuple(line["needs"])})
                for line in json.loads(result_file.read_text())
            ]
        checks = probe.arguments or (probe.name,)
        if not finished:
            found = f"no result within {limit_s:g} s"
            fix = "Check disk, network and login, or increase --time-limit."
            return [Line(check=check, state="unknown", found=found, fix=fix) for check in checks]
        output = log.read_text(errors="replace").strip().splitlines()
        ending = f"the probe ended with status {process.returncode}"
        found = ": ".join([ending, *output[-1:]])
        return [Line(check=check, state="no", found=found) for check in checks]


def _wait_for_end(process: subprocess.Popen[bytes], limit_s: float, stop: threading.Event) -> bool:
    """Wait for the process and return whether it ended in time; stops waiting when ``stop`` is set."""
    deadline = time.monotonic() + limit_s
    while process.poll() is None:
        if stop.is_set() or time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_S)
    return True
