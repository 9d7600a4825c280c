"""Run the cases within a time limit, each in its own process; a later call continues."""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_speed import cases, predicted
from benchmarks.gpu_speed.cases import Run
from benchmarks.gpu_speed.peer import Peer
from benchmarks.gpu_speed.suites import Suite
from benchmarks.on_gpu import data
from benchmarks.on_gpu.one_run import Order, Outcome
from benchmarks.on_gpu.session import ROOT, Clock, run_apart
from estimator import models
from estimator.errors import UserError
from estimator.job import Target
from launchers.models import tiny_llama
from launchers.report import trace

FIRST_RUN_S = 40.0  # assumed duration of a run, while none was measured
SETUP_S = 60.0  # assumed duration of the probes and of writing the weights
PROBE_S = 180.0  # limit of the matrix product and of the equality test
DONE = ("ran", "out of memory")  # outcomes that a later call does not repeat


@dataclass(kw_only=True, slots=True)
class Results:
    """All measurements on one card, including those of earlier calls."""

    card: str
    limit: dict[str, Any] | None = None  # of limit.py
    equality: dict[str, Any] | None = None  # of equality.py
    outcomes: dict[str, Outcome] = field(default_factory=dict)  # by the run's name

    @classmethod
    def load(cls, path: Path, card: str) -> Results:
        """Read the results of earlier calls on the same kind of card; empty if there are none."""
        values = json.loads(path.read_text()) if path.is_file() else {}
        if values.get("card") != card:
            return cls(card=card)
        outcomes = {name: Outcome.from_dict(each) for name, each in values["runs"].items()}
        return cls(card=card, limit=values["limit"], equality=values["equality"], outcomes=outcomes)

    @classmethod
    def of_any_card(cls, path: Path) -> Results:
        """Read the results of earlier calls; empty if there are none."""
        return cls.load(path, json.loads(path.read_text())["card"]) if path.is_file() else cls(card="")

    def is_done(self, run: Run) -> bool:
        """Return whether an earlier call has measured a run."""
        return run.name in self.outcomes and self.outcomes[run.name].ended in DONE


def expected_s(run: Run, outcomes: Mapping[str, Outcome]) -> float:
    """Return the median duration of measured runs with the same model, or of all, that compile as well."""
    comparable = {
        name: outcome.seconds
        for name, outcome in outcomes.items()
        if outcome.ended == "ran" and cases.compiles(name.rpartition(", ")[2]) == cases.compiles(run.engine)
    }
    same_model = {name: each for name, each in comparable.items() if name.startswith(f"{run.case.model} ")}
    return statistics.median((same_model or comparable or {"": FIRST_RUN_S}).values())


def runs_within(minutes: float, runs: Sequence[Run], outcomes: Mapping[str, Outcome]) -> int:
    """Return how many runs are expected to end within the time, in their order."""
    left, count = 60 * minutes - SETUP_S, 0
    for run in runs:
        left -= expected_s(run, outcomes)
        if left < 0:
            break
        count += 1
    return count


