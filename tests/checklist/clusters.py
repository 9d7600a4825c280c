"""Simulated clusters with known faults, and the measurements of their pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from checklist.analysis.diagnosis import PASSES, Diagnosis, diagnose
from checklist.analysis.second_pass import measure_again
from checklist.measurements import Pair
from checklist.round_robin import Pairs, schedule


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Rate of one network card in GB/s, and the remaining share of slow nodes and links."""

    nodes: int
    speed: float = 24.0
    transmit: Mapping[int, float] = field(default_factory=dict)
    receive: Mapping[int, float] = field(default_factory=dict)
    links: Mapping[tuple[int, int], float] = field(default_factory=dict)
    rails: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """By node and rail of eight, what that one still carries, both ways; a pair is as fast as its slowest."""
    cut: frozenset[tuple[int, int]] = frozenset()
    path: Callable[[int, int], float] | None = None
    """GB/s from one node to another where all are well; None: ``speed`` everywhere."""

    def true_rate(self, src: int, dst: int) -> float:
        share = min(self.transmit.get(src, 1.0), self.receive.get(dst, 1.0), self.links.get((src, dst), 1.0))
        return (self.path(src, dst) if self.path else self.speed) * share

    def pair(self, src: int, dst: int, number: int, share: float = 1.0, *, alone: bool = False) -> Pair:
        if (src, dst) in self.cut:
            error = "no connection"
            return Pair(src=src, dst=dst, round=number, gbytes_per_s=None, error=error, alone=alone)
        value = self.true_rate(src, dst) * share
        if not self.rails:
            return Pair(src=src, dst=dst, round=number, gbytes_per_s=value, alone=alone)
        shares = [min(self.rails.get((node, rail), 1.0) for node in (src, dst)) for rail in range(8)]
        rails = tuple(value / 8 * one for one in shares)
        value *= min(shares)
        return Pair(src=src, dst=dst, round=number, gbytes_per_s=value, alone=alone, rails=rails)

    def first_pass(self, seed: int = 0, crowded: float = 1.0) -> tuple[Pair, ...]:
        """``crowded``: remaining share of pairs between an even and an odd node."""
        noise = np.random.default_rng(seed)
        sent_pairs = []
        for number, pairs in enumerate(schedule(self.nodes)):
            for a, b in pairs:
                for way, (src, dst) in enumerate(((a, b), (b, a))):
                    shared = crowded if (a + b) % 2 else 1.0
                    share = shared * (1 - abs(noise.normal(0, 0.02)))
                    sent_pairs.append(self.pair(src, dst, 2 * number + way, share))
        return tuple(sent_pairs)

    def second_pass(self, repetitions: Iterable[tuple[int, int]]) -> tuple[Pair, ...]:
        return tuple(self.pair(src, dst, 100 + n, alone=True) for n, (src, dst) in enumerate(repetitions))


class Measured:
    """Measurement of a simulated cluster; ``rack``: its uplink carries two pairs at once."""

    def __init__(self, cluster: Cluster, rack: range | None = None) -> None:
        self.cluster, self.rack = cluster, rack
        self.rounds = 0
        crowded = 0.3 if rack else 1.0
        self.pairs = [
            dataclasses.replace(pair, gbytes_per_s=(pair.gbytes_per_s or 0) * crowded)
            if rack and (pair.src in rack) != (pair.dst in rack)
            else pair
            for pair in cluster.first_pass()
        ]

    def alone(self, pair: tuple[int, int]) -> float | None:
        self.rounds += 1
        self.pairs.append(self.cluster.pair(*pair, 10_000 + self.rounds, alone=True))
        return self.pairs[-1].gbytes_per_s

    def group(self, pairs: Pairs) -> Mapping[tuple[int, int], float]:
        self.rounds += 1
        out = sum(a in self.rack and b not in self.rack for a, b in pairs) if self.rack else 0
        measured = {}
        for a, b in pairs:
            share = min(1.0, 2 / out) if out and self.rack and (a in self.rack) != (b in self.rack) else 1.0
            one = self.cluster.pair(a, b, 10_000 + self.rounds, share)
            self.pairs.append(dataclasses.replace(one, repeat="group"))
            measured[a, b] = one.gbytes_per_s or 0.0
        return measured

    def accept(self, pairs: Iterable[tuple[int, int]]) -> None:
        accepted = set(pairs)
        self.pairs = [
            dataclasses.replace(pair, alone=True)
            if pair.repeat == "group" and (pair.src, pair.dst) in accepted
            else pair
            for pair in self.pairs
        ]

    def diagnosed(self) -> Diagnosis:
        for _ in range(PASSES):
            repetitions = diagnose(self.pairs, self.cluster.nodes).again
            if not repetitions or not measure_again(
                repetitions, self.cluster.nodes, self.alone, self.group, self.accept
            ):
                break
        return diagnose(self.pairs, self.cluster.nodes)


def slow_nodes(nodes: int, count: int) -> dict[int, float]:
    chosen = np.random.default_rng(count).choice(nodes, count, replace=False).tolist()
    return dict.fromkeys(chosen, 0.6)
