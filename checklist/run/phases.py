"""Phases of a run. Each function returns None, or the reason why the phase could not be completed."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

from checklist.checks.gpu import gpus_probe
from checklist.checks.host.counters import OF_CPU, growth
from checklist.measurements import (
    PHASES,
    Counters,
    Diagnosed,
    Facts,
    GpuHealth,
    Local,
    PhaseName,
    Repeated,
    Transport,
    record,
)
from checklist.options import Options
from checklist.reference import check_node
from checklist.round_robin import ALL_PAIRS_UP_TO
from checklist.run import pairing, sweep
from checklist.run.control import Limits
from checklist.run.open_ports import try_ports
from checklist.run.pairing import PhaseSkipped, failure_reason, pairs, refuse_busy
from checklist.run.session import Session

__all__ = ["DO", "PHASES", "PhaseSkipped", "limits_of"]
_LEAVE_S = 10.0
REPEAT_SHARE = 0.2  # share of the load's time for products that are compared bitwise
_LOST_S, _LOST_OF_MANY_S = 10.0, 30.0  # silence after which a node counts as lost


def limits_of(options: Options) -> Limits:
    """Return the control channel's time limits for these options."""
    run = sum(options.limit_s(phase) for phase in options.phases)
    # Every node sends to rank 0 twice a second; with many nodes, a message may be late without a lost node
    lost_after = _LOST_S if options.nodes <= ALL_PAIRS_UP_TO else _LOST_OF_MANY_S
    return Limits(
        rendezvous=options.start_limit_s, operation=options.hang_limit_s, run=run, lost_after=lost_after
    )


def facts(run: Session) -> str | None:
    """Phase 0: facts of each rank, and the health of its GPU before the load."""
    if run.options.device == "cuda" or (run.options.device == "auto" and gpus_probe.list_gpus().uuids):
        run.device, run.backend = "cuda", "nccl"
    arguments = {"backend": run.backend, "route_to": run.rendezvous.host}
    outcome = run.request("facts", dict.fromkeys(run.ranks, arguments), limit_s=run.limits.operation)
    for rank, reply in outcome.replies.items():
        run.results.facts[rank] = record(Facts, reply["facts"])
        run.addresses[rank] = reply["address"] or ""
        if not reply["usable"]:
            run.unusable[rank] = reply["facts"]["nic_reason"]
    for rank, (offset, error) in run.clocks().items():
        if rank in run.results.facts:
            run.fact(rank, clock_offset_s=offset, clock_offset_error_s=error)
    check_node(run.options.reference_node, run.results.facts.values())
    _health(run, "before")
    return failure_reason(outcome)


def diag(run: Session) -> str | None:
    """Run NVIDIA's diagnostic after phase 1, by one rank per node, while the GPUs are idle."""
    if run.device != "cuda":
        raise PhaseSkipped("the run uses no GPUs")
    refuse_busy(run)
    left_s = max(1.0, run.phase_ends - time.monotonic() - 2 * _LEAVE_S)
    arguments = {
        rank: {"gpus": _gpus_of(run, node), "level": run.options.effort.dcgm_level, "limit_s": left_s}
        for node, rank in run.leaders.items()
    }
    outcome = run.request("diagnose", arguments, limit_s=left_s + _LEAVE_S)
    run.results.diagnosed += [record(Diagnosed, reply) for reply in outcome.replies.values()]
    return failure_reason(outcome)


def mesh(run: Session) -> str | None:
    """Phase 1: every node connects to every other node, then to sampled ports of two of them."""
    problem = pairing.mesh(run)
    if any(check.name == "open-ports" for check in run.options.checks) and not run.rendezvous.simulated:
        try_ports(run)
    return problem


def node(run: Session) -> str | None:
    """Phase 2: each rank by itself, all at once as in training; then the health of its GPU."""
    refuse_busy(run)
    effort = run.options.effort
    arguments = {
        "device": run.device,
        "checks": [check.name for check in run.options.checks if check.phase == "node"],
        "load_s": effort.load_s,
    }
    limit = effort.load_s + 3 * run.limits.operation
    size = run.options.storage_bytes or effort.storage_bytes
    folders = {rank: _folders(run, rank) for rank in run.ranks}
    by_rank = {rank: {**arguments, "folders": {**folders[rank], "size": size}} for rank in run.ranks}
    outcome = run.request("local", by_rank, limit_s=limit)
    for reply in outcome.replies.values():
        run.results.locals += [record(Local, local) for local in reply]
    if outcome.unfinished:  # killed, perhaps in the middle of a file
        unfinished = {rank: folders[rank] for rank in outcome.unfinished if rank in run.ranks}
        _grant(run)
        run.request("remove", unfinished, limit_s=_LEAVE_S)
    error = _repeat(run)
    _health(run, "after")
    return failure_reason(outcome) or error


def _repeat(run: Session) -> str | None:
    """Repeat the same matrix product right after the load, while the GPUs are hot."""
    if not any(check.name == "corruption" for check in run.options.checks):
        return None
    seconds = REPEAT_SHARE * run.options.effort.load_s
    arguments = {"device": run.device, "seconds": seconds}
    limit = seconds + run.limits.operation
    outcome = run.request("repeat", dict.fromkeys(run.ranks, arguments), limit_s=limit)
    for reply in outcome.replies.values():
        run.results.repeated += [record(Repeated, one) for one in reply]
    return failure_reason(outcome)


