"""The phases between pairs of nodes: the socket mesh, and the bandwidth of every pair in each direction."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from checklist.analysis import sharing
from checklist.analysis.baseline import DAY_S
from checklist.analysis.ceilings import Ceilings
from checklist.analysis.diagnosis import PASSES, diagnose, without_lost
from checklist.analysis.packet_loss import suspects
from checklist.analysis.paths import Paths
from checklist.analysis.screening import more_rounds, rates, slow_pairs
from checklist.analysis.second_pass import measure_again
from checklist.analysis.soundness import sound_pairs, unsound_times
from checklist.checks.collectives.pairs_probe import summary
from checklist.measurements import Pair, Probe, Unsound, record
from checklist.round_robin import ALL_PAIRS_UP_TO, Pairs, schedule
from checklist.run import sweep
from checklist.run.requests import Outcome
from checklist.run.session import Session
from checklist.suspects import first_pairs

PAIR_REPETITIONS = 5
SCREEN_BYTES, SCREEN_CUDA_BYTES = 4 << 20, 64 << 20  # of one message while all nodes send
SCREEN_PASSES = 4  # of which the best counts
SCREEN_TURN_S = 0.25  # more than turns of one distance take, all passes together, with a wide margin
_SECOND_LOOK_S = 15.0  # at pairs that the mesh found cut; one of them takes as long as a connection may


class PhaseSkipped(Exception):  # noqa: N818 - it is an answer
    """Reason that the phase cannot be measured here."""


def mesh(run: Session) -> str | None:
    """Phase 1: every node connects to every other."""
    leaders = _with_sinks(run)
    if len(leaders) < 2:
        raise PhaseSkipped(f"it takes two nodes, and {len(leaders)} can be reached")
    limits = run.limits
    arguments = {
        rank: _reach(run, {other: there for other, there in leaders.items() if other != node})
        for node, rank in leaders.items()
    }
    waves = 1 + len(leaders) // 16
    limit = waves * (limits.connect + limits.bulk) + limits.operation
    outcome = run.ask("reach", arguments, limit_s=limit)
    for reply in outcome.replies.values():
        run.got.probes += [record(Probe, probe) for probe in reply]
    _second_look(run)
    return trouble(outcome)


def _second_look(run: Session) -> None:
    """Pairs that failed are tried again, few at a time: all of many nodes at once may just be too much.

    Only a few are waited for: if most pairs are cut, the first pass is conclusive.
    """
    left = [probe for probe in run.got.probes if not _reached(probe)]
    ends = min(run.phase_ends, time.monotonic() + _SECOND_LOOK_S)
    cleared: dict[tuple[int, int], Probe] = {}
    while left and time.monotonic() < ends:
        leaders = _with_sinks(run)
        turn: dict[int, int] = {}  # destinations by source, each node once on either side
        for probe in left:
            if probe.src not in turn and probe.dst not in turn.values():
                turn[probe.src] = probe.dst
        left = [probe for probe in left if turn.get(probe.src) != probe.dst]
        arguments = {
            leaders[src]: _reach(run, {dst: leaders[dst]})
            for src, dst in turn.items()
            if src in leaders and dst in leaders
        }
        limits = run.limits
        outcome = run.ask("reach", arguments, limit_s=limits.connect + limits.bulk + limits.operation)
        for reply in outcome.replies.values():
            again = record(Probe, reply[0])
            if _reached(again):
                cleared[again.src, again.dst] = replace(again, tries=2)
    if cleared:
        run.got.probes = [cleared.get((probe.src, probe.dst), probe) for probe in run.got.probes]
        run.notes.append(f"Connections that succeeded only on the second try: {len(cleared)}.")


def _reach(run: Session, peers: dict[int, int]) -> dict[str, Any]:
    """Return the first ranks of the other nodes for one node, by node."""
    return {
        "peers": {str(node): _sink(run, rank) for node, rank in peers.items()},
        "connect_s": run.limits.connect,
        "bulk_s": run.limits.bulk,
    }


def _reached(probe: Probe) -> bool:
    return probe.connected and probe.bulk_ok is not False


def pairs(run: Session) -> str | None:
    """Phase 4: rounds of pairs, each direction alone; then what was slow again, with nothing else running."""
    refuse_busy(run)
    leaders = _with_sinks(run)
    if len(leaders) < 2:
        raise PhaseSkipped(f"it takes two nodes, and {len(leaders)} can be reached")
    order = _by_name(run, leaders)
    problem = _suspects(run, order)
    number = 2 * len(run.got.pairs)
    found = _screened(run, order)
    problem = found.problem or problem
    for one in (*schedule(len(order), seed=run.options.seed, night=_night(run)), *found.rounds):
        couples = [(order[a], order[b]) for a, b in one]
        if time.monotonic() > run.phase_ends:
            return "the time for the phase was over before all pairs were measured"
        problem = _round(run, couples, number, alone=False) or problem
        number += 2
    count = max(leaders) + 1
    sockets = run.backend != "nccl" and not run.rendezvous.simulated
    ceilings = Ceilings.by_facts(run.got.facts.values(), sockets=sockets)
    paths = Paths.of(run.got.facts.values(), count)
    for _ in range(PASSES):
        lost = {hang.node for hang in run.hangs}
        known = without_lost(sound_pairs(run.got.pairs, ceilings), lost)
        again = tuple(dict.fromkeys((*diagnose(known, count, paths=paths).again, *suspects(known))))
        if not again:
            break
        second = _SecondPass(run=run, number=number)
        if not measure_again(again, count, second.alone, second.group, second.accept):
            return "the time for the phase was over before the suspects were measured again"
        number, problem = second.number, second.problem or problem
    return _repeated(run, ceilings, number) or problem


@dataclass(kw_only=True)
class _SecondPass:
    """One pass of measuring suspects again (checklist/analysis/second_pass.py)."""

    run: Session
    number: int
    problem: str | None = None

    def alone(self, pair: tuple[int, int]) -> float | None:
        """Measure one pair with nothing else running; None if the phase's time ran out."""
        return self._measure([pair]).get(pair)

    def group(self, pairs: Pairs) -> dict[tuple[int, int], float]:
        """Measure disjoint pairs at once; empty if the phase's time ran out."""
        before = len(self.run.got.pairs)
        measured = self._measure(list(pairs))
        self.run.got.pairs[before:] = [
            replace(pair, alone=False, repeat="group") for pair in self.run.got.pairs[before:]
        ]
        return measured

    def accept(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Let this pass's grouped figures of these pairs count as alone."""
        accepted = set(pairs)
        self.run.got.pairs = [
            replace(pair, alone=True)
            if pair.repeat == "group" and not pair.alone and (pair.src, pair.dst) in accepted
            else pair
            for pair in self.run.got.pairs
        ]

    def _measure(self, pairs: list[tuple[int, int]]) -> dict[tuple[int, int], float]:
        if time.monotonic() > self.run.phase_ends:
            return {}
        before = len(self.run.got.pairs)
        self.problem = _round(self.run, pairs, self.number, alone=True) or self.problem
        self.number += 1
        recorded = self.run.got.pairs[before:]
        return dict.fromkeys(pairs, 0.0) | {(p.src, p.dst): p.gbytes_per_s or 0.0 for p in recorded}


def _repeated(run: Session, ceilings: Ceilings, number: int) -> str | None:
    """Couples that were slow together and well alone, once more together; between them as many good ones."""
    lost = {hang.node for hang in run.hangs}
    found = sharing.repeat(without_lost(sound_pairs(run.got.pairs, ceilings), lost))
    if found is None:
        return None
    problem = None
    for _ in range(sharing.REPEATS):
        turns: tuple[tuple[Literal["shared", "control"], Pairs], ...]
        turns = (("control", found.controls), ("shared", found.shared))
        for kind, couples in turns:
            if time.monotonic() > run.phase_ends:
                return "the time for the phase was over before crowded rounds were repeated"
            before = len(run.got.pairs)
            problem = _round(run, list(couples), number, alone=False) or problem
            run.got.pairs[before:] = [replace(pair, repeat=kind) for pair in run.got.pairs[before:]]
            number += 2
    return problem


def _by_name(run: Session, leaders: Collection[int]) -> list[int]:
    """The nodes in an order that is the same every night, wherever the launcher has put rank 0."""
    names = {fact.node: fact.node_name or fact.hostname for fact in run.got.facts.values()}
    return sorted(leaders, key=lambda node: (names.get(node, ""), node))


def _night(run: Session) -> int:
    """Return the number of the night in UTC, by which rounds rotate without coordination between runs."""
    return int(run.began_unix // DAY_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Screened:
    """Rounds of what was slow when all sent at once."""

    rounds: tuple[Pairs, ...] = ()
    problem: str | None = None


def _screened(run: Session, order: Sequence[int]) -> _Screened:
    """Above 32 nodes, all pairs at once within seconds; see checklist.analysis.screening."""
    if len(order) <= ALL_PAIRS_UP_TO or (run.backend != "nccl" and run.rendezvous.simulated):
        return _Screened()
    store = sweep.store(run)
    if store is None:
        return _Screened(problem="rank 0 could not serve the store through which groups find each other")
    by_node: dict[int, list[int]] = {}
    for rank in run.ranks:
        by_node.setdefault(run.nodes[rank], []).append(rank)
    over = run.backend == "nccl"
    columns = min(len(by_node[node]) for node in order) if over else 1
    arguments = {
        by_node[node][column]: {
            "store": store,
            "group": f"screen/{column}",
            "backend": run.backend,
            "place": place,
            "count": len(order),
            "size": SCREEN_CUDA_BYTES if over else SCREEN_BYTES,
            "passes": SCREEN_PASSES,
            "limit_s": run.limits.operation,
        }
        for column in range(columns)
        for place, node in enumerate(order)
    }
    begin = time.monotonic()
    outcome = run.ask("screen", arguments, limit_s=run.limits.operation + len(order) * SCREEN_TURN_S)
    best = np.full((len(order), len(order) - 1), np.nan)
    for place, node in enumerate(order):
        replies = [outcome.replies.get(rank) for rank in by_node[node][:columns]]
        if all(reply is not None and all(math.isfinite(s) and s > 0 for s in reply) for reply in replies):
            best[place] = np.array(replies, dtype=float).max(axis=0)  # of a node the slowest GPU
    slow = slow_pairs(rates(best, SCREEN_CUDA_BYTES if over else SCREEN_BYTES))
    rounds = more_rounds(slow)
    ordered, seconds = len(order) * (len(order) - 1), time.monotonic() - begin
    run.notes.append(
        f"All {ordered:,} ordered pairs were timed at once in {seconds:.0f} s; of {len(slow):,} pairs that "
        f"were slow then {sum(map(len, rounds)):,} are measured again in rounds."
    )
    return _Screened(rounds=rounds, problem=trouble(outcome))


def _suspects(run: Session, order: Sequence[int]) -> str | None:
    """Measure the nodes that were suspected before the run, first and alone."""
    names = {fact.node: (fact.node_name, fact.hostname) for fact in run.got.facts.values()}
    suspects = {node for node in order if set(names.get(node, ())) & set(run.options.suspects)}
    problem = None
    for number, couple in enumerate(first_pairs(suspects, order)):
        problem = _round(run, [couple], number, alone=True) or problem
    return problem


def refuse_busy(run: Session) -> None:
    busy = [fact for fact in run.got.facts.values() if run.device == "cuda" and fact.gpu_processes]
    if busy:
        first = busy[0]
        raise PhaseSkipped(
            f"the GPU of rank {first.rank} on {first.node_name or first.hostname} is used by "
            f"{first.gpu_processes} other processes"
        )


def trouble(outcome: Outcome) -> str | None:
    """Return the reason why not all ranks replied to a request; None if all did."""
    if outcome.why is not None:
        return outcome.why
    return next((f"rank {rank}: {error}" for rank, error in sorted(outcome.errors.items())), None)


# -- their parts ---------------------------------------------------------------------------------------


def _round(run: Session, couples: list[tuple[int, int]], number: int, *, alone: bool) -> str | None:
    """All couples at once; unless ``alone``, first one direction and then the other."""
    if run.backend == "nccl":
        return _exchange(run, couples, number, alone=alone)
    problem = None
    # What the mesh has seen fail is tried again, but no one waits long for it.
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
                "repetitions": PAIR_REPETITIONS,
                "connect_s": run.limits.connect,
                "limit_s": run.limits.bulk if (src, dst) in known else run.limits.operation / 2,
            }
        outcome = run.ask("send", arguments, limit_s=run.limits.operation)
        for src, dst in directed:
            reply = outcome.replies.get(leaders[src]) if src in leaders else None
            error = (
                "the node is gone" if src not in leaders else outcome.errors.get(leaders[src], outcome.why)
            )
            if reply is None or not _unsound(run, src, dst, {leaders[src]: reply["seconds"]}):
                _pair(run, src, dst, number + turn, reply, error, alone)
        problem = problem or trouble(outcome)
    return problem


def _pair(run: Session, src: int, dst: int, number: int, reply: Any, error: str | None, alone: bool) -> None:
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
            rails=reply.get("rails", ()) if reply is not None else (),
            segments=reply.get("segments") if reply is not None else None,
            retransmitted=reply.get("retransmitted") if reply is not None else None,
            alone=alone,
            error=None if best is not None else error or "it was not measured",
        )
    )


