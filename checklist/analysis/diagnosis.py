"""Localization of slow nodes, directions and links from the bandwidths between pairs of nodes.

Two rules guard the bottleneck model (:mod:`checklist.analysis.bottleneck`) against false positives. A node is
reported only if two healthy partners measured it slow; otherwise the link or the partner may be the cause. No
fault is confirmed before the slow pairs were measured again with nothing else running, because pairs of one
round may share a switch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from checklist.analysis.bottleneck import (
    TAU,
    WITNESSES,
    Bounds,
    Flags,
    Ints,
    Samples,
    find_uneven,
    localize,
    samples_of,
)
from checklist.analysis.paths import Paths
from checklist.analysis.second_pass import MAX_RERUNS, RERUNS_ABOVE, Alone, ExpectedAlone, best_of
from checklist.measurements import STRICT, Pair

RERUN_PARTNERS = 3  # pairs measured again for each slow direction of a node
CONTROLS = 2  # healthy pairs per class measured again as controls, so that both are measured in isolation
PASSES = RERUNS_ABOVE + 1  # isolated passes; the last one is for suspects that other faults masked

FaultKind = Literal["node", "transmit", "receive", "link"]
Status = Literal["suspect", "confirmed", "cleared"]
UndecidedReason = Literal["two-nodes", "no-good-pair", "too-few-witnesses"]
Medium = Literal["network", "nvlink"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A slow node, direction or link. "transmit" and "receive": one direction of a node; "node": both."""

    __pydantic_config__ = STRICT
    kind: FaultKind
    node: int | None = None
    src: int | None = None
    dst: int | None = None
    both_ways: bool = False
    """For a link: whether it is also slow from dst to src."""
    ratio: float
    """Measured / expected bandwidth. Expected is the reference; for a link, the lower of its ends' bounds."""
    status: Status
    """"confirmed": still slow in isolation; "cleared": slow only while other pairs were sending."""
    slight: bool = False
    """Whether the ratio is between ``TAU`` and ``SLIGHT_TAU`` and outside this run's spread."""
    over: Medium = "network"
    """"nvlink": between nodes of one NVLink domain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnevenPath:
    """A class of paths on which a few nodes are far above the median of the others."""

    __pydantic_config__ = STRICT
    path: str
    fast: tuple[int, ...]
    nodes: int
    """Number of nodes with paths of this class."""
    most_gbytes_per_s: float
    reference_gbytes_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Result of the pair measurements. Only confirmed faults are reported against a node or link."""

    __pydantic_config__ = STRICT
    nodes: int
    reference_gbytes_per_s: float | None
    """Reference bandwidth of the class of paths with the most pairs."""
    basis: Literal["spec", "median"]
    """Source of ``reference_gbytes_per_s``: the table of GPUs, or the median of the measured pairs."""
    references: dict[str, float] = dataclasses.field(default_factory=dict)
    """Reference bandwidth by class of paths, GB/s."""
    transmit: tuple[float | None, ...]
    """Best bandwidth each node sent to any other, GB/s; None if not measured."""
    receive: tuple[float | None, ...]
    faults: tuple[Fault, ...]
    undecided: tuple[tuple[int, int], ...]
    """Slow pairs (src, dst) whose cause cannot be attributed to a node or link, slowest first."""
    undecided_settled: bool
    """Whether some undecided pairs were still slow in isolation."""
    why: UndecidedReason | None
    """Reason the undecided pairs cannot be attributed."""
    again: tuple[tuple[int, int], ...]
    """Pairs (src, dst) to measure again, one at a time, before faults are confirmed; () if none are left."""
    crowded_rounds: tuple[int, ...]
    """Rounds in which most pairs were slower than both of their ends can be, so they share a bottleneck."""
    uneven: tuple[UnevenPath, ...] = ()
    """Classes on which a few nodes are far above others of their kind, or the others are slow."""

    def with_status(self, status: Status) -> tuple[Fault, ...]:
        """Return the faults with this status."""
        return tuple(fault for fault in self.faults if fault.status == status)

    @property
    def bad_nodes(self) -> tuple[int, ...]:
        """Nodes confirmed slow, sorted. Excludes the ends of slow links."""
        return tuple(sorted({f.node for f in self.with_status("confirmed") if f.node is not None}))


