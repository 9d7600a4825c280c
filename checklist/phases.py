"""What is done in each phase. Each function returns None, or in words why the phase could not be finished."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from checklist import sweep
from checklist.circle import ALL_PAIRS_UP_TO, schedule
from checklist.control import Limits
from checklist.diagnosis import PASSES, diagnose
from checklist.losses import suspects
from checklist.measurements import (
    PHASES,
    Counters,
    Facts,
    GpuHealth,
    Local,
    Pair,
    PhaseName,
    Probe,
    Transport,
    record,
)
from checklist.options import Options
from checklist.probes import gpus
from checklist.probes.counters import growth
from checklist.probes.pairs import summary

if TYPE_CHECKING:
    from checklist.asking import Outcome
    from checklist.conductor import Conductor

__all__ = ["DO", "PHASES", "Skipped", "limits_of"]
_PAIR_REPETITIONS = 5
_LEAVE_S = 10.0
_LOST_S, _LOST_OF_MANY_S = 10.0, 30.0  # of silence


class Skipped(Exception):  # noqa: N818 - it is an answer
    """The phase can't tell anything here; why."""


def limits_of(options: Options) -> Limits:
    """The control channel's limits for a run with those options."""
    run = sum(options.limit_s(phase) for phase in options.phases)
    # Rank 0 hears from every node twice a second: of many, it may be late without being lost
    lost_after = _LOST_S if options.nodes <= ALL_PAIRS_UP_TO else _LOST_OF_MANY_S
    return Limits(
        rendezvous=options.start_limit_s, operation=options.hang_limit_s, run=run, lost_after=lost_after
    )


def facts(run: Conductor) -> str | None:
    """Phase 0: what each rank says of itself; and how its GPU is before the load."""
    if run.options.device == "cuda" or (run.options.device == "auto" and gpus.look().uuids):
        run.device, run.backend = "cuda", "nccl"
    arguments = {"backend": run.backend, "route_to": run.rendezvous.host}
    outcome = run.ask("facts", dict.fromkeys(run.ranks, arguments), limit_s=run.limits.operation)
    for rank, reply in outcome.replies.items():
        run.got.facts[rank] = record(Facts, reply["facts"])
        run.addresses[rank] = reply["address"] or ""
        if not reply["usable"]:
            run.unusable[rank] = reply["facts"]["nic_reason"]
    for rank, (offset, error) in run.clocks().items():
        if rank in run.got.facts:
            run.fact(rank, clock_offset_s=offset, clock_offset_error_s=error)
    _health(run, "before")
    return _trouble(outcome)


def mesh(run: Conductor) -> str | None:
    """Phase 1: every node connects to every other."""
    leaders = _with_sinks(run)
    if len(leaders) < 2:
        raise Skipped(f"it takes two nodes, and {len(leaders)} can be reached")
    limits = run.limits
    arguments = {
        rank: {
            "peers": {str(other): _sink(run, there) for other, there in leaders.items() if other != node},
            "connect_s": limits.connect,
            "bulk_s": limits.bulk,
        }
        for node, rank in leaders.items()
    }
    waves = 1 + len(leaders) // 16
    limit = waves * (limits.connect + limits.bulk) + limits.operation
    outcome = run.ask("reach", arguments, limit_s=limit)
    for reply in outcome.replies.values():
        run.got.probes += [record(Probe, probe) for probe in reply]
    return _trouble(outcome)


def node(run: Conductor) -> str | None:
    """Phase 2: each rank alone, all at once, as in training; and how its GPU is after that load."""
    _refuse_busy(run)
    effort = run.options.effort
    arguments = {
        "device": run.device,
        "checks": [check.name for check in run.options.checks if check.phase == "node"],
        "load_s": effort.load_s,
    }
    limit = effort.load_s + 3 * run.limits.operation
    size = run.options.storage_bytes or effort.storage_bytes
    places = {rank: _places(run, rank) for rank in run.ranks}
    told = {rank: {**arguments, "places": {**places[rank], "size": size}} for rank in run.ranks}
    outcome = run.ask("local", told, limit_s=limit)
    for reply in outcome.replies.values():
        run.got.locals += [record(Local, local) for local in reply]
    if outcome.unfinished:  # killed, perhaps in the middle of a file
        left = {rank: places[rank] for rank in outcome.unfinished if rank in run.ranks}
        run.ask("remove", left, limit_s=_LEAVE_S)
    _health(run, "after")
    return _trouble(outcome)


def world(run: Conductor) -> str | None:
    """Phase 3: collectives over all ranks."""
    _refuse_busy(run)
    ranks = run.ranks
    if len(ranks) < run.rendezvous.world:
        raise Skipped(f"{run.rendezvous.world - len(ranks)} of {run.rendezvous.world} ranks are not there")
    if len(ranks) < 2:
        raise Skipped("it takes two ranks")
    _refuse_cut(run)
    # A hang here would be everybody's: start from processes that nothing has happened to.
    problem = _join(run, ranks)
    if problem is None:
        problem = sweep.correctness(run, ranks) or sweep.sweep(run, ranks)
    if problem is None and run.backend == "nccl":
        _transport(run, ranks)
    left = problem or _trouble(
        run.ask("leave", {rank: {} for rank in ranks}, limit_s=_LEAVE_S, together=True)
    )
    if left is not None:
        run.restart(tuple(rank for rank in ranks if rank in run.ranks))  # their group can't be used any more
    return problem


