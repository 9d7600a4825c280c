from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from estimator.models import resolve
from estimator.plan import Layout, Plan
from estimator.vocabulary import Device
from launchers.cluster.endpoint import choose_ports
from launchers.gang.job import TrainJob
from tests.lab.configs import config
from tests.launchers.engines.loop.runs import plan_of

ROOT = Path(__file__).resolve().parents[3]
ENGINES = "tests.launchers.gang.engines"
MARK = "FINETUNE_TEST_GANG"
RUN = "run/train/0"
SECRET = "of this test's gangs"


def make_plan(nodes: int, processes: int, device: Device = "cpu") -> Plan:
    layout = Layout(
        device=device,
        nodes=nodes,
        processes_per_node=processes,
        sharding="none",
        micro_batch_size=1,
        accumulation=1,
        seq_len=8,
        activation_checkpointing=False,
        precision="fp32",
        optimizer="adamw",
    )
    return plan_of(layout, "torchtune", "full")


def make_job(
    work_dir: Path, *, nodes: int = 1, processes: int = 1, device: Device = "cpu", **orders: Any
) -> TrainJob:
    hang = orders.pop("hang_timeout_s", 300)
    return TrainJob(
        plan=make_plan(nodes, processes, device),
        settings=config(
            {
                "engine_options": orders,
                "resources": {"hang_timeout_s": hang},
                "checkpoint_every": orders.get("every", 0),
            }
        ),
        model=resolve("tiny-llama"),
        model_dir=work_dir,
        data_dir=work_dir,
        work_dir=work_dir,
        total_steps=orders.get("steps", 5),
    )


@dataclass
class Gang:
    """Nodes of one gang, each a process on this machine."""

    folder: Path
    nodes: int = 1
    processes: int = 1
    device: Device = "cpu"
    orders: dict[str, Any] = field(default_factory=dict)
    timeouts: dict[str, float] = field(default_factory=dict)
    engine: str = "Stepper"
    store: bool = False
    join_timeout_s: float = 60.0
    grace_s: float = 0.0
    start_steps: dict[int, int] = field(default_factory=dict)
    main_host: str = "127.0.0.1"
    ports: list[int] = field(default_factory=lambda: list(choose_ports(local=True)))
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    tasks: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, node: int, run: str = RUN, forwarded_port: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        work_dir = self.folder / f"node-{node}"
        job = make_job(
            work_dir, nodes=self.nodes, processes=self.processes, device=self.device, **self.orders
        )
        job = dataclasses.replace(job, start_step=self.start_steps.get(node, 0))
        order = self.folder / f"order-{node}.json"
        order.write_text(
            json.dumps(
                {
                    "address": {
                        "node": node,
                        "nodes": self.nodes,
                        "main_host": self.main_host,
                        "ports": self.ports,
                        "secret": SECRET,
                        "run": run,
                        "join_timeout_s": self.join_timeout_s,
                    },
                    "job": str(job.save()),
                    "engine": f"{ENGINES}:{self.engine}",
                    "timeouts": {"rendezvous": 60.0, **self.timeouts},
                    "store": str(self.folder / "store") if self.store else None,
                    "grace_s": self.grace_s,
                }
            )
        )
        with (self.folder / f"task-{node}.log").open("wb") as log:
            self.tasks[node] = subprocess.Popen(
                [*forwarded_port, sys.executable, "-m", "tests.launchers.gang.node", str(order)],
                cwd=ROOT,
                env={**os.environ, MARK: self.mark},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self.tasks[node]

    def start_all(self) -> Gang:
        for node in range(self.nodes):
            self.start(node)
        return self

    def end(self, node: int, within: float = 90.0) -> dict[str, Any]:
        """Return how the call of a node ended."""
        self.tasks[node].wait(timeout=within)
        values: dict[str, Any] = json.loads((self.folder / f"order-{node}.end").read_text())
        return values

    def pids(self) -> dict[int, list[str]]:
        """Return all living processes of the gang, including tasks, with their command lines."""
        pids_by_node = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                        command = (entry / "cmdline").read_bytes().decode().split("\0")
                        pids_by_node[int(entry.name)] = command
        return pids_by_node

    def rank_pid(self, rank: int) -> int:
        folder = self.folder / f"node-{rank // self.processes}"
        return int(json.loads((folder / "ranks" / f"rank-{rank:05d}.json").read_text())["pid"])

    def agent_pid(self, node: int) -> int:
        task = self.tasks[node].pid
        agents = [
            pid
            for pid, command in self.pids().items()
            if "launchers.gang.agent" in command
            and int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == task
        ]
        return agents[0]

    def events(self, node: int) -> list[str]:
        path = self.folder / f"order-{node}.events"
        return path.read_text().splitlines() if path.exists() else []

    def wait_for(self, condition: Callable[[], Any], within: float = 90.0) -> None:
        deadline = time.monotonic() + within
        while True:
            with contextlib.suppress(OSError, IndexError, ValueError):
                if condition():
                    return
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.05)

    def wait_for_step(self, step: int, rank: int = 0) -> None:
        node = rank // self.processes
        self.wait_for(lambda: f"step {rank} {step}" in self.events(node))

    def wait_until_ended(self, within: float) -> float:
        """Return the seconds until no process of the gang is left; fails after ``within``."""
        start = time.monotonic()
        while pids_left := self.pids():
            assert time.monotonic() - start < within, pids_left
            time.sleep(0.05)
        return time.monotonic() - start

    def logs(self) -> str:
        paths = [*self.folder.glob("task-*.log"), *self.folder.glob("node-*/logs/agent.log")]
        return "\n".join(f"== {path}\n{path.read_text()[-2000:]}" for path in paths)

    def clean_up(self) -> None:
        for task in self.tasks.values():
            if task.poll() is None:
                task.kill()
                task.wait()
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Callable[..., Gang]]:
    gangs: list[Gang] = []

    def make(**values: Any) -> Gang:
        folder = tmp_path / f"gang-{len(gangs)}"
        folder.mkdir()
        gangs.append(Gang(folder=folder, **values))
        return gangs[-1]

    yield make
    for each in gangs:
        each.clean_up()
