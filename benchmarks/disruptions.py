"""Delete pods of runs that train on two nodes; record whether the runs finish and what each deletion costs.

    python -m benchmarks.disruptions                                   # about 1.5 hours on 2 cores, as root
    python -m benchmarks.disruptions --deletions 3 --deletions 10      # only these rows; the others are kept
    python -m benchmarks.disruptions --once                            # one of each other disruption
    python -m benchmarks.disruptions --late-seconds 600                # a second node that joins this late

Needs a control plane's binaries (CONTRIBUTING.md); writes benchmarks/results/disruptions.*. The API server,
scheduler and controllers are Kubernetes' own, JobSet's controller and the nodes those of tests/lab. Each row
is one run of the flow (tiny-llama, torchtune). Its losses are compared with those of an undisturbed run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pickle
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.machine import describe
from tests.conftest import write_sums
from tests.flows.faults import READ_OUTCOME
from tests.kubernetes import cluster as kubernetes
from tests.kubernetes.cluster import Cluster, Launched
from tests.kubernetes.faults import (
    BIG,
    LIMIT_S,
    delete,
    delete_in_a_checkpoint,
    drained,
    one_node_short,
    training,
    wait_for_line,
)
from tests.lab import control_plane
from tests.lab import pods as lab_pods
from tests.lab.api import Json
from tests.lab.control_plane import wait_for

RESULTS = Path(__file__).parent / "results"
DELETIONS = (3, 10, 20)
LATE_S = 60.0
EVERY = 3  # steps from checkpoint to checkpoint
STEPS_OF_A_LAUNCH = 10  # more than a launch runs until it has stored a checkpoint and is disrupted
END_S = 600
Pods = dict[str, Json]  # of a launch, by kind
Take = Callable[[Cluster, Pods], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run: the pods that are deleted, and how often."""

    what: str
    times: int
    take: Take  # context manager: disrupts the launch on entry, restores the cluster on exit


@dataclass(frozen=True, kw_only=True)
class Row:
    what: str
    times: int
    ended: bool  # without help, with a trained model
    lost_seconds: tuple[float, ...]  # each time: from the request to the next launch's first step
    waited_seconds: tuple[float, ...]  # of these, before the step was submitted again
    steps_twice: int  # total
    losses_equal: bool  # losses of all steps equal those of the undisturbed run, bit by bit
    every: int = EVERY  # steps from checkpoint to checkpoint


@dataclass(frozen=True, kw_only=True)
class Late:
    """A run whose second node joined late."""

    late_seconds: float
    messages: int  # number of terminal messages that name the missing node and the reason
    reason: str  # text of the last message
    trained_after_seconds: float  # from the node's arrival to the first step
    ended: bool
    losses_equal: bool


@contextlib.contextmanager
def _deleted(cluster: Cluster, launch: Pods, kind: Literal["worker", "control"] = "worker") -> Iterator[None]:
    delete(cluster, launch[kind])
    yield


@contextlib.contextmanager
def _deleted_in_a_checkpoint(cluster: Cluster, launch: Pods) -> Iterator[None]:
    delete_in_a_checkpoint(cluster, launch["worker"])
    yield


def cases(deletions: tuple[int, ...]) -> list[Case]:
    return [Case(what="worker deleted", times=times, take=_deleted) for times in deletions]


def once() -> list[Case]:
    return [
        Case(
            what="control pod deleted",
            times=1,
            take=lambda cluster, launch: _deleted(cluster, launch, "control"),
        ),
        Case(what="worker deleted (SIGTERM) in a checkpoint", times=1, take=_deleted_in_a_checkpoint),
        Case(
            what="worker's node drained (eviction API)",
            times=1,
            take=lambda cluster, launch: drained(cluster, launch["worker"]),
        ),
    ]