def _unsound(run: Session, src: int, dst: int, reported: Mapping[int, Sequence[float]]) -> list[Unsound]:
    """Ranks of ``src`` whose seconds cannot be: noted, and nothing is made of them."""
    found = [
        one
        for rank, seconds in reported.items()
        for one in unsound_times(seconds, check="pairs", what="seconds", node=src, rank=rank, dst=dst)
    ]
    run.got.unsound += found
    return found


def _exchange(run: Session, couples: list[tuple[int, int]], number: int, *, alone: bool) -> str | None:
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
                "repetitions": PAIR_REPETITIONS,
                "limit_s": limit,
            }
            arguments[left] = {**common, "first": True}
            arguments[right] = {**common, "first": False}
    outcome = run.ask("exchange", arguments, limit_s=limit)
    for a, b in couples:
        for turn, (src, dst) in enumerate([(a, b)] if alone else [(a, b), (b, a)]):
            replies = {rank: outcome.replies.get(rank) for rank in by_node.get(src, ())}
            reported = {rank: reply["there"] for rank, reply in replies.items() if reply is not None}
            if not _unsound(run, src, dst, reported):
                together, why = _together([*replies.values()]), outcome.why or "a GPU of the pair failed"
                _pair(run, src, dst, number + turn, together, why, alone)
    return trouble(outcome)


