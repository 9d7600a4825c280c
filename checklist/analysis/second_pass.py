"""Pairs measured again, alone or in small groups, and the bandwidth expected of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from checklist.analysis.bottleneck import Bounds
from checklist.measurements import Pair
from checklist.round_robin import ALL_PAIRS_UP_TO, Pairs

RERUNS = 2  # isolated measurements in which a pair must be slow, because other jobs' traffic is transient
RERUNS_ABOVE = 3  # above 32 nodes: with that number of pairs some meet passing traffic twice

MAX_RERUNS = 96  # pairs measured one after another in a pass; more of them are measured in groups
NODES_PER_PAIR = 32  # nodes of the run for each pair of a group, so that a group hardly loads the network
GROUP_CHECKS = 6  # slow pairs of a pass of groups that are measured alone, too
FASTER_ALONE = 1.15  # multiple of the group's figure from which being alone has made a pair faster

Directed = tuple[int, int]


def measure_again(
    pairs_to_repeat: Sequence[Directed],
    nodes: int,
    alone: Callable[[Directed], float | None],
    group: Callable[[Pairs], Mapping[Directed, float]],
    accept: Callable[[Iterable[Directed]], None],
) -> bool:
    """Measure suspect pairs again: one at a time, or, if they are many, in groups of disjoint pairs.

    A group's figures are accepted as isolated ones if a sample of its slow pairs is no faster alone;
    otherwise the first MAX_RERUNS pairs are measured one at a time. Returns False if time ran out.

    Parameters
    ----------
    pairs_to_repeat:
        Ordered pairs, the most important first.
    alone:
        Measures and records one pair with nothing else running; returns GB/s, or None if time ran out.
    group:
        Measures disjoint pairs at once without recording them as alone; empty if time ran out.
    accept:
        Records grouped figures of these pairs as if they had been measured alone.
    """
    if len(pairs_to_repeat) <= MAX_RERUNS:
        return _one_by_one(pairs_to_repeat, alone)
    grouped: dict[Directed, float] = {}
    for batch in batches(pairs_to_repeat, max(2, nodes // NODES_PER_PAIR)):
        results = group(batch)
        if not results:
            return False
        grouped.update(results)
    slowest = sorted(grouped, key=lambda pair: grouped[pair])
    for pair in slowest[:: max(1, len(slowest) // (2 * GROUP_CHECKS))][:GROUP_CHECKS]:
        value = alone(pair)
        if value is None:
            return False
        if value > FASTER_ALONE * grouped[pair]:
            return _one_by_one(pairs_to_repeat[:MAX_RERUNS], alone)
    accept(grouped)
    return True


def _one_by_one(pairs_to_repeat: Iterable[Directed], alone: Callable[[Directed], float | None]) -> bool:
    return all(alone(pair) is not None for pair in pairs_to_repeat)


def batches(pairs: Sequence[Directed], size: int) -> tuple[Pairs, ...]:
    """Pack ordered pairs into batches of at most ``size`` in which no node is in two pairs.

    Pairs that follow each other, such as those of one node, go into different batches.
    """
    packed: list[list[Directed]] = [[] for _ in range(-(-len(pairs) // size))]
    busy: list[set[int]] = [set() for _ in packed]
    for number, pair in enumerate(pairs):
        order = (*range(number % len(packed), len(packed)), *range(number % len(packed)))
        index = next((n for n in order if len(packed[n]) < size and not busy[n] & set(pair)), len(packed))
        if index == len(packed):
            packed.append([])
            busy.append(set())
        packed[index].append(pair)
        busy[index] |= set(pair)
    return tuple(tuple(batch) for batch in packed if batch)


class Alone:
    """Isolated measurements: the best of each ordered pair, and how often it was measured."""

    def __init__(self, pairs: Sequence[Pair], nodes: int) -> None:
        self.enough = RERUNS if nodes <= ALL_PAIRS_UP_TO else RERUNS_ABOVE
        self.best = {key: value for key, (value, _) in best_of(pairs).items()}
        self.times = Counter((pair.src, pair.dst) for pair in pairs)

    def settled(self, pairs: Iterable[tuple[int, int]], minimum: int) -> bool:
        """Return whether at least ``minimum`` of the pairs were measured often enough to confirm a fault."""
        return sum(self.times[pair] >= self.enough for pair in pairs) >= minimum


class ExpectedAlone:
    """Bandwidth expected of a pair in isolation, taken from healthy control pairs of its class.

    ``typical``: use the median of the controls instead of the best, for detecting slight slowness.
    """

    def __init__(self, bounds: Bounds, alone: Alone, spec: float | None, *, typical: bool = False) -> None:
        samples = bounds.samples
        self._alone, self._typical = alone, typical
        columns = zip(
            zip(samples.src.tolist(), samples.dst.tolist(), strict=True),
            samples.classes.tolist(),
            bounds.healthy.tolist(),
            strict=True,
        )
        self._class, self._healthy = {}, set()
        for pair, number, is_healthy in columns:
            if pair in alone.best:
                self._class[pair] = number
                if is_healthy:
                    self._healthy.add(pair)
        self._references, self._spec = samples.references, spec or 0.0
        self._by_class: dict[int, float] = {}

    def share(self, pair: tuple[int, int]) -> float:
        """Return measured / expected bandwidth of a pair in isolation; 0 if it was not measured so."""
        return self.best_share([pair]) or 0.0

    def best_share(self, pairs: Iterable[tuple[int, int]]) -> float | None:
        """Return the best share of the pairs measured in isolation; None if none was."""
        shares = [
            self._alone.best[pair] / expected
            for pair in pairs
            if pair in self._class and (expected := self._expected_gbytes_per_s(self._class[pair])) > 0
        ]
        return max(shares, default=None)

    def _expected_gbytes_per_s(self, number: int) -> float:
        """Return a class's expected GB/s, scaled from its healthy pairs, any healthy pairs, or any pairs."""
        if number not in self._by_class:
            reference = self._references[number]
            class_pairs = [pair for pair in self._healthy if self._class[pair] == number]
            controls = class_pairs or list(self._healthy) or list(self._class)
            rates = [
                self._alone.best[pair] / self._references[self._class[pair]]
                for pair in controls
                if self._references[self._class[pair]]
            ]
            scale = float(np.median(rates)) if self._typical else max(rates, default=1.0)
            self._by_class[number] = max((scale or 1.0) * reference, self._spec)
        return self._by_class[number]


def best_of(pairs: Iterable[Pair]) -> dict[tuple[int, int], tuple[float, int]]:
    """Return the best value of each ordered pair and its round; disturbances only slow a pair down."""
    best: dict[tuple[int, int], tuple[float, int]] = {}
    for pair in pairs:
        value = pair.gbytes_per_s or 0.0
        key = (pair.src, pair.dst)
        if key not in best or value > best[key][0]:
            best[key] = (value, pair.round)
    return best