class Bench:
    """Runs on one cluster that train the same steps."""

    def __init__(self, cluster: Cluster, folder: Path, steps: int) -> None:
        self._cluster, self._folder, self._steps = cluster, folder, steps
        self._dataset = write_sums(folder / "sums.jsonl")
        self._expected: list[float] = []

    def disturb(self, case: Case) -> Row:
        run = self._launch(case.what)
        lost, waited, twice = [], [], 0
        for number in range(1, case.times + 1):
            launch = training(self._cluster, run)
            before = self._main(run)
            start = time.monotonic()
            with case.take(self._cluster, launch):
                first = self._first_step(run, earlier_launches=len(before))
                lost.append(time.monotonic() - start)
            waited.append(_wait(run, number))
            twice += max(0, _steps(before[-1])[-1] + 1 - first)
            print(f"{case.what} {number} of {case.times}: {lost[-1]:.1f} s, on from step {first}", flush=True)
        return Row(
            what=case.what,
            times=case.times,
            ended=run.wait(END_S) == 0,
            lost_seconds=tuple(lost),
            waited_seconds=tuple(waited),
            steps_twice=twice,
            losses_equal=self._losses(run) == self._undisturbed(),
        )

    def join_late(self, seconds: float) -> Late:
        with one_node_short(self._cluster):
            run = self._launch("late", f"--pending-timeout={seconds / 60 + 10:g}", pods=BIG)
            wait_for_line(run, r"jobset \S+ waits")
            time.sleep(seconds)
        arrived = time.monotonic()
        self._first_step(run, earlier_launches=0)
        took = time.monotonic() - arrived
        messages = re.findall(r"jobset \S+ (waits.*)", run.log)
        return Late(
            late_seconds=seconds,
            messages=len(messages),
            reason=messages[-1],
            trained_after_seconds=took,
            ended=run.wait(END_S) == 0,
            losses_equal=self._losses(run) == self._undisturbed(),
        )

    def _undisturbed(self) -> list[float]:
        if not self._expected:
            run = self._launch("undisturbed")
            assert run.wait(LIMIT_S) == 0, run.full_log()
            self._expected = self._losses(run)
            assert len(self._expected) == self._steps
        return self._expected

    def _launch(self, name: str, *more: str, pods: str = "--with=kubernetes") -> Launched:
        home = self._folder / re.sub(r"\W+", "-", f"{name} {time.monotonic_ns()}")
        options = [
            *("--no-preflight", "--device=cpu", "--nodes=2"),
            *(f"--dataset={self._dataset}", "--seq-len=128", "--global-batch-size=16", "--epochs=9999"),
            *(f"--max-steps={self._steps}", f"--checkpoint-every={EVERY}"),
            *("--set=evaluation.generations=0", "--set=evaluation.fraction=0.1"),
        ]
        return self._cluster.launch("finetune_flow", home, "run", pods, *options, *more)

    def _main(self, run: Launched) -> list[lab_pods.Pod]:
        """Return the pods of main nodes that have trained a step, oldest first."""
        mark = f"/{run.run_id}/train_nodes/"
        pods = [pod for pod in self._cluster.hub.pods if "-control-" in pod.spec.name]
        return [pod for pod in pods if mark in str(pod.spec.command) and _steps(pod)]

    def _first_step(self, run: Launched, *, earlier_launches: int) -> int:
        """Wait for the first step of the launch after the earlier ones, and return it."""

        def first_pods() -> Any:
            assert run.process.poll() is None, run.full_log()
            return run.has_begun and self._main(run)[earlier_launches:]

        return _steps(wait_for(first_pods, LIMIT_S, "the first step has run", every=0.1)[0])[0]

    def _losses(self, run: Launched) -> list[float]:
        outcome = pickle.loads(run.read(READ_OUTCOME, f"FinetuneFlow/{run.run_id}"))  # noqa: S301
        return [row["loss"] for row in outcome["metrics"]]


def _steps(pod: lab_pods.Pod) -> list[int]:
    """Return the steps that the pod of a main node has logged."""
    return [int(step) for step in re.findall(r"\bstep (\d+)/\d+ ", pod.log.read_text(errors="replace"))]