def diagnose(
    pairs: Iterable[Pair],
    nodes: int,
    *,
    spec_gbytes_per_s: float | None = None,
    tau: float = TAU,
    paths: Paths | None = None,
) -> Diagnosis:
    """Localize slow components among ``nodes`` nodes from pairs that were each measured in one direction.

    A failed pair (``gbytes_per_s`` None with an error) counts as 0; an unmeasured pair is ignored. Call it
    with the first pass, measure the pairs in ``again`` in isolation, call it with both passes, and repeat
    until ``again`` is empty or PASSES were made. Faults that are suspect then stay suspect.

    Parameters
    ----------
    spec_gbytes_per_s:
        Specified bandwidth of one node's network. If None, or below the median that the nodes reached, the
        median is the reference; without a spec, a uniformly slow cluster goes undetected.
    paths:
        Classes of nodes and paths that are compared with each other. None: all nodes form one class.
    """
    measured = [pair for pair in pairs if pair.gbytes_per_s is not None or pair.error is not None]
    first = best_of(pair for pair in measured if pair.first)
    alone = Alone([pair for pair in measured if pair.alone], nodes)
    if not first:
        return _empty(nodes)
    paths = paths or Paths.uniform(nodes)
    samples = samples_of(first, spec_gbytes_per_s, paths)
    bounds = localize(samples, tau)
    expected = ExpectedAlone(bounds, alone, spec_gbytes_per_s)
    faults = _faults(bounds, alone, expected, tau)
    undecided = [pair for pair in _slowest(bounds, bounds.undecided) if expected.share(pair) < tau]
    settled = alone.settled(undecided, 1)
    slight, refined = _slight(samples, bounds, alone, faults, set(undecided))
    reported = [fault for fault in slight if fault.status == "confirmed"]
    return Diagnosis(
        nodes=nodes,
        reference_gbytes_per_s=samples.main_reference,
        basis="spec" if samples.main_reference == spec_gbytes_per_s else "median",
        references={paths.describe(number): value for number, value in samples.references.items()},
        transmit=_best_of_sides(samples, samples.src),
        receive=_best_of_sides(samples, samples.dst),
        faults=(*faults, *reported),
        undecided=tuple(undecided),
        undecided_settled=settled,
        why=_undecided_reason(bounds) if undecided else None,
        again=_pairs_to_repeat([(bounds, faults), (refined, slight)], [] if settled else undecided),
        crowded_rounds=bounds.crowded,
        uneven=_uneven(bounds, paths),
    )


def _uneven(bounds: Bounds, paths: Paths) -> tuple[UnevenPath, ...]:
    references = bounds.samples.references
    return tuple(
        UnevenPath(
            path=paths.describe(path.number),
            fast=path.fast,
            nodes=path.nodes,
            most_gbytes_per_s=path.most_gbytes_per_s,
            reference_gbytes_per_s=references[path.number],
        )
        for path in find_uneven(bounds, paths)
    )


def _slight(
    samples: Samples, bounds: Bounds, alone: Alone, faults: list[Fault], undecided: set[tuple[int, int]]
) -> tuple[list[Fault], Bounds]:
    """Return slightly slow faults (any status) that ``faults`` does not cover, and the bounds behind them."""
    tau = bounds.slight_tau
    if tau is None:
        return [], bounds
    refined = localize(samples, tau)
    reported = {(fault.node, fault.src, fault.dst) for fault in faults if fault.status != "cleared"}
    slow = {fault.node for fault in faults if fault.node is not None and fault.status != "cleared"}
    slight_faults = [
        dataclasses.replace(fault, slight=True)
        for fault in _faults(refined, alone, ExpectedAlone(refined, alone, None, typical=True), tau)
        if (fault.node, fault.src, fault.dst) not in reported
        and not slow & {fault.src, fault.dst}
        and (fault.src, fault.dst) not in undecided
    ]
    return slight_faults, refined