def pairs(run: Conductor) -> str | None:
    """Phase 4: rounds of pairs, each direction alone; then what was slow again, with nothing else running."""
    _refuse_busy(run)
    leaders = _with_sinks(run)
    if len(leaders) < 2:
        raise Skipped(f"it takes two nodes, and {len(leaders)} can be reached")
    order = sorted(leaders)
    number, problem = 0, None
    for one in schedule(len(order), seed=run.options.seed):
        couples = [(order[a], order[b]) for a, b in one]
        if time.monotonic() > run.phase_ends:
            return "the time for the phase was over before all pairs were measured"
        problem = _round(run, couples, number, alone=False) or problem
        number += 2
    count = max(leaders) + 1
    for _ in range(PASSES):
        again = tuple(dict.fromkeys((*diagnose(run.got.pairs, count).again, *suspects(run.got.pairs))))
        for src, dst in again:
            if time.monotonic() > run.phase_ends:
                return "the time for the phase was over before the suspects were measured again"
            problem = _round(run, [(src, dst)], number, alone=True) or problem
            number += 1
        if not again:
            break
    return problem


def counted(run: Conductor, name: PhaseName) -> str | None:
    """Do the phase; where it loads the network, note what the hosts have counted meanwhile."""
    before = _counters(run) if name in ("world", "pairs") else {}
    try:
        return DO[name](run)
    finally:
        after = _counters(run) if before else {}
        for rank, reading in after.items():
            if rank in before:
                grown = {"node": run.nodes[rank], "phase": name, **growth(before[rank], reading)}
                run.got.counters.append(record(Counters, grown))


DO: dict[PhaseName, Callable[[Conductor], str | None]] = {
    "facts": facts,
    "mesh": mesh,
    "node": node,
    "world": world,
    "pairs": pairs,
}


# -- their parts ---------------------------------------------------------------------------------------


def _round(run: Conductor, couples: list[tuple[int, int]], number: int, *, alone: bool) -> str | None:
    """All couples at once; unless ``alone``, first one direction and then the other."""
    if run.backend == "nccl":
        return _exchange(run, couples, number, alone=alone)
    problem = None
    # What the mesh has seen fail is tried again, but nobody waits long for it.
    known = {(probe.src, probe.dst) for probe in run.got.probes if not probe.bulk_ok}
    for turn, directed in enumerate([couples] if alone else [couples, [(b, a) for a, b in couples]]):
        leaders = _with_sinks(run)
        size = run.options.effort.pair_cpu
        there = [(src, dst) for src, dst in directed if src in leaders and dst in leaders]
        arguments = {}
        for src, dst in there:
            address, port = _sink(run, leaders[dst])
            arguments[leaders[src]] = {
                "address": address,
                "port": port,
                "size": size,
                "repetitions": _PAIR_REPETITIONS,
                "connect_s": run.limits.connect,
                "limit_s": run.limits.bulk if (src, dst) in known else run.limits.operation / 2,
            }
        outcome = run.ask("send", arguments, limit_s=run.limits.operation)
        for src, dst in directed:
            reply = outcome.replies.get(leaders[src]) if src in leaders else None
            error = (
                "the node is gone" if src not in leaders else outcome.errors.get(leaders[src], outcome.why)
            )
            _pair(run, src, dst, number + turn, reply, error, alone)
        problem = problem or _trouble(outcome)
    return problem


def _pair(
    run: Conductor, src: int, dst: int, number: int, reply: Any, error: str | None, alone: bool
) -> None:
    best = slow = None
    if reply is not None:
        error = reply.get("error")
        if reply["seconds"]:
            best, slow = summary(reply["seconds"], reply["bytes"])
    run.got.pairs.append(
        Pair(
            src=src,
            dst=dst,
            round=number,
            gbytes_per_s=best,
            gbytes_per_s_p95=slow,
            bytes=reply["bytes"] if reply is not None else None,
            segments=reply.get("segments") if reply is not None else None,
            retransmitted=reply.get("retransmitted") if reply is not None else None,
            alone=alone,
            error=None if best is not None else error or "it was not measured",
        )
    )


