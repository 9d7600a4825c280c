"""Coordinator of a run next to rank 0: runs the phases in order and collects their measurements."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from checklist.analysis.soundness import sound
from checklist.condensed import condensed_run
from checklist.measurements import (
    BROKEN_OFF,
    NOT_REQUESTED,
    Hang,
    Measurements,
    Phase,
    PhaseName,
    to_dict,
)
from checklist.options import Options
from checklist.run import phases
from checklist.run.control import End, Event, Hub, Limits
from checklist.run.rendezvous import Rendezvous
from checklist.run.session import Session
from estimator.errors import UserError
from estimator.formatting import format_clock
from estimator.terminal import print

PROGRESS_S = 10.0  # interval of progress lines
_PHASE_NAMES: dict[PhaseName, str] = {
    "facts": "facts of each node",
    "mesh": "connections between nodes",
    "diag": "NVIDIA's own diagnostic",
    "node": "each rank alone",
    "world": "collectives over all ranks",
    "pairs": "pairs of nodes",
}
_REPORTED_VARIABLES = ("NCCL_", "GLOO_", "FI_", "TORCH_NCCL_", "OMP_", "CUDA_VISIBLE_DEVICES")


class Coordinator(Session):
    """Coordinator of one run, in rank 0's node agent.

    ``on_measured`` receives the measurements so far whenever they may be the last; ``conclude`` derives the
    exit status from them.
    """

    def __init__(
        self,
        options: Options,
        rendezvous: Rendezvous,
        hub: Hub,
        limits: Limits,
        on_measured: Callable[[Measurements], None] | None = None,
        conclude: Callable[[Measurements], int] | None = None,
    ) -> None:
        super().__init__(options, rendezvous, hub, limits)
        self._on_measured, self._conclude = on_measured, conclude
        self.measured: Measurements | None = None  # complete measurements, set at the end
        self._phase_began: float | None = None
        self._finished = threading.Event()

    def run(self) -> None:
        """Execute the run; send the outcome to every node agent, and progress to standard error."""
        threading.Thread(target=self._report_progress, name="checklist-progress", daemon=True).start()
        try:
            self._conduct()
        finally:
            self._finished.set()

    def _conduct(self) -> None:
        try:
            self._gather()
            for name in phases.PHASES:
                self._phase(name)
                self._report_unfinished(BROKEN_OFF)
            measurements = self.measurements()
            self.measured = measurements
            status = None if self._conclude is None else self._conclude(measurements)
            # Only this process judges the run; other nodes do not need each of a million connections
            end = End(measurements=to_dict(condensed_run(measurements)), status=status)
        except UserError as error:
            end = End(error=error.problem, advice=error.advice)
        except Exception as error:  # noqa: BLE001 - other nodes wait for any outcome
            end = End(
                error=f"The checklist itself failed: {type(error).__name__}: {error}.",
                advice="This is a bug of the checklist: please report it.",
            )
        self.hub.send(end)

    def _report_progress(self) -> None:
        while not self._finished.wait(PROGRESS_S):
            print(f"checklist: {self.stage()}", file=sys.stderr, flush=True)

    def stage(self) -> str:
        """Current operation, its duration so far, and its time limit."""
        now = time.monotonic()
        if self._phase_began is None:
            waited = f"{format_clock(now - self._begin)} of at most {format_clock(self.limits.rendezvous)}"
            return f"{len(self.ranks)} of {self.rendezvous.world} ranks have joined, {waited}"
        started, name = self._phase_began, self.phase
        elapsed = f"{format_clock(now - started)} of at most {format_clock(self.phase_ends - started)}"
        count = {"world": len(self.results.collectives), "pairs": len(self.results.pairs)}.get(name)
        return f"{_PHASE_NAMES[name]}, {elapsed}" + ("" if count is None else f", {count} measured")

    def measurements(self) -> Measurements:
        """Return the measurements so far."""
        collected = self.results
        measurements = Measurements(
            started_unix=self.began_unix,
            seconds=time.monotonic() - self._begin,
            profile=self.options.profile,
            device="cuda" if self.device == "cuda" else "cpu",
            backend="nccl" if self.backend == "nccl" else "gloo",
            nodes_asked=self.options.nodes,
            gpus_per_node_asked=self.options.gpus_per_node
            or max(1, self.rendezvous.world // max(1, self.rendezvous.nodes)),
            local=self.rendezvous.simulated,
            facts=tuple(collected.facts[rank] for rank in sorted(collected.facts)),
            health=tuple(collected.health),
            probes=tuple(collected.probes),
            open_ports=tuple(collected.open_ports),
            locals=tuple(collected.locals),
            diagnosed=tuple(collected.diagnosed),
            repeated=tuple(collected.repeated),
            collectives=tuple(collected.collectives),
            pairs=tuple(collected.pairs),
            counters=tuple(collected.counters),
            hangs=tuple(self.hangs),
            phases=tuple(collected.phases),
            transport=collected.transport,
            environment={
                key: value for key, value in sorted(os.environ.items()) if key.startswith(_REPORTED_VARIABLES)
            },
            notes=tuple(self.notes),
            unsound=tuple(collected.unsound),
            hosts=dict(sorted(self.hosts.items())),
            callers=dict(sorted(self.callers.items())),
        )
        return sound(measurements)

    def lost(self, event: Event) -> None:
        """Report the measurements so far: a cluster may end all pods, this one too, seconds after
        losing one.
        """
        request = event.peer.request
        ranks = tuple(rank for rank in request.ranks if rank in self._awaited)  # others are recorded
        hangs = [
            Hang(
                rank=rank,
                node=request.node,
                phase=self.phase,
                op=self._operation,
                sequence=None,
                waited_s=0.0,
                kind="lost",
                detail=event.lost,
            )
            for rank in ranks
        ]
        reason = f"it had not ended when node {request.node} ({request.host}) was lost"
        self._report_unfinished(reason, hangs)

    def _report_unfinished(self, reason: str, hangs: list[Hang] | None = None) -> None:
        """Report what is known if nothing more arrives, and why the remaining phases did not end."""
        if self._on_measured is None:
            return
        measurements = self.measurements()
        done = {phase.name for phase in measurements.phases}
        unreported = tuple(
            Phase(name=name, status="failed", reason=reason)
            if name in self.options.phases
            else Phase(name=name, status="skipped", reason=NOT_REQUESTED)
            for name in phases.PHASES
            if name not in done
        )
        self._on_measured(
            replace(
                measurements,
                phases=(*measurements.phases, *unreported),
                hangs=(*measurements.hangs, *(hangs or ())),
            )
        )

    # -- phases ----------------------------------------------------------------------------------------

    def _gather(self) -> None:
        """Wait for all ranks; continue with those that joined."""
        deadline = time.monotonic() + self.limits.rendezvous
        while len(self.ranks) < self.rendezvous.world and time.monotonic() < deadline:
            if self.stopped.wait(0.05):
                return
        peers = self.hub.joined()
        self.nodes = {rank: peer.request.node for rank, peer in peers.items()}
        self.hosts = {peer.request.node: peer.request.host for peer in peers.values()}
        self.callers = {peer.request.node: peer.address for peer in peers.values()}
        missing = sorted(set(range(self.rendezvous.world)) - set(self.nodes))
        if missing:
            ranks, ports = ", ".join(map(str, missing[:20])), self.rendezvous.ports
            self.notes.append(
                f"Rank {ranks} did not join within {self.limits.rendezvous:g} s on ports {ports[0]} to "
                f"{ports[-1]} of this host. If it was started, its output shows whether they are blocked."
            )
        self.notes += [f"Rejected rank: {reason}." for reason in self.hub.refused()]

    def _phase(self, name: PhaseName) -> None:
        start = time.monotonic()
        self.phase, self.phase_ends, self._phase_began = name, start + self.options.limit_s(name), start
        if self.stopped.is_set() or name not in self.options.phases:
            self.results.phases.append(Phase(name=name, status="skipped", reason=NOT_REQUESTED))
            return
        self.send(self.ranks, "count")
        try:
            problem = phases.with_counters(self, name)
            status = "done" if problem is None else "failed"
        except phases.PhaseSkipped as skipped:
            problem, status = str(skipped), "skipped"
        seconds = time.monotonic() - start
        self.results.phases.append(
            Phase(name=name, status=status, seconds=seconds, reason=problem)  # type: ignore[arg-type]
        )
