"""Run the cases within a time limit, each in its own process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

from benchmarks.on_gpu import cases, data
from benchmarks.on_gpu.cases import Case, Scale
from benchmarks.on_gpu.one_run import Order, Outcome, result_of
from benchmarks.on_gpu.search import Found, smallest_limit
from estimator import models
from estimator.formatting import format_bytes
from estimator.plan import Plan
from launchers.models import tiny_llama

NO_TIME = "no time was left to find what it needs, or to narrow it down"
ROOT = Path(__file__).parents[2]
FIRST_RUN_S = 60.0  # assumed duration of the first run
LONGEST_RUN_S = 300.0  # a run that lasts longer is ended
ENDING_S = 20.0  # grace period for a run to end its processes
# First limit on a CPU: resident memory excludes private memory that the run has not touched
ABOVE_RESIDENT, BESIDE_RESIDENT = 1.25, 2**28


class Clock:
    """Time limit of a session."""

    def __init__(self, minutes: float) -> None:
        self.began = time.monotonic()
        self._end = self.began + 60 * minutes

    @property
    def left_s(self) -> float:
        """Remaining seconds; negative after the end."""
        return self._end - time.monotonic()


@dataclass(kw_only=True, slots=True)
class Measured:
    """One case and its results so far."""

    case: Case
    outcome: Outcome | None = None  # of the run without a limit; None: not run
    found: Found | None = None
    trials: list[Outcome] = field(default_factory=list)  # below limits, in the order of the search
    left_out: str = ""  # reason why results are missing

    @property
    def ran(self) -> bool:
        return self.outcome is not None and self.outcome.ended == "ran"

    @property
    def device_missed(self) -> bool:
        """Whether NVML's peak is below the bytes that torch reserved, because no sample fell on the peak."""
        outcome = self.outcome
        if outcome is None or outcome.device_bytes is None or outcome.reserved_bytes is None:
            return False
        return outcome.device_bytes < outcome.reserved_bytes

    @property
    def device_bytes(self) -> int | None:
        """Peak memory of the GPU by NVML; None if it was not sampled or the peak was missed."""
        return None if self.outcome is None or self.device_missed else self.outcome.device_bytes

    @property
    def outside_bytes(self) -> int | None:
        """Bytes on the GPU that torch's allocator does not manage: CUDA's context, NCCL's buffers.

        None if NVML missed the peak; 0 without a GPU.
        """
        outcome = self.outcome
        if outcome is None or outcome.device_bytes is None or outcome.reserved_bytes is None:
            return 0
        return None if self.device_missed else outcome.device_bytes - outcome.reserved_bytes

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens/s of one process. Packed sequences count in full, padding of others does not count."""
        outcome = self.outcome
        if outcome is None or self.case.lengths == "varying" or outcome.plan is None:
            return outcome.tokens_per_second if outcome else None
        layout = Plan.from_json(outcome.plan).layout
        tokens = layout.micro_batch_size * layout.accumulation * layout.seq_len
        return tokens / outcome.step_seconds if outcome.step_seconds else None

    @property
    def needed_bytes(self) -> int | None:
        """Smallest memory of one process with which the case ran; None if unknown.

        The limit that the search found for torch's allocator, plus ``outside_bytes``.
        """
        outside = self.outside_bytes
        return None if self.found is None or outside is None else self.found.runs_bytes + outside


@dataclass(kw_only=True)
class Session:
    """Measures cases and reports progress.

    Parameters
    ----------
    folder:
        Folder of weights, rows and logs; removed by the caller.
    resolution:
        Width of the final interval of the smallest limit, as a share of the bytes that the case reserved.
    say:
        Called with one line per run.
    keep:
        Called after each case with all measurements so far.
    """

    scale: Scale
    folder: Path
    clock: Clock
    resolution: float
    say: Callable[[str], None]
    keep: Callable[[Sequence[Measured]], None]
    _seconds: dict[str, float] = field(default_factory=dict)  # of the last run of such a case
    _runs: int = 0

    def measure(self, chosen_cases: Sequence[Case]) -> list[Measured]:
        """Measure all cases while time remains; of cases with equal switches peaks first, then limits."""
        measurements = [Measured(case=case) for case in chosen_cases]
        for _, group in groupby(measurements, key=lambda each: each.case.switches):
            same_switches = list(group)
            for measured in same_switches:
                self._show(measured)
                self.keep(measurements)
            for measured in same_switches:
                if measured.ran:
                    self._need(measured)
                    self.keep(measurements)
        return measurements

    def _show(self, measured: Measured) -> None:
        case = measured.case
        reason = cases.unsupported_case(case, self.scale)
        if reason is not None:
            measured.left_out = reason
            return
        outcome = self._run(case)
        if outcome is None:
            measured.left_out = "no time was left to run it"
            return
        measured.outcome = outcome
        if outcome.ended not in ("ran", "out of memory"):
            measured.left_out = f"{outcome.ended}: {outcome.message}"

    def _need(self, measured: Measured) -> None:
        outcome = measured.outcome
        assert outcome is not None
        largest = outcome.reserved_bytes or outcome.resident_bytes
        if largest is None:
            measured.left_out = "its processes reported no memory"
            return

        def trial(limit_bytes: int) -> bool | None:
            below = self._run(measured.case, limit_bytes)
            if below is None or below.ended == "no time":
                return None
            measured.trials.append(below)
            return below.ended == "ran"

        runs = largest
        if outcome.reserved_bytes is None:  # on a CPU: resident memory and private memory are not the same
            runs = int(largest * ABOVE_RESIDENT) + BESIDE_RESIDENT
            ran = trial(runs)
            if not ran:
                measured.left_out = NO_TIME if ran is None else "even a limit above what it showed is too low"
                return
        measured.found = smallest_limit(
            trial,
            fails_bytes=outcome.live_bytes or 0,
            runs_bytes=runs,
            resolution_bytes=int(largest * self.resolution),
        )
        if not measured.found.finished:
            measured.left_out = NO_TIME
            if not measured.found.trials:
                measured.found = None

    def _run(self, case: Case, limit_bytes: int | None = None) -> Outcome | None:
        """Run a case once; None if the remaining time is too short."""
        expected = self._seconds.get(case.what, max(self._seconds.values(), default=FIRST_RUN_S))
        if self.clock.left_s < expected:
            return None
        model_dir = self._model(case.model)
        rows = cases.rows_needed(case, self.scale)
        dataset = data.write(self.folder / f"rows-{rows}.jsonl", model_dir, rows, self.scale.seq_len)
        self._runs += 1
        order = Order(
            settings=cases.settings_of(case, self.scale, model_dir, dataset).model_dump(mode="json"),
            warm_up=self.scale.warm_up,
            folder=self.folder / f"run-{self._runs}",
            data=self.folder / "data",
            limit_bytes=limit_bytes,
        )
        outcome = run_apart(order, min(self.clock.left_s, LONGEST_RUN_S))
        if outcome.ended == "ran":
            self._seconds[case.what] = outcome.seconds
        below = "" if limit_bytes is None else f" below {format_bytes(limit_bytes)}"
        self.say(f"{case.name}{below}: {outcome.ended} ({outcome.seconds:.0f} s) {outcome.message}".rstrip())
        return outcome

    def _model(self, name: str) -> Path:
        """Create random weights in the model's shape when the first case needs them."""
        folder = self.folder / name
        if not folder.exists():
            self.say(f"making random weights in the shape of {name}")
        dtype = "bfloat16" if self.scale.device == "cuda" else "float32"
        return tiny_llama.make(folder, config=tiny_llama.config_of(models.find(name), dtype))


def run_apart(order: Order, limit_s: float, module: str = "benchmarks.on_gpu.one_run") -> Outcome:
    """Run an order in its own process; end the process and its children at the time limit.

    ``module`` runs it; its arguments are the order's file and the process id of the parent.
    """
    path = order.save()
    log = order.folder / "log.txt"
    command = [sys.executable, "-m", module, str(path), str(os.getpid())]
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return Outcome(ended="no time", message=f"ended after {limit_s:.0f} s", seconds=limit_s)
        finally:
            _end(process)
    file = result_of(path)
    if not file.is_file():
        last = (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        seconds = time.monotonic() - start
        return Outcome(ended="failed", message=last[:300], seconds=seconds)
    outcome = Outcome.from_dict(json.loads(file.read_text()))
    return replace(outcome, message=_without_host(outcome.message), seconds=time.monotonic() - start)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process: SIGTERM, so that it ends its ranks; then SIGKILL, after which the kernel ends them."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=ENDING_S)
    if process.poll() is None:
        process.kill()
        process.wait()


def _without_host(message: str) -> str:
    """Remove the host name from a rank's message."""
    return re.sub(r"^rank \d+ on \S+ failed: ", "", message)