@dataclass(kw_only=True)
class Session:
    """Runs the cases and keeps their results.

    Parameters
    ----------
    target:
        Machine with one GPU, or this machine's CPUs.
    durations:
        Outcomes of earlier runs, for the expected durations.
    folder:
        Where weights, rows and logs go; the caller removes it.
    say:
        Called with a line for each run.
    keep:
        Called after each run, when the results have changed.
    """

    suite: Suite
    target: Target
    durations: Mapping[str, Outcome]
    folder: Path
    clock: Clock
    results: Results
    say: Callable[[str], None]
    keep: Callable[[], None]
    _runs: int = 0

    def measure(self, runs: Sequence[Run]) -> None:
        """Probe the device and measure the runs while time is left, those that failed before last."""
        for probe in self.suite.probes:
            if getattr(self.results, probe) is None:
                setattr(self.results, probe, self._probe(probe, self.suite.scale.device))
                self.keep()
        for run in sorted(runs, key=lambda run: run.name in self.results.outcomes):
            if self.results.is_done(run):
                continue
            reason = predicted.refusal(run, self.suite.scale, self.target)
            expected = expected_s(run, {**self.durations, **self.results.outcomes})
            if reason is None and self.clock.left_s < expected:
                self.say(f"{run.name}: no time left (expected {expected:.0f} s)")
                continue
            outcome = self.run(run) if reason is None else Outcome(ended="refused", message=reason)
            self.results.outcomes[run.name] = outcome
            rate = outcome.tokens_per_second
            speed = "" if rate is None else f", {rate:,.0f} tokens/s"
            self.say(
                f"{run.name}: {outcome.ended} ({outcome.seconds:.0f} s){speed} {outcome.message}".rstrip()
            )
            self.keep()

    def profile(self, run: Run) -> list[str]:
        """Run once with the profiler on the last step but one; lines on the dearest kernels and the gaps.

        Raises UserError where the run has left no trace.
        """
        step = self.suite.scale.steps - 1
        outcome = self.run(run, profile=str(step))
        traces = sorted((self.folder / f"run-{self._runs}").rglob("*.trace.json.gz"))
        if not traces:
            raise UserError(f"{run.name}: {outcome.ended}, without a trace. {outcome.message}".rstrip())
        split = trace.split(trace.read_trace(traces[0]))
        share = {kind: seconds / split.step_seconds for kind, seconds in split.seconds}
        lines = [f"{run.name}, one step of {split.step_seconds:.3f} s on {split.device}"]
        lines += [f"  {part:6.1%}  {kind}" for kind, part in share.items()]
        lines.append("  the most expensive operators (idle above is the gaps between them):")
        for each in split.operators:
            part = each.seconds / split.step_seconds
            lines.append(f"  {part:6.1%} {each.seconds * 1e3:9.2f} ms {each.calls:6.0f}x {each.name}")
        return lines

    def run(self, run: Run, profile: str | None = None) -> Outcome:
        """Make one run."""
        model_dir = self._model(run.case.model)
        scale, task = self.suite.scale, run.case.task
        rows = cases.rows_needed(run, scale)
        seq_len = run.case.seq_len
        file = self.folder / f"rows-{rows}-{seq_len}-{task}.jsonl"
        dataset = data.write(file, model_dir, rows, seq_len, task)
        self._runs += 1
        values = self._peer(run, model_dir, dataset) if run.is_peer else None
        if values is None:
            settings = cases.settings_of(run, scale, model_dir, dataset, profile)
            values = settings.model_dump(mode="json")
        order = Order(
            settings=values,
            warm_up=scale.warm_up,
            folder=self.folder / f"run-{self._runs}",
            data=self.folder / "data",
        )
        module = "benchmarks.gpu_speed.peer" if run.is_peer else "benchmarks.on_gpu.one_run"
        return run_apart(order, min(max(self.clock.left_s, 1.0), scale.longest_run_s), module)

    def _peer(self, run: Run, model_dir: Path, dataset: Path) -> dict[str, Any]:
        scale, case = self.suite.scale, run.case
        peer = Peer(
            engine=run.engine,
            model=case.model,
            model_dir=str(model_dir),
            dataset=str(dataset),
            method=case.method,
            device=scale.device,
            seq_len=case.seq_len,
            micro_batch_size=scale.micro_batch_size(case.seq_len),
            accumulation=scale.accumulation,
            steps=scale.steps,
            warm_up=scale.warm_up,
            recomputes=predicted.recomputes(run, scale, self.target),
        )
        return dataclasses.asdict(peer)

    def _model(self, name: str) -> Path:
        """Create random weights in the model's shape when the first run needs them."""
        folder = self.folder / name
        if not folder.exists():
            self.say(f"writing random weights in the shape of {name}")
        dtype = "bfloat16" if self.suite.scale.device == "cuda" else "float32"
        return tiny_llama.make(folder, config=tiny_llama.config_of(models.find(name), dtype))

    def _probe(self, name: str, device: str) -> dict[str, Any] | None:
        """Run limit.py or equality.py and return its figures; None if it failed."""
        command = [sys.executable, "-m", f"benchmarks.gpu_speed.{name}", device]
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=PROBE_S, check=False
            )
        except subprocess.TimeoutExpired:
            self.say(f"{name}: not done after {PROBE_S:.0f} s")
            return None
        if done.returncode:
            self.say(f"{name}: failed: {done.stderr.strip()[-300:]}")
            return None
        figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        self.say(f"{name}: {figures}")
        return figures
