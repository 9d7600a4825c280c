"""Monitoring of one node's agent and ranks from outside, through their files in the work folder."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from launchers.cluster.processes import is_running, relevant_tail, tail
from launchers.gang.control import Timeouts
from launchers.gang.failures import Failure, Kind
from launchers.gang.script_job import GangJob
from launchers.report.telemetry import (
    Evaluated,
    EvaluationImages,
    Event,
    Memory,
    Phase,
    Profiled,
    Step,
    Warned,
)

# torchrun logs "failed (exitcode: -9) local_rank: 0 (pid: 12)", and at its end "exitcode  : -9 (pid: 12)".
_EXIT = re.compile(r"exitcode\s*: (-?\d+)\)?[^\n]*?\(pid: (\d+)\)")
_EXIT_RANK = re.compile(r"exitcode: (-?\d+)\) local_rank: (\d+) ")
_EXIT_CODE_WAIT_S = 1.5
_MEMBERSHIP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
# Phases that read, write or merge a complete model, or write a trace, without intermediate telemetry
_LONG_PHASES = {"load": 4, "save": 4, "profile": 4}


@dataclass(slots=True)
class _Sign:
    """Newest telemetry of a rank, used to detect a hang."""

    seen: float  # monotonic
    at: float
    what: str = "nothing since its start"
    limit_factor: int = 1  # multiple of the settings' hang_timeout_s


class LocalRanks:
    """Ranks of one node. Yields each failure once, and detects when all have finished."""

    def __init__(
        self, job: GangJob, node: int, marker: str, agent: subprocess.Popen[bytes], timeouts: Timeouts
    ) -> None:
        layout = job.layout
        self._per_node = layout.processes_per_node
        self.ranks = range(node * self._per_node, (node + 1) * self._per_node)
        self._job = job
        self._node = node
        self._host = socket.gethostname()
        self._marker = marker
        self._agent = agent
        self._timeouts = timeouts
        self._hang_s = job.hang_timeout_s
        self._started = time.monotonic()
        self._oom_kills = oom_kills()
        self._signs: dict[int, _Sign] = {}  # by rank, from its start
        self._pids: dict[int, int] = {}
        self._missing_since: dict[int, tuple[float, float]] = {}  # rank -> (monotonic, epoch)
        self._reported: set[int | str] = set()
        self._cause_reported = False
        self._all_done_at: float | None = None

    def add(self, event: Event) -> None:
        """Record a telemetry event as a rank's sign of life."""
        limit_factor = 1
        if isinstance(event, Phase):
            description = f"phase {event.name!r}, step {event.step}"
            limit_factor = _LONG_PHASES.get(event.name, 1)
        elif isinstance(event, Step | Memory | Profiled):
            description = f"step {event.step}"
        elif isinstance(event, Evaluated):
            description = f"{event.done} of {event.rows} rows of the evaluation after step {event.step}"
        elif isinstance(event, EvaluationImages):
            description = f"pictures after step {event.step}"
        elif isinstance(event, Warned):
            description = "a warning"
        else:
            description = "it has joined"
        self._signs[event.rank] = _Sign(time.monotonic(), event.at, description, limit_factor)

    def is_done(self, rank: int) -> bool:
        return (self._job.work_dir / "ranks" / f"rank-{rank:05d}.done").exists()

    def finished(self) -> bool:
        """Whether all ranks have trained to the end, and their processes have exited or had time to."""
        if not all(self.is_done(rank) for rank in self.ranks):
            return False
        self._all_done_at = self._all_done_at or time.monotonic()
        processes_ended = not any(is_running(pid) for pid in self._read_pids().values())
        return processes_ended or time.monotonic() - self._all_done_at > self._timeouts.leave

    def failures(self) -> Iterator[Failure]:
        """Iterate over the failures since the last call."""
        for failure in self._all_failures():
            key = failure.rank if failure.rank is not None else failure.kind
            if key not in self._reported:
                self._reported.add(key)
                self._cause_reported = self._cause_reported or not failure.secondary
                yield failure

    def _all_failures(self) -> Iterator[Failure]:
        code = self._agent.poll()  # first, because a rank's error is on disk before its agent ends
        unfinished = [rank for rank in self.ranks if not self.is_done(rank)]
        for rank in self.ranks:
            failure = Failure.of_rank(
                self._job.work_dir / "errors" / f"rank-{rank:05d}.json", node=self._node, host=self._host
            )
            if failure is not None:
                yield failure
        if not unfinished:
            return
        if code is not None and code < 0:
            yield self._agent_failure(f"was ended by {signal_name(-code)}")
            return
        if not self._cause_reported:
            yield from self._dead(unfinished)
        if code is not None and not self._reported:
            yield self._ended_agent_failure(code)
        if code is None:
            yield from self._silent(unfinished)

    def _dead(self, unfinished: list[int]) -> Iterator[Failure]:
        pids, now = self._read_pids(), time.monotonic()
        dead = [rank for rank in unfinished if rank in pids and not is_running(pids[rank])]
        for rank in dead:
            self._missing_since.setdefault(rank, (now, time.time()))
        exits = _EXIT.findall(self._agent_log()) if dead else []
        codes = {int(pid): int(code) for code, pid in exits}
        for rank in dead:
            since, at = self._missing_since[rank]
            if pids[rank] in codes or now - since > _EXIT_CODE_WAIT_S:
                failure = self._dead_rank_failure(rank, codes.get(pids[rank]), at)
                # Once a rank has failed, torchrun ends the node's other ranks with SIGTERM
                ended = codes.get(pids[rank]) in (None, -signal.SIGTERM)
                secondary = ended and (len(dead) > 1 or bool(self._reported))
                yield replace(failure, secondary=secondary)

    def _dead_rank_failure(self, rank: int, code: int | None, at: float) -> Failure:
        out_of_memory = code == -signal.SIGKILL and (oom_kills() or 0) > (self._oom_kills or 0)
        if code is None:
            ending = "ended without an exit code"
        elif code >= 0:
            ending = f"ended with exit code {code} before the end of training"
        else:
            ending = f"was ended by {signal_name(-code)}"
            if out_of_memory:
                ending += ": by the kernel's out-of-memory killer"
            elif code == -signal.SIGKILL:
                ending += ": often the kernel's out-of-memory killer, or a manual kill -9"
        return self._failure(
            "rank", f"rank {rank} on {self._host} {ending}", at, rank, out_of_memory=out_of_memory
        )

    def _ended_agent_failure(self, code: int) -> Failure:
        """Describe an agent that ended by itself before any rank reported an error."""
        log = self._agent_log()
        match = _EXIT_RANK.search(log)
        if match is not None:
            return self._dead_rank_failure(self.ranks[int(match[2])], int(match[1]), time.time())
        if code == 0:
            return self._agent_failure("ended before its ranks had trained to the end")
        end = "\n".join(log.splitlines()[-20:])
        failure = self._agent_failure(f"ended with exit code {code}")
        return replace(failure, traceback=f"The end of its log:\n{end}")

    def _agent_failure(self, ending: str) -> Failure:
        message = f"the agent of node {self._node} on {self._host} {ending}"
        return Failure.now("agent", self._node, self._host, message)

    def _silent(self, unfinished: list[int]) -> Iterator[Failure]:
        now = time.monotonic()
        if now - self._started > self._timeouts.rendezvous:
            for rank in set(unfinished) - set(self._read_pids()):
                yield self._hung(rank, f"did not start within {self._timeouts.rendezvous:g} s", time.time())
        signs = self._signs
        silent = [
            rank
            for rank in unfinished
            if rank in signs and now - signs[rank].seen > self._hang_s * signs[rank].limit_factor
        ]
        if silent:
            rank = min(silent, key=lambda rank: self._signs[rank].at)
            sign = self._signs[rank]
            clock = time.strftime("%H:%M:%S", time.localtime(sign.at))
            description = (
                f"has been silent for {now - sign.seen:.0f} s, since {clock}; its last sign: {sign.what}"
            )
            yield self._hung(rank, description, sign.at)

    def _hung(self, rank: int, description: str, at: float) -> Failure:
        return self._failure("hang", f"rank {rank} on {self._host} {description}", at, rank)

    def _failure(
        self, kind: Kind, message: str, at: float, rank: int, *, out_of_memory: bool = False
    ) -> Failure:
        """Describe a rank's failure, with the end of its standard error."""
        local = rank - self.ranks[0]
        folders = (self._job.work_dir / "logs" / self._marker).glob(f"gang_*/attempt_0/{local}")
        log = "\n".join(filter(None, (relevant_tail(folder / "stderr.log") for folder in folders)))
        return Failure(
            kind=kind,
            node=self._node,
            host=self._host,
            at=at,
            rank=rank,
            message=message,
            traceback=f"The end of its standard error:\n{log}" if log else "",
            out_of_memory=out_of_memory,
        )

    def _read_pids(self) -> dict[int, int]:
        for rank in self.ranks:
            if rank not in self._pids:
                path = self._job.work_dir / "ranks" / f"rank-{rank:05d}.json"
                if path.exists():
                    values = json.loads(path.read_text())
                    self._pids[rank] = int(values["pid"])
                    if self._job.reports_from_start:
                        self._signs.setdefault(rank, _Sign(time.monotonic(), values["at"]))
        return self._pids

    def _agent_log(self) -> str:
        return tail(self._job.work_dir / "logs" / "agent.log", lines=200)


def signal_name(number: int) -> str:
    """Format a signal's name and number."""
    try:
        return f"{signal.Signals(number).name} ({number})"
    except ValueError:
        return f"signal {number}"


def oom_kills(membership: Path = _MEMBERSHIP, mount: Path = _CGROUPS) -> int | None:
    """Count the processes of this one's cgroup killed by the kernel for memory; None: unknown.

    Kernel documentation: ``oom_kill`` of ``memory.events`` (cgroup v2) and of ``memory.oom_control`` (v1).
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            kills = _counter(mount / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            kills = _counter(mount / "memory" / path.lstrip("/") / "memory.oom_control")
        else:
            continue
        if kills is not None:
            return kills
    return None


def _counter(file: Path) -> int | None:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    values = dict(line.partition(" ")[::2] for line in lines)
    return int(values["oom_kill"]) if values.get("oom_kill", "").isdigit() else None
