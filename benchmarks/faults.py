"""Kill each process of a run at each phase; record how the run ends and resumes.

    python -m benchmarks.faults                 # about an hour on 2 cores; writes benchmarks/results/faults.*
    python -m benchmarks.faults --engine fsdp2  # only its rows; the others are kept

Each row is one fault in a real run of the flow (tiny-llama, 24 steps, a checkpoint every 3). "Ended after"
is the time until all processes of the attempt (for the scheduler: of the run) have ended. After a killed
rank, agent or task, Metaflow's @retry continues; after a killed scheduler, the `resume` command.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.machine import describe
from tests.conftest import write_sums
from tests.flows.faults import EVERY, SHORT, STEPS, Flow, Moment, Who

RESULTS = Path(__file__).parent / "results"
ENGINES = ("torchtune", "deepspeed", "fsdp2")
MOMENTS: tuple[Moment, ...] = ("at the start", "in the middle", "in a checkpoint")
STOPS: tuple[Literal["Ctrl-C", "SIGTERM", "SIGINT"], ...] = ("Ctrl-C", "SIGTERM", "SIGINT")
CAUSES = {  # message about the cause in the terminal
    "rank": "was ended by SIGKILL (9)",
    "agent": "the agent of node",
    "worker task": "its connection broke without a goodbye",
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    who: Who
    moment: Moment
    rank: int = 0  # equals the node, as each has one rank


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run and the faults of its attempts, at most two: the third attempt must succeed."""

    nodes: int
    engine: str
    faults: tuple[Fault, ...]


@dataclass(frozen=True, kw_only=True)
class Row:
    nodes: int
    engine: str
    who: str
    moment: str
    ended_after_seconds: float
    orphans: int
    cause_reported: bool | None  # None: no process is left to report it
    committed_step: int  # step of the newest complete checkpoint at the fault
    resumed_from_step: int
    losses_equal: bool  # losses of all steps equal those of the undisturbed run, bit by bit


@dataclass(frozen=True, kw_only=True)
class Stop:
    """A run that was requested to stop while it evaluated."""

    engine: str
    signal: str
    ended_after_seconds: float
    orphans: int


def cases(engine: str) -> Iterator[Case]:
    """List all faults for an engine; DeepSpeed's ranks, which run FSDP2's loop, are killed once."""
    if engine == "deepspeed":
        yield Case(nodes=2, engine=engine, faults=(Fault(who="rank", moment="in the middle", rank=1),))
        return
    victims: tuple[tuple[Who, int], ...] = (
        ("rank", 1),
        ("agent", 0),
        ("worker task", 1),
        ("control task", 0),
    )
    on_two_nodes = [
        Fault(who=process, moment=moment, rank=rank) for process, rank in victims for moment in MOMENTS
    ]
    on_one_node = [Fault(who="rank", moment=moment) for moment in MOMENTS]
    on_one_node += [Fault(who="agent", moment="in the middle")]
    on_one_node += [
        Fault(who="control task", moment=moment) for moment in ("in the middle", "in a checkpoint")
    ]
    for nodes, faults in ((2, on_two_nodes), (1, on_one_node)):
        for first in range(0, len(faults), 2):
            yield Case(nodes=nodes, engine=engine, faults=tuple(faults[first : first + 2]))
    for nodes, moments in ((2, MOMENTS[1:]), (1, MOMENTS[1:2])):
        for moment in moments:
            yield Case(nodes=nodes, engine=engine, faults=(Fault(who="scheduler", moment=moment),))