def _together(replies: list[Any]) -> dict[str, Any] | None:
    """The GPUs of a node as one sender: all bytes, in the time of the slowest."""
    if not replies or any(reply is None for reply in replies):
        return None
    seconds = [max(times) for times in zip(*(reply["there"] for reply in replies), strict=False)]
    rails = tuple(float(f"{summary(reply['there'], reply['bytes'])[0]:.4g}") for reply in replies)
    return {
        "seconds": seconds,
        "bytes": sum(reply["bytes"] for reply in replies),
        "error": None,
        "rails": rails if len(rails) > 1 else (),
    }


def _with_sinks(run: Session) -> dict[int, int]:
    """Each node's first rank, where it takes what others send."""
    without_sink = {
        rank: {"address": run.addresses[rank]}
        for rank in run.leaders.values()
        if run.addresses.get(rank) and rank not in run.sinks
    }
    if without_sink:
        outcome = run.ask("listen", without_sink, limit_s=run.limits.operation)
        run.sinks.update(outcome.replies)
        for rank, error in outcome.errors.items():
            run.notes.append(f"Rank {rank} cannot listen on {run.addresses[rank]}: {error}.")
    return {node: rank for node, rank in run.leaders.items() if rank in run.sinks}


def _sink(run: Session, rank: int) -> tuple[str, int]:
    return run.addresses[rank], run.sinks[rank]