def _exchange(run: Conductor, couples: list[tuple[int, int]], number: int, *, alone: bool) -> str | None:
    """Over NCCL: each GPU with its counterpart, in groups of two; a node's rate is its GPUs' together."""
    store = sweep.store(run)
    if store is None:
        return "rank 0 could not serve the store through which groups find each other"
    by_node: dict[int, list[int]] = {}
    for rank in run.ranks:
        by_node.setdefault(run.got.facts[rank].node, []).append(rank)
    limit = run.limits.operation
    arguments: dict[int, dict[str, Any]] = {}
    for a, b in couples:
        for left, right in zip(by_node.get(a, ()), by_node.get(b, ()), strict=False):
            common = {
                "store": store,
                "group": f"{number}/{left}-{right}",
                "size": run.options.effort.pair_cuda,
                "repetitions": _PAIR_REPETITIONS,
                "limit_s": limit,
            }
            arguments[left] = {**common, "first": True}
            arguments[right] = {**common, "first": False}
    outcome = run.ask("exchange", arguments, limit_s=limit)
    for a, b in couples:
        for turn, (src, dst) in enumerate([(a, b)] if alone else [(a, b), (b, a)]):
            replies = [outcome.replies.get(rank) for rank in by_node.get(src, ())]
            reply = _together(replies)
            _pair(run, src, dst, number + turn, reply, outcome.why or "a GPU of the pair failed", alone)
    return _trouble(outcome)


def _together(replies: list[Any]) -> dict[str, Any] | None:
    """The GPUs of a node as one sender: all bytes, in the time of the slowest."""
    if not replies or any(reply is None for reply in replies):
        return None
    seconds = [max(times) for times in zip(*(reply["there"] for reply in replies), strict=False)]
    return {"seconds": seconds, "bytes": sum(reply["bytes"] for reply in replies), "error": None}


def _with_sinks(run: Conductor) -> dict[int, int]:
    """Each node's first rank, where it takes what others send."""
    wanted = {
        rank: {"address": run.addresses[rank]}
        for rank in run.leaders.values()
        if run.addresses.get(rank) and rank not in run.sinks
    }
    if wanted:
        outcome = run.ask("listen", wanted, limit_s=run.limits.operation)
        run.sinks.update(outcome.replies)
        for rank, error in outcome.errors.items():
            run.notes.append(f"Rank {rank} can't listen on {run.addresses[rank]}: {error}.")
    return {node: rank for node, rank in run.leaders.items() if rank in run.sinks}


def _sink(run: Conductor, rank: int) -> tuple[str, int]:
    return run.addresses[rank], run.sinks[rank]


def _join(run: Conductor, ranks: tuple[int, ...]) -> str | None:
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
    outcome = run.ask("join", dict.fromkeys(ranks, arguments), limit_s=limit, together=True)
    return _trouble(outcome)


def _places(run: Conductor, rank: int) -> dict[str, Any]:
    """Where a rank writes and reads, and under which name; None: it was not asked for."""
    asked = {check.name for check in run.options.checks}
    work = str(run.options.work_directory or tempfile.gettempdir())
    return {
        "name": f".checklist-{run.scratch}-{rank}.tmp",
        "directory": work if "storage" in asked else None,
        "datastore": run.options.datastore if "datastore" in asked else None,
    }


def _transport(run: Conductor, ranks: tuple[int, ...]) -> None:
    """What the logs say; the slowest network that any rank uses."""
    outcome = run.ask("transport", {rank: {} for rank in ranks}, limit_s=run.limits.operation)
    found = [record(Transport, reply) for _, reply in sorted(outcome.replies.items())]
    slow = [one for one in found if one.network == "socket"]
    between = [one for one in found if one.network not in (None, "shm")]
    run.got.transport = next(iter([*slow, *between, *found]), None)


def _counters(run: Conductor) -> dict[int, Any]:
    """What each node's first rank reads of its host, by rank."""
    return run.ask("counters", {rank: {} for rank in run.leaders.values()}, limit_s=_LEAVE_S).replies


def _health(run: Conductor, when: str) -> None:
    if run.device != "cuda":
        return
    outcome = run.ask("health", {rank: {"when": when} for rank in run.ranks}, limit_s=run.limits.operation)
    run.got.health += [record(GpuHealth, reply) for reply in outcome.replies.values() if reply]


def _refuse_busy(run: Conductor) -> None:
    busy = [fact for fact in run.got.facts.values() if run.device == "cuda" and fact.gpu_processes]
    if busy:
        first = busy[0]
        raise Skipped(
            f"the GPU of rank {first.rank} on {first.node_name or first.hostname} is used by "
            f"{first.gpu_processes} other processes"
        )


def _refuse_cut(run: Conductor) -> None:
    """A collective over hosts that can't reach each other hangs, and tells no more than the mesh has told."""
    if run.unusable:
        rank, why = next(iter(sorted(run.unusable.items())))
        raise Skipped(f"a collective would hang: on rank {rank}, {why}")
    gloo = run.backend == "gloo"
    bad = [probe for probe in run.got.probes if not probe.connected or (gloo and not probe.bulk_ok)]
    if bad:
        raise Skipped(f"a collective would hang: node {bad[0].src} can't reach node {bad[0].dst}")


def _trouble(outcome: Outcome) -> str | None:
    """Why a request was not answered by all, in words."""
    if outcome.why is not None:
        return outcome.why
    return _first(f"rank {rank}: {error}" for rank, error in sorted(outcome.errors.items()))


def _first(texts: Iterable[str]) -> str | None:
    return next(iter(texts), None)