def world(run: Session) -> str | None:
    """Phase 3: collectives over all ranks."""
    refuse_busy(run)
    ranks = run.ranks
    if len(ranks) < run.rendezvous.world:
        raise PhaseSkipped(f"{run.rendezvous.world - len(ranks)} of {run.rendezvous.world} ranks are missing")
    if len(ranks) < 2:
        raise PhaseSkipped("two ranks are needed")
    _require_connectivity(run)
    problem = _join(run, ranks)
    if problem is None:
        problem = sweep.correctness(run, ranks) or sweep.sweep(run, ranks)
    if problem is None and run.backend == "nccl":
        _transport(run, ranks)
    leave_error = problem or failure_reason(
        run.request("leave", {rank: {} for rank in ranks}, limit_s=_LEAVE_S, collective=True)
    )
    if leave_error is not None:
        run.restart(tuple(rank for rank in ranks if rank in run.ranks))  # their group cannot be used any more
    return problem


def with_counters(run: Session, name: PhaseName) -> str | None:
    """Run the phase; if it loads the network, record the growth of the hosts' counters."""
    counters_before = _counters(run) if name in ("node", "world", "pairs") else {}
    try:
        return DO[name](run)
    finally:
        _grant(run)
        counters_after = _counters(run) if counters_before else {}
        for rank, reading in counters_after.items():
            if rank in counters_before:
                increase = growth(counters_before[rank], reading)
                if name == "node":  # the network is not under test, e.g. uploads to the datastore
                    increase = {counter: increase[counter] for counter in OF_CPU}
                increase = {"node": run.nodes[rank], "phase": name, **increase}
                run.results.counters.append(record(Counters, increase))


DO: dict[PhaseName, Callable[[Session], str | None]] = {
    "facts": facts,
    "mesh": mesh,
    "diag": diag,
    "node": node,
    "world": world,
    "pairs": pairs,
}


def _grant(run: Session) -> None:
    """Extend the phase for cleaning up, even if its time is used up."""
    run.phase_ends = max(run.phase_ends, time.monotonic() + _LEAVE_S)


def _join(run: Session, ranks: tuple[int, ...]) -> str | None:
    store = sweep.store(run)
    if store is None:
        return "rank 0 could not serve the store through which groups find each other"
    arguments = {
        "where": store,
        "group": "world",
        "backend": run.backend,
        "world": len(ranks),
        "limit_s": run.limits.operation,
    }
    limit = 2 * run.limits.operation  # torch is imported by this, on all cores at once
    outcome = run.request("join", dict.fromkeys(ranks, arguments), limit_s=limit, collective=True)
    return failure_reason(outcome)


def _gpus_of(run: Session, node: int) -> list[str]:
    """Return the UUIDs of the GPUs that a node's ranks use."""
    facts = [fact for fact in run.results.facts.values() if fact.node == node]
    return [uuid for fact in facts for uuid in fact.gpu_uuids[fact.local_rank :][:1]]


def _folders(run: Session, rank: int) -> dict[str, Any]:
    """Return the folder of a rank for writing and reading, by name; None: not requested."""
    check_names = {check.name for check in run.options.checks}
    work_folder = str(run.options.directory or tempfile.gettempdir())
    return {
        "name": f".checklist-{run.scratch}-{rank}.tmp",
        "directory": work_folder if "storage" in check_names else None,
        "datastore": run.options.datastore if "datastore" in check_names else None,
    }


def _transport(run: Session, ranks: tuple[int, ...]) -> None:
    """Read the transport from NCCL's logs; the slowest network that any rank uses."""
    outcome = run.request("transport", {rank: {} for rank in ranks}, limit_s=run.limits.operation)
    transports = [record(Transport, reply) for _, reply in sorted(outcome.replies.items())]
    slow = [item for item in transports if item.network == "socket"]
    networked = [item for item in transports if item.network not in (None, "shm")]
    run.results.transport = next(iter([*slow, *networked, *transports]), None)


def _counters(run: Session) -> dict[int, Any]:
    """Return the host counters that each node's first rank reads, by rank."""
    nics = {
        rank: run.results.facts[rank].nic if rank in run.results.facts else None
        for rank in run.leaders.values()
    }
    return run.request(
        "counters", {rank: {"nic": nic} for rank, nic in nics.items()}, limit_s=_LEAVE_S
    ).replies


def _health(run: Session, when: str) -> None:
    if run.device != "cuda":
        return
    outcome = run.request(
        "health", {rank: {"when": when} for rank in run.ranks}, limit_s=run.limits.operation
    )
    run.results.health += [record(GpuHealth, state) for reply in outcome.replies.values() for state in reply]


def _require_connectivity(run: Session) -> None:
    """Skip the phase if hosts cannot reach each other: a collective would hang without a new finding."""
    if run.unusable:
        rank, reason = next(iter(sorted(run.unusable.items())))
        raise PhaseSkipped(f"a collective would hang: on rank {rank}, {reason}")
    gloo = run.backend == "gloo"
    failed = [probe for probe in run.results.probes if not probe.connected or (gloo and not probe.bulk_ok)]
    if failed:
        raise PhaseSkipped(f"a collective would hang: node {failed[0].src} cannot reach node {failed[0].dst}")
