"""Runs with injected faults: which process, at which moment, and the outcome."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from tests.flows.conftest import EVERY, FLOW, QUICK, STEPS, environment, left_behind, start_flow

__all__ = ["EVERY", "QUICK", "SHORT", "STEPS"]

Who = Literal["rank", "agent", "worker task", "control task", "scheduler"]
Moment = Literal["at the start", "in the middle", "in a checkpoint"]

SHORT = (*QUICK, "--set=evaluation.generations=0")  # the steps and losses of QUICK
READ_OUTCOME = """
import pickle, sys
from metaflow import Run, namespace
namespace(None)
tasks = [task for step in Run(sys.argv[1]) if step.id.startswith("train") for task in step if task.finished]
outcomes = [task["outcome"].data for task in tasks]
main = next(outcome for outcome in outcomes if outcome.output)
found = {"metrics": [m.to_dict() for m in main.metrics], "resumed_from": main.resumed_from}
found["evaluations"] = [(each.step, each.loss) for each in main.evaluations]
pickle.dump(found, sys.stdout.buffer)
"""


@dataclass
class Node:
    """A running training task of one node, identified by its work folder."""

    folder: Path
    task_pid: int

    def rank_pid(self, rank: int) -> int | None:
        try:
            return int(
                json.loads((self.folder / "node" / "ranks" / f"rank-{rank:05d}.json").read_text())["pid"]
            )
        except (OSError, ValueError):
            return None

    def agent_pid(self) -> int | None:
        for child in psutil.Process(self.task_pid).children():
            with contextlib.suppress(psutil.Error):
                if "launchers.gang.agent" in child.cmdline():
                    return child.pid
        return None

    def step(self) -> int:
        """Return the last step of a rank of this node in this attempt."""
        steps = [0]
        for path in (self.folder / "node" / "telemetry").glob("rank-*.jsonl"):
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):
                    event = json.loads(line)
                    if "dt" in event:
                        steps.append(int(event["step"]))
        return max(steps)

    def writes_checkpoint(self, rank: int) -> bool:
        return any(
            not (folder / f"rank-{rank:05d}.json").exists()
            for folder in (self.folder / "node" / "checkpoints").glob("step-*")
        )


@dataclass
class Ended:
    """The outcome of a fault."""

    committed: int  # the newest whole checkpoint's step when it struck
    seconds: float  # until every process that it should end had ended
    left: list[str] = field(default_factory=list)


class Flow:
    """Runs of the flow in ``home`` that share a datastore."""

    def __init__(self, home: Path, *arguments: str, nodes: int, **variables: str) -> None:
        self.home, self.nodes = home, nodes
        self._environment = environment(home, **variables)
        (home / "run_id").unlink(missing_ok=True)
        self.process = start_flow(home, list(arguments), FLOW, **variables)

    # -- what is to be seen ----------------------------------------------------------------------------

    @property
    def log(self) -> str:
        return (self.home / "log").read_text(errors="replace")

    @property
    def run_id(self) -> str:
        return (self.home / "run_id").read_text()

    def outcome(self) -> dict[str, Any]:
        """Return metrics and the checkpoint step from which the finished training resumed."""
        read = subprocess.run(
            [sys.executable, "-c", READ_OUTCOME, f"FinetuneFlow/{self.run_id}"],
            cwd=self.home,
            env=self._environment,
            stdout=subprocess.PIPE,
            check=True,
            timeout=120,
        )
        return dict(pickle.loads(read.stdout))  # noqa: S301

    def losses(self) -> list[tuple[int, float]]:
        return [(row["step"], row["loss"]) for row in self.outcome()["metrics"]]

    def resumed_steps(self) -> list[int]:
        """Return for each attempt the step of the checkpoint from which it resumed, or 0."""
        attempts = self.log.partition("/train")[2].split("Task is starting (retry)")
        steps_found = [re.search(r"from the checkpoint of step (\d+)", attempt) for attempt in attempts]
        return [int(match[1]) if match else 0 for match in steps_found]

    def node(self, number: int) -> Node | None:
        """Wait for a rank of the node and return its training task."""
        work = Path(self._environment["FINETUNE_WORK_DIR"])
        for folder in work.glob(f"*/{self._own_id()}-train-*"):
            with contextlib.suppress(OSError, ValueError, psutil.Error):
                pid, created = (folder / "owner").read_text().split()
                if abs(psutil.Process(int(pid)).create_time() - float(created)) < 1:
                    gpu_node = Node(folder, int(pid))
                    if gpu_node.rank_pid(number) is not None:
                        return gpu_node
        return None

    def _own_id(self) -> str:
        return self.run_id if (self.home / "run_id").exists() else "none-yet"

    def committed(self) -> int:
        """Return the step of the newest complete checkpoint of this run, or 0."""
        store = Path(self._environment["METAFLOW_DATASTORE_SYSROOT_LOCAL"]) / ".metaflow" / "FinetuneFlow"
        folders = store.glob(f"finetune/checkpoints/{self._own_id()}/*/step-*/checkpoint.json")
        return max((int(path.parent.name[5:13]) for path in folders), default=0)

    # -- waiting ---------------------------------------------------------------------------------------

    def wait_for(self, what: Callable[[], Any], within: float = 240, pause: float = 0.05) -> Any:
        deadline = time.monotonic() + within
        while True:
            value = what()
            if value:
                return value
            if self.process.poll() is not None:
                raise AssertionError(f"the run ended first:\n{self.log}")
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {within:g} s:\n{self.log}")
            time.sleep(pause)

    def wait_until(self, moment: Moment, rank: int = 0) -> None:
        """Wait for a moment of the current or next attempt."""
        node = self._wait_for_nodes()[rank]
        start = self.committed()
        if moment == "in the middle":
            self.wait_for(lambda: self.committed() > start and node.step() % EVERY)
        elif moment == "in a checkpoint":
            self.wait_for(self.committed)
            self.wait_for(lambda: node.writes_checkpoint(rank), pause=0.001)

    def _wait_for_nodes(self) -> list[Node]:
        matches: list[Node] = []

        def all_exist() -> bool:
            matches[:] = [node for number in range(self.nodes) if (node := self.node(number))]
            return len(matches) == self.nodes

        self.wait_for(all_exist)
        return matches

    def end(self, within: float = 400) -> int:
        """Wait for the run and return its exit status; no process may be left."""
        try:
            code = self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended within {within:g} s:\n{self.log}") from None
        leftover = left_behind(self.home)
        assert not leftover, leftover
        return code

    # -- hurting ---------------------------------------------------------------------------------------

    def pid_of(self, who: Who, rank: int = 0) -> int:
        """``rank`` is also the number of the node: each node has one rank."""
        if who == "scheduler":
            return self.process.pid
        node = self.node(rank)
        assert node is not None, self.log
        pid = {"rank": node.rank_pid(rank), "agent": node.agent_pid()}.get(who, node.task_pid)
        assert pid is not None, self.log
        return pid

    def kill(self, who: Who, moment: Moment, rank: int = 0, within: float = 180) -> Ended:
        """Send kill -9 at a moment, then wait until the attempt (or run) has ended."""
        self._wait_for_nodes()
        pid = self.pid_of(who, rank)
        doomed = [*self._belonging()]  # looked up first: it takes longer than a checkpoint
        self.wait_until(moment, rank)
        os.kill(pid, signal.SIGKILL)
        return self._ending(doomed, who == "scheduler", within)

    def stop(self, how: Literal["Ctrl-C", "SIGINT", "SIGTERM"], within: float = 180) -> Ended:
        """Interrupt the run; Ctrl-C of a terminal also reaches its tasks."""
        doomed = [*self._belonging()]
        if how == "Ctrl-C":
            os.killpg(self.process.pid, signal.SIGINT)
        else:
            self.process.send_signal(signal.Signals[how])
        return self._ending(doomed, True, within)

    def _ending(self, doomed: list[psutil.Process], whole_run: bool, within: float) -> Ended:
        began = time.monotonic()
        committed = self.committed()
        if whole_run:
            self.process.wait(within)
        while (leftover := [p for p in doomed if _is_alive(p)]) and time.monotonic() - began < within:
            time.sleep(0.05)
        return Ended(committed, time.monotonic() - began, [_name(process) for process in leftover])

    def _belonging(self) -> Iterator[psutil.Process]:
        """Return all processes of the run except its scheduler, including the cleaners of its tasks."""
        processes_of_run = [p for p in left_behind(self.home, wait_s=0) if p.pid != self.process.pid]
        yield from processes_of_run
        pids = {str(process.pid) for process in processes_of_run}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                arguments = process.cmdline()
                if "launchers.cluster.processes" in arguments and arguments[-1] in pids:
                    yield process

    def clean_up(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for process in left_behind(self.home, wait_s=0):
            with contextlib.suppress(psutil.Error):
                process.kill()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()[-6:])
    except psutil.Error:
        return "?"
