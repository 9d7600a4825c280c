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
SCREEN_BYTES, SCREEN_CUDA_BYTES = 4 << 20, 64 << 20  # bytes of one message while all nodes send
SCREEN_PASSES = 4  # the best one counts
SCREEN_TURN_S = 0.25  # time limit for all passes of one ring distance, with a wide margin
_RETRY_S = 15.0  # time limit for retries of pairs that could not connect


class PhaseSkipped(Exception):  # noqa: N818 - a result, not an error
    """Reason that the phase cannot be measured here."""


def mesh(run: Session) -> str | None:
    """Phase 1: every node connects to every other."""
    leaders = _with_sinks(run)
    if len(leaders) < 2:
        raise PhaseSkipped(f"two nodes are needed, and {len(leaders)} can be reached")
    limits = run.limits
    arguments = {
        rank: _reach(run, {peer: address for peer, address in leaders.items() if peer != node})
        for node, rank in leaders.items()
    }
    waves = 1 + len(leaders) // 16
    limit = waves * (limits.connect + limits.bulk) + limits.operation
    outcome = run.request("reach", arguments, limit_s=limit)
    for reply in outcome.replies.values():
        run.results.probes += [record(Probe, probe) for probe in reply]
    _retry(run)
    return failure_reason(outcome)


def _retry(run: Session) -> None:
    """Retry failed pairs a few at a time, because connecting all nodes at once may overload a host.

    The time is limited: if most pairs are cut, the first pass is conclusive.
    """
    failed = [probe for probe in run.results.probes if not _reached(probe)]
    deadline = min(run.phase_ends, time.monotonic() + _RETRY_S)
    reachable: dict[tuple[int, int], Probe] = {}
    while failed and time.monotonic() < deadline:
        leaders = _with_sinks(run)
        batch: dict[int, int] = {}  # destinations by source, each node once on either side
        for probe in failed:
            if probe.src not in batch and probe.dst not in batch.values():
                batch[probe.src] = probe.dst
        failed = [probe for probe in failed if batch.get(probe.src) != probe.dst]
        arguments = {
            leaders[src]: _reach(run, {dst: leaders[dst]})
            for src, dst in batch.items()
            if src in leaders and dst in leaders
        }
        limits = run.limits
        outcome = run.request("reach", arguments, limit_s=limits.connect + limits.bulk + limits.operation)
        for reply in outcome.replies.values():
            repeated = record(Probe, reply[0])
            if _reached(repeated):
                reachable[repeated.src, repeated.dst] = replace(repeated, tries=2)
    if reachable:
        run.results.probes = [reachable.get((probe.src, probe.dst), probe) for probe in run.results.probes]
        run.notes.append(f"Connections that succeeded only on the second try: {len(reachable)}.")


def _reach(run: Session, peers: dict[int, int]) -> dict[str, Any]:
    """Return the arguments of a node's command reach: the sinks of its peers, and time limits."""
    return {
        "peers": {str(node): _sink(run, rank) for node, rank in peers.items()},
        "connect_s": run.limits.connect,
        "bulk_s": run.limits.bulk,
    }


def _reached(probe: Probe) -> bool:
    return probe.connected and probe.bulk_ok is not False