class Bench:
    """Runs in one datastore; all but the undisturbed ones resume a run that was killed early."""

    def __init__(self, folder: Path, dataset: Path) -> None:
        self._folder, self._dataset = folder, dataset
        self._homes: dict[tuple[int, str], tuple[Path, str, list[Any]]] = {}
        self._signals = itertools.cycle(STOPS)
        self.rows: list[Row] = []
        self.stops: list[Stop] = []
        self._flow: Flow | None = None

    def run(self, case: Case) -> None:
        home, origin, expected = self._prepared(case.nodes, case.engine)
        flow = self._started(Flow(home, "resume", "--origin-run-id", origin, nodes=case.nodes))
        killed = []
        for fault in case.faults:
            killed.append((fault, flow.kill(fault.who, fault.moment, fault.rank)))
            if fault.who == "scheduler":
                resume_options = ("resume", "--origin-run-id", flow.run_id)
                flow = self._started(Flow(home, *resume_options, nodes=case.nodes))
        self._stop_after_training(flow, case.engine)
        equal = flow.losses() == expected
        resumed_from = flow.resumed_steps()
        if case.faults[0].who != "scheduler":
            resumed_from = resumed_from[1:]
        for (fault, ended), step in zip(killed, resumed_from, strict=True):
            words = CAUSES.get(fault.who)
            self._add(
                Row(
                    nodes=case.nodes,
                    engine=case.engine,
                    who=fault.who,
                    moment=fault.moment,
                    ended_after_seconds=ended.seconds,
                    orphans=len(ended.left),
                    cause_reported=words in flow.log if words else None,
                    committed_step=ended.committed,
                    resumed_from_step=step,
                    losses_equal=equal,
                )
            )

    def _started(self, flow: Flow) -> Flow:
        self._flow = flow
        return flow

    def clean_up(self) -> None:
        """End what still runs of the latest run."""
        if self._flow is not None:
            self._flow.clean_up()

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        print(json.dumps(asdict(row)), flush=True)

    def _prepared(self, nodes: int, engine: str) -> tuple[Path, str, list[Any]]:
        """Return the folder, a run killed at the start of training, and an undisturbed run's losses."""
        if (nodes, engine) not in self._homes:
            home = self._folder / f"{engine}-{nodes}"
            home.mkdir()
            chosen = [f"--nodes={nodes}", f"--engine={engine}", f"--dataset={self._dataset}", *SHORT]
            undisturbed = self._started(Flow(home, "run", *chosen, nodes=nodes))
            assert undisturbed.end() == 0, undisturbed.log
            expected = undisturbed.losses()
            assert [step for step, _ in expected] == list(range(1, STEPS + 1))
            origin = self._started(Flow(home, "run", *chosen, nodes=nodes))
            ended = origin.kill("scheduler", "at the start")
            self._homes[nodes, engine] = home, origin.run_id, expected
            flow = self._started(Flow(home, "resume", "--origin-run-id", origin.run_id, nodes=nodes))
            self._stop_after_training(flow, engine)
            self._add(
                Row(
                    nodes=nodes,
                    engine=engine,
                    who="scheduler",
                    moment="at the start",
                    ended_after_seconds=ended.seconds,
                    orphans=len(ended.left),
                    cause_reported=None,
                    committed_step=ended.committed,
                    resumed_from_step=flow.resumed_steps()[0],
                    losses_equal=flow.losses() == expected,
                )
            )
        return self._homes[nodes, engine]

    def _stop_after_training(self, flow: Flow, engine: str) -> None:
        flow.wait_for(lambda: "/evaluate/" in flow.log)
        time.sleep(3)  # the evaluation has started its process
        how = next(self._signals)
        ended = flow.stop(how)
        self.stops.append(
            Stop(engine=engine, signal=how, ended_after_seconds=ended.seconds, orphans=len(ended.left))
        )
        print(json.dumps(asdict(self.stops[-1])), flush=True)


def text(result: dict[str, Any]) -> str:
    rows = "\n".join(
        f"| {row['nodes']} | {row['engine']} | {row['who']} | {row['moment']} "
        f"| {row['ended_after_seconds']:.1f} | {row['orphans']} "
        f"| {'-' if row['cause_reported'] is None else 'yes' if row['cause_reported'] else 'no'} "
        f"| {row['committed_step']} | {row['resumed_from_step']} "
        f"| {'yes' if row['losses_equal'] else 'no'} |"
        for row in result["rows"]
    )
    stops = result["stops"]
    stop_rows = "\n".join(
        f"| {name} | {len(outcomes)} | {max(stop['ended_after_seconds'] for stop in outcomes):.1f} "
        f"| {sum(stop['orphans'] for stop in outcomes)} |"
        for name in sorted({stop["signal"] for stop in stops})
        if (outcomes := [stop for stop in stops if stop["signal"] == name])
    )
    return f"""# Faults

`{result["command"]}`, {result["machine"]["text"]}

tiny-llama, full, {STEPS} steps, a checkpoint every {EVERY}; kill -9 of one process in each row. "Complete" is
the step of the newest complete checkpoint at the kill, "resumed from" the step from which the next attempt
continues (a checkpoint with complete files is still stored while the attempt ends). "Equal": the losses of
all {STEPS} steps, bit by bit, equal those of an undisturbed run.

| nodes | engine | killed | when | ended after, s | orphans | cause shown | complete | resumed from | equal |
|---|---|---|---|---|---|---|---|---|---|
{rows}

Runs stopped by a signal during evaluation:

| signal | runs | longest to end, s | orphans |
|---|---|---|---|
{stop_rows}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--engine", choices=ENGINES, help="run only this engine; the others' rows are kept")
    chosen = parser.parse_args()
    engines = (chosen.engine,) if chosen.engine else ENGINES
    file = RESULTS / "faults.json"
    earlier = json.loads(file.read_text()) if chosen.engine else {"rows": [], "stops": []}
    results = {
        key: [row for row in earlier[key] if row["engine"] not in engines] for key in ("rows", "stops")
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bench = Bench(folder, write_sums(folder / "sums.jsonl"))
        problems = []
        for case in itertools.chain.from_iterable(cases(engine) for engine in engines):
            try:
                bench.run(case)
            except AssertionError as error:  # noqa: PERF203 the other cases still run
                problems.append(f"{case}: {next(iter(str(error).splitlines()), '')}")
                print(f"{case}: {error!r}", file=sys.stderr, flush=True)
            finally:
                bench.clean_up()
        result = {
            "command": "python -m benchmarks.faults",
            "machine": describe(),
            "rows": results["rows"] + [asdict(row) for row in bench.rows],
            "stops": results["stops"] + [asdict(stop) for stop in bench.stops],
            "problems": problems,
        }
    file.write_text(json.dumps(result, indent=1) + "\n")
    file.with_suffix(".md").write_text(text(result))
    print(text(result))
    if problems:
        raise SystemExit(f"{len(problems)} cases failed: see above")


if __name__ == "__main__":
    main()