def without_lost(pairs: Iterable[Pair], lost_nodes: Collection[int]) -> tuple[Pair, ...]:
    """Drop pairs that failed with a lost node, or in the same round as one.

    Losing a node aborts the request for all participants, so their failures say nothing about their links.
    """
    all_pairs, lost_set = tuple(pairs), set(lost_nodes)
    failed = [pair for pair in all_pairs if pair.error is not None]
    broken_rounds = {pair.round for pair in failed if lost_set & {pair.src, pair.dst}}
    return tuple(
        pair
        for pair in all_pairs
        if pair.error is None or not (lost_set & {pair.src, pair.dst} or pair.round in broken_rounds)
    )


def _empty(nodes: int) -> Diagnosis:
    no_values = (None,) * nodes
    return Diagnosis(
        nodes=nodes,
        reference_gbytes_per_s=None,
        basis="median",
        transmit=no_values,
        receive=no_values,
        faults=(),
        undecided=(),
        undecided_settled=False,
        why=None,
        again=(),
        crowded_rounds=(),
    )


def _undecided_reason(bounds: Bounds) -> UndecidedReason:
    if len(np.union1d(bounds.samples.src, bounds.samples.dst)) == 2:
        return "two-nodes"
    return "too-few-witnesses" if bounds.healthy.any() else "no-good-pair"


def _pairs_to_repeat(
    levels: list[tuple[Bounds, list[Fault]]], undecided: list[tuple[int, int]]
) -> tuple[tuple[int, int], ...]:
    """Return ordered pairs to measure in isolation: controls, then suspect nodes, then links, worst first.

    ``levels``: bounds and faults at the slow threshold, then at the slight one. In a large run, other
    traffic slows more links than can be measured again. All suspect nodes are measured again, before links;
    links are limited to ``MAX_RERUNS`` pairs.
    """
    selected: list[tuple[int, int]] = []
    budget = MAX_RERUNS
    for pair in undecided[:RERUN_PARTNERS]:
        selected += [pair, pair[::-1]]
    for node_faults in (True, False):
        for bounds, faults in levels:
            for fault in sorted(faults, key=lambda fault: fault.ratio):
                if fault.status == "suspect" and (fault.node is not None) == node_faults:
                    selected += _pairs_for(bounds, fault)
        if node_faults:
            budget = max(budget, len(set(selected)) + CONTROLS * len(levels[0][0].samples.references))
    if not selected:
        return ()
    return tuple(dict.fromkeys([*_controls(levels[0][0], selected), *selected]))[:budget]


def _pairs_for(bounds: Bounds, fault: Fault) -> list[tuple[int, int]]:
    """Return the pairs whose isolated measurement decides whether one suspect is at fault."""
    if fault.node is None:
        link = (int(fault.src or 0), int(fault.dst or 0))
        return [link, link[::-1]] if fault.both_ways else [link]
    side = fault.node + (bounds.samples.nodes if fault.over == "nvlink" else 0)
    selected = []
    if fault.kind in ("node", "transmit"):
        selected += _pairs_of_side(bounds, side, sends=True)
    if fault.kind in ("node", "receive"):
        selected += _pairs_of_side(bounds, side, sends=False)
    return selected