def pairs(run: Session) -> str | None:
    """Phase 4: rounds of pairs, one direction at a time; then slow pairs again, with nothing else running."""
    refuse_busy(run)
    leaders = _with_sinks(run)
    if len(leaders) < 2:
        raise PhaseSkipped(f"two nodes are needed, and {len(leaders)} can be reached")
    order = _by_name(run, leaders)
    problem = _measure_suspects(run, order)
    number = 2 * len(run.results.pairs)
    screened = _screen(run, order)
    problem = screened.problem or problem
    for pairs_of_round in (*schedule(len(order), seed=run.options.seed, night=_night(run)), *screened.rounds):
        node_pairs = [(order[a], order[b]) for a, b in pairs_of_round]
        if time.monotonic() > run.phase_ends:
            return "the time for the phase was over before all pairs were measured"
        problem = _round(run, node_pairs, number, alone=False) or problem
        number += 2
    count = max(leaders) + 1
    sockets = run.backend != "nccl" and not run.rendezvous.simulated
    ceilings = Ceilings.from_facts(run.results.facts.values(), sockets=sockets)
    paths = Paths.from_facts(run.results.facts.values(), count)
    for _ in range(PASSES):
        lost_nodes = {hang.node for hang in run.hangs}
        sound = without_lost(sound_pairs(run.results.pairs, ceilings), lost_nodes)
        to_repeat = tuple(dict.fromkeys((*diagnose(sound, count, paths=paths).again, *suspects(sound))))
        if not to_repeat:
            break
        second_pass = _SecondPass(run=run, number=number)
        if not measure_again(to_repeat, count, second_pass.alone, second_pass.group, second_pass.accept):
            return "the time for the phase was over before the suspects were measured again"
        number, problem = second_pass.number, second_pass.problem or problem
    return _repeat_shared(run, ceilings, number) or problem


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
        count = len(self.run.results.pairs)
        results = self._measure(list(pairs))
        self.run.results.pairs[count:] = [
            replace(pair, alone=False, repeat="group") for pair in self.run.results.pairs[count:]
        ]
        return results

    def accept(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Count this pass's grouped figures of these pairs as isolated."""
        accepted = set(pairs)
        self.run.results.pairs = [
            replace(pair, alone=True)
            if pair.repeat == "group" and not pair.alone and (pair.src, pair.dst) in accepted
            else pair
            for pair in self.run.results.pairs
        ]

    def _measure(self, pairs: list[tuple[int, int]]) -> dict[tuple[int, int], float]:
        if time.monotonic() > self.run.phase_ends:
            return {}
        count = len(self.run.results.pairs)
        self.problem = _round(self.run, pairs, self.number, alone=True) or self.problem
        self.number += 1
        recorded = self.run.results.pairs[count:]
        return dict.fromkeys(pairs, 0.0) | {(p.src, p.dst): p.gbytes_per_s or 0.0 for p in recorded}


def _repeat_shared(run: Session, ceilings: Ceilings, number: int) -> str | None:
    """Repeat the pairs that were slow only together, alternating with as many healthy pairs."""
    lost_nodes = {hang.node for hang in run.hangs}
    shared = sharing.select_repeat(without_lost(sound_pairs(run.results.pairs, ceilings), lost_nodes))
    if shared is None:
        return None
    problem = None
    for _ in range(sharing.REPEATS):
        rounds_to_run: tuple[tuple[Literal["shared", "control"], Pairs], ...]
        rounds_to_run = (("control", shared.controls), ("shared", shared.shared))
        for kind, node_pairs in rounds_to_run:
            if time.monotonic() > run.phase_ends:
                return "the time for the phase was over before crowded rounds were repeated"
            count = len(run.results.pairs)
            problem = _round(run, list(node_pairs), number, alone=False) or problem
            run.results.pairs[count:] = [replace(pair, repeat=kind) for pair in run.results.pairs[count:]]
            number += 2
    return problem


def _by_name(run: Session, leaders: Collection[int]) -> list[int]:
    """Sort the nodes by name, so that the order is the same every night wherever rank 0 runs."""
    names = {fact.node: fact.node_name or fact.hostname for fact in run.results.facts.values()}
    return sorted(leaders, key=lambda node: (names.get(node, ""), node))


def _night(run: Session) -> int:
    """Return the number of the night in UTC, by which rounds rotate without coordination between runs."""
    return int(run.began_unix // DAY_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Screened:
    """Rounds of pairs that were slow when all nodes sent at once."""

    rounds: tuple[Pairs, ...] = ()
    problem: str | None = None


def _screen(run: Session, order: Sequence[int]) -> _Screened:
    """Screen all pairs at once within seconds, above 32 nodes; see checklist.analysis.screening."""
    if len(order) <= ALL_PAIRS_UP_TO or (run.backend != "nccl" and run.rendezvous.simulated):
        return _Screened()
    store = sweep.store(run)
    if store is None:
        return _Screened(problem="rank 0 could not serve the store through which groups find each other")
    by_node: dict[int, list[int]] = {}
    for rank in run.ranks:
        by_node.setdefault(run.nodes[rank], []).append(rank)
    on_gpu = run.backend == "nccl"
    columns = min(len(by_node[node]) for node in order) if on_gpu else 1
    arguments = {
        by_node[node][column]: {
            "store": store,
            "group": f"screen/{column}",
            "backend": run.backend,
            "position": index,
            "count": len(order),
            "size": SCREEN_CUDA_BYTES if on_gpu else SCREEN_BYTES,
            "passes": SCREEN_PASSES,
            "limit_s": run.limits.operation,
        }
        for column in range(columns)
        for index, node in enumerate(order)
    }
    start = time.monotonic()
    limit = 2 * run.limits.operation + len(order) * SCREEN_TURN_S  # torch is imported by this, as for "join"
    outcome = run.request("screen", arguments, limit_s=limit)
    best = np.full((len(order), len(order) - 1), np.nan)
    for index, node in enumerate(order):
        replies = [outcome.replies.get(rank) for rank in by_node[node][:columns]]
        if all(reply is not None and all(math.isfinite(s) and s > 0 for s in reply) for reply in replies):
            best[index] = np.array(replies, dtype=float).max(axis=0)  # of a node the slowest GPU
    slow = slow_pairs(rates(best, SCREEN_CUDA_BYTES if on_gpu else SCREEN_BYTES))
    rounds = more_rounds(slow)
    ordered, seconds = len(order) * (len(order) - 1), time.monotonic() - start
    run.notes.append(
        f"All {ordered:,} ordered pairs were timed at once in {seconds:.0f} s; of {len(slow):,} pairs that "
        f"were slow then {sum(map(len, rounds)):,} are measured again in rounds."
    )
    return _Screened(rounds=rounds, problem=failure_reason(outcome))


def _measure_suspects(run: Session, order: Sequence[int]) -> str | None:
    """Measure the nodes that were suspected before the run, first and alone."""
    names = {fact.node: (fact.node_name, fact.hostname) for fact in run.results.facts.values()}
    suspects = {node for node in order if set(names.get(node, ())) & set(run.options.suspects)}
    problem = None
    for number, node_pair in enumerate(first_pairs(suspects, order)):
        problem = _round(run, [node_pair], number, alone=True) or problem
    return problem


def refuse_busy(run: Session) -> None:
    """Raise PhaseSkipped if other processes use a GPU of the run."""
    occupied = [fact for fact in run.results.facts.values() if run.device == "cuda" and fact.gpu_processes]
    if occupied:
        first = occupied[0]
        raise PhaseSkipped(
            f"the GPU of rank {first.rank} on {first.node_name or first.hostname} is used by "
            f"{first.gpu_processes} other processes"
        )


def failure_reason(outcome: Outcome) -> str | None:
    """Return the reason why not all ranks replied to a request; None if all did."""
    if outcome.reason is not None:
        return outcome.reason
    return next((f"rank {rank}: {error}" for rank, error in sorted(outcome.errors.items())), None)


def _round(run: Session, node_pairs: list[tuple[int, int]], number: int, *, alone: bool) -> str | None:
    """Measure all pairs at once; unless ``alone``, first one direction and then the other."""
    if run.backend == "nccl":
        return _exchange(run, node_pairs, number, alone=alone)
    problem = None
    # Pairs that failed in the mesh phase are tried again, with a shorter time limit
    blocked = {(probe.src, probe.dst) for probe in run.results.probes if not probe.bulk_ok}
    for index, directed in enumerate(
        [node_pairs] if alone else [node_pairs, [(b, a) for a, b in node_pairs]]
    ):
        leaders = _with_sinks(run)
        size = run.options.effort.pair_cpu
        present = [(src, dst) for src, dst in directed if src in leaders and dst in leaders]
        arguments = {}
        for src, dst in present:
            address, port = _sink(run, leaders[dst])
            arguments[leaders[src]] = {
                "address": address,
                "port": port,
                "size": size,
                "repetitions": PAIR_REPETITIONS,
                "connect_s": run.limits.connect,
                "limit_s": run.limits.bulk if (src, dst) in blocked else run.limits.operation / 2,
            }
        outcome = run.request("send", arguments, limit_s=run.limits.operation)
        for src, dst in directed:
            reply = outcome.replies.get(leaders[src]) if src in leaders else None
            error = (
                "the node is gone" if src not in leaders else outcome.errors.get(leaders[src], outcome.reason)
            )
            if reply is None or not _unsound(run, src, dst, {leaders[src]: reply["seconds"]}):
                _pair(run, src, dst, number + index, reply, error, alone)
        problem = problem or failure_reason(outcome)
    return problem


def _pair(run: Session, src: int, dst: int, number: int, reply: Any, error: str | None, alone: bool) -> None:
    best = slow = None
    if reply is not None:
        error = reply.get("error")
        if reply["seconds"]:
            best, slow = summary(reply["seconds"], reply["bytes"])
    run.results.pairs.append(
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
    """Record impossible times of the ranks of ``src``, and return them."""
    unsound = [
        item
        for rank, seconds in reported.items()
        for item in unsound_times(seconds, check="pairs", what="seconds", node=src, rank=rank, dst=dst)
    ]
    run.results.unsound += unsound
    return unsound


def _exchange(run: Session, node_pairs: list[tuple[int, int]], number: int, *, alone: bool) -> str | None:
    """Measure over NCCL: each GPU sends to its counterpart, in groups of two GPUs.

    A node's rate is the sum of its GPUs' rates.
    """
    store = sweep.store(run)
    if store is None:
        return "rank 0 could not serve the store through which groups find each other"
    by_node: dict[int, list[int]] = {}
    for rank in run.ranks:
        by_node.setdefault(run.results.facts[rank].node, []).append(rank)
    limit = run.limits.operation
    arguments: dict[int, dict[str, Any]] = {}
    for a, b in node_pairs:
        for src_rank, dst_rank in zip(by_node.get(a, ()), by_node.get(b, ()), strict=False):
            common = {
                "store": store,
                "group": f"{number}/{src_rank}-{dst_rank}",
                "size": run.options.effort.pair_cuda,
                "repetitions": PAIR_REPETITIONS,
                "limit_s": limit,
            }
            arguments[src_rank] = {**common, "first": True}
            arguments[dst_rank] = {**common, "first": False}
    outcome = run.request("exchange", arguments, limit_s=limit)
    for a, b in node_pairs:
        for index, (src, dst) in enumerate([(a, b)] if alone else [(a, b), (b, a)]):
            replies = {rank: outcome.replies.get(rank) for rank in by_node.get(src, ())}
            reported = {rank: reply["sent"] for rank, reply in replies.items() if reply is not None}
            if not _unsound(run, src, dst, reported):
                error, reason = _combine([*replies.values()]), outcome.reason or "a GPU of the pair failed"
                _pair(run, src, dst, number + index, error, reason, alone)
    return failure_reason(outcome)


def _combine(replies: list[Any]) -> dict[str, Any] | None:
    """Combine the GPUs of a node into one sender: all bytes, in the time of the slowest."""
    if not replies or any(reply is None for reply in replies):
        return None
    seconds = [max(times) for times in zip(*(reply["sent"] for reply in replies), strict=False)]
    rails = tuple(float(f"{summary(reply['sent'], reply['bytes'])[0]:.4g}") for reply in replies)
    return {
        "seconds": seconds,
        "bytes": sum(reply["bytes"] for reply in replies),
        "error": None,
        "rails": rails if len(rails) > 1 else (),
    }


def _with_sinks(run: Session) -> dict[int, int]:
    """Start the missing sinks (sockets that discard data); return each node's first rank that has one."""
    without_sink = {
        rank: {"address": run.addresses[rank]}
        for rank in run.leaders.values()
        if run.addresses.get(rank) and rank not in run.sinks
    }
    if without_sink:
        outcome = run.request("listen", without_sink, limit_s=run.limits.operation)
        run.sinks.update(outcome.replies)
        for rank, error in outcome.errors.items():
            run.notes.append(f"Rank {rank} cannot listen on {run.addresses[rank]}: {error}.")
    return {node: rank for node, rank in run.leaders.items() if rank in run.sinks}


def _sink(run: Session, rank: int) -> tuple[str, int]:
    return run.addresses[rank], run.sinks[rank]