def _wait(run: Launched, number: int) -> float:
    """Return the seconds between disruption ``number`` of a run and the next submission of the step."""
    match = re.search(rf"Disruption {number} of .* submitted again in (\d+) s", run.log)
    assert match is not None, run.full_log()
    return float(match[1])


def text(result: dict[str, Any]) -> str:
    rows = "\n".join(
        f"| {row['what']} | {row['times']} | {row['every']} | {_yes_no(row['ended'])} "
        f"| {statistics.median(row['lost_seconds']):.0f} | {max(row['lost_seconds']):.0f} "
        f"| {statistics.median(map(float.__sub__, row['lost_seconds'], row['waited_seconds'])):.0f} "
        f"| {row['steps_twice']} | {_yes_no(row['losses_equal'])} |"
        for row in sorted(result["rows"], key=lambda row: (-row["times"], row["what"]))
    )
    late = "\n".join(
        f"| {row['late_seconds']:.0f} | {row['messages']} | {row['reason']} "
        f"| {row['trained_after_seconds']:.0f} | {_yes_no(row['ended'])} | {_yes_no(row['losses_equal'])} |"
        for row in sorted(result["late"], key=lambda row: row["late_seconds"])
    )
    return f"""# Disruptions on Kubernetes

`{result["command"]}`, {result["machine"]["text"]}

tiny-llama on two nodes of the tests' control plane. Each row is one run; "every" is the number of steps
between checkpoints. "Lost" is the time from the request to delete or evict until the next launch has run its
first step. It includes the wait before the step is submitted again, which doubles from 5 s to 60 s; the third
column is without it. "Repeated" is the total of repeated steps. "Equal": the losses of all steps equal those
of an undisturbed run, bit by bit.

| what | times | every | succeeded | lost, s: median | maximum | median without the wait | repeated | equal |
|---|---|---|---|---|---|---|---|---|
{rows}

The second node joins after the first has waited this long:

| late, s | messages | last message | first step after, s | succeeded | equal |
|---|---|---|---|---|---|
{late}
"""


def _yes_no(yes: bool) -> str:
    return "yes" if yes else "no"


def keep(kind: Literal["rows", "late"], row: Row | Late) -> None:
    """Store a row in the results; it replaces an earlier one of the same case."""
    file = RESULTS / "disruptions.json"
    result = json.loads(file.read_text()) if file.exists() else {"rows": [], "late": []}
    new = json.loads(json.dumps(asdict(row)))
    same = ("what", "times") if kind == "rows" else ("late_seconds",)
    other_rows = [old for old in result[kind] if any(old[name] != new[name] for name in same)]
    result |= {"command": "python -m benchmarks.disruptions", "machine": describe(), kind: [*other_rows, new]}
    file.write_text(json.dumps(result, indent=1) + "\n")
    file.with_suffix(".md").write_text(text(result))
    print(json.dumps(new), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--deletions", type=int, action="append", metavar="N", help="deletions of a worker in one run"
    )
    parser.add_argument("--once", action="store_true", help="one of each other disruption")
    parser.add_argument("--late-seconds", type=float, metavar="S", help="delay of the second node in seconds")
    chosen = parser.parse_args()
    if reason := control_plane.missing() or lab_pods.missing():
        sys.exit(reason)
    everything = chosen.deletions is None and not chosen.once and chosen.late_seconds is None
    deletions = tuple(chosen.deletions or (DELETIONS if everything else ()))
    late = LATE_S if everything else chosen.late_seconds
    steps = STEPS_OF_A_LAUNCH * (max(deletions, default=1) + 1)
    with tempfile.TemporaryDirectory() as name, kubernetes.start(Path(name) / "cluster") as cluster:
        bench = Bench(cluster, Path(name), steps)
        for case in [*cases(deletions), *(once() if everything or chosen.once else ())]:
            keep("rows", bench.disturb(case))
        if late is not None:
            keep("late", bench.join_late(late))
    print((RESULTS / "disruptions.md").read_text())


if __name__ == "__main__":
    main()