def _controls(bounds: Bounds, suspect_pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return healthy pairs of the same classes as the chosen pairs."""
    selected = set(suspect_pairs)
    pairs = zip(bounds.samples.src.tolist(), bounds.samples.dst.tolist(), strict=True)
    classified = zip(pairs, bounds.samples.classes.tolist(), strict=True)
    classes = dict.fromkeys(number for pair, number in classified if pair in selected)
    candidates = (
        _fastest(bounds, bounds.healthy & (bounds.samples.classes == number), CONTROLS) for number in classes
    )
    controls = [pair for pairs_of_class in candidates for pair in pairs_of_class]
    return controls or _fastest(bounds, bounds.healthy, CONTROLS)


def _slowest(bounds: Bounds, mask: Flags) -> list[tuple[int, int]]:
    """Return the flagged samples as ordered pairs, slowest first."""
    return _fastest(bounds, mask, int(mask.sum()))[::-1]


def _pairs_of_side(bounds: Bounds, side: int, *, sends: bool) -> list[tuple[int, int]]:
    """Return the fastest pairs of one side with healthy partners over healthy links."""
    samples = bounds.samples
    own_samples = samples.sender == side if sends else samples.receiver == side
    peers_good = bounds.good_rx[samples.receiver] if sends else bounds.good_tx[samples.sender]
    informative = samples.tells_sender if sends else samples.tells_receiver
    return _fastest(bounds, own_samples & peers_good & informative & ~bounds.slow_link, RERUN_PARTNERS)


def _fastest(bounds: Bounds, mask: Flags, count: int) -> list[tuple[int, int]]:
    """Return up to ``count`` flagged samples as ordered pairs, fastest first."""
    samples = bounds.samples
    index = np.flatnonzero(mask)
    index = index[np.argsort(-samples.share[index], kind="stable")][:count]
    return list(zip(samples.src[index].tolist(), samples.dst[index].tolist(), strict=True))


def _faults(bounds: Bounds, alone: Alone, expected: ExpectedAlone, tau: float) -> list[Fault]:
    """Return slow nodes and links, each with its status after the measurements in isolation.

    The share of a side is that of its pairs in isolation, if these were measured. ``tau``: share below which
    a side is slow.
    """
    sides: dict[tuple[int, Status], dict[str, float]] = {}
    for side, mask, bound in (
        ("transmit", bounds.blamed_tx, bounds.tx),
        ("receive", bounds.blamed_rx, bounds.rx),
    ):
        for side_index in np.flatnonzero(mask).tolist():
            evidence = _pairs_of_side(bounds, side_index, sends=side == "transmit")
            alone_ratio = expected.best_share(evidence)
            ratio = float(bound[side_index] if alone_ratio is None else alone_ratio)
            settled = alone.settled(evidence, min(WITNESSES, len(evidence)))
            status = _status(ratio, tau, measured=alone_ratio is not None, settled=settled)
            sides.setdefault((side_index, status), {})[side] = ratio
    return [*_nodes(sides, bounds.samples.nodes), *_links(bounds, alone, expected, tau)]


def _status(ratio: float, tau: float, *, measured: bool, settled: bool) -> Status:
    """Classify a fault. ``measured``: at least once in isolation; ``settled``: often enough to confirm it."""
    if measured and ratio >= tau:
        return "cleared"
    return "confirmed" if settled else "suspect"


def _nodes(sides: dict[tuple[int, Status], dict[str, float]], nodes: int) -> list[Fault]:
    faults = []
    for (side_index, status), ratios in sides.items():
        kind: Any = "node" if len(ratios) == 2 else next(iter(ratios))
        medium: Medium = "network" if side_index < nodes else "nvlink"
        ratio = min(ratios.values())
        faults.append(Fault(kind=kind, node=side_index % nodes, ratio=ratio, status=status, over=medium))
    return faults


def _links(bounds: Bounds, alone: Alone, expected: ExpectedAlone, tau: float) -> list[Fault]:
    samples = bounds.samples
    slow: dict[tuple[int, int], tuple[float, Status, Medium]] = {}
    for index in np.flatnonzero(bounds.slow_link).tolist():
        pair = (int(samples.src[index]), int(samples.dst[index]))
        medium: Medium = "network" if samples.sender[index] < samples.nodes else "nvlink"
        alone_ratio = expected.best_share([pair])
        ratio = float(samples.share[index] / bounds.expected[index])
        if alone_ratio is not None:
            ratio = alone_ratio / float(bounds.ability[index])
        settled = alone.settled([pair], 1)
        slow[pair] = (ratio, _status(ratio, tau, measured=alone_ratio is not None, settled=settled), medium)
    faults = []
    for (i, j), (ratio, status, medium) in slow.items():
        reverse = slow.get((j, i))
        if reverse is None or reverse[1] != status:
            faults.append(Fault(kind="link", src=i, dst=j, ratio=ratio, status=status, over=medium))
        elif i < j:
            worst = min(ratio, reverse[0])
            faults.append(
                Fault(kind="link", src=i, dst=j, both_ways=True, ratio=worst, status=status, over=medium)
            )
    return faults


def _best_of_sides(samples: Samples, side_of_sample: Ints) -> tuple[float | None, ...]:
    best = np.full(samples.nodes, np.nan)
    np.fmax.at(best, side_of_sample, samples.value)
    return tuple(None if np.isnan(value) else float(value) for value in best)
