"""From the bandwidths between pairs of nodes to the node, direction or link that is at fault.

Two rules keep the bottleneck model (:mod:`checklist.analysis.bottleneck`) honest: a node is named only if
two others, known to be well, saw it slow (else it may be the link, or the other one), and nobody is accused
before the slow pairs were measured again with nothing else running (pairs of one round may share a switch).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from checklist.analysis.bottleneck import TAU, WITNESSES, Bounds, Flags, Floats, localise
from checklist.measurements import STRICT, Pair
from checklist.round_robin import ALL_PAIRS_UP_TO

RERUN_PARTNERS = 3  # pairs measured again for each slow direction of a node
RERUNS = 2  # times that a pair must be slow alone: other jobs' traffic passes
RERUNS_ABOVE = 3  # above 32 nodes: of so many pairs some meet passing traffic twice
CONTROLS = 2  # good pairs measured again too: alone must be compared with alone
PASSES = RERUNS_ABOVE + 1  # of pairs alone; the last is for suspects that others hid
MOST_RERUNS = 96  # in one pass, one direction of one pair each; they run one after another

FaultKind = Literal["node", "transmit", "receive", "link"]
Status = Literal["suspect", "confirmed", "cleared"]
Why = Literal["two-nodes", "no-good-pair", "too-few-witnesses"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One slow thing. "transmit" and "receive" are one direction of a node, "node" is both."""

    __pydantic_config__ = STRICT
    kind: FaultKind
    node: int | None = None
    src: int | None = None
    dst: int | None = None
    both_ways: bool = False
    """Of a link: also from dst to src."""
    ratio: float
    """Measured over what is due: the reference, or of a link the lower of its ends' bounds."""
    status: Status
    """"confirmed": still slow when measured alone; "cleared": only slow together with other pairs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What the pairs say. Only confirmed faults accuse anybody."""

    __pydantic_config__ = STRICT
    nodes: int
    reference_gbytes_per_s: float | None
    basis: Literal["spec", "upper-quartile"]
    transmit: tuple[float | None, ...]
    """The best that each node sent to anybody, GB/s; None: not measured."""
    receive: tuple[float | None, ...]
    faults: tuple[Fault, ...]
    undecided: tuple[tuple[int, int], ...]
    """Slow pairs (src, dst) for which nobody can be named, slowest first."""
    undecided_settled: bool
    """Whether some of those were still slow when measured alone."""
    why: Why | None
    """Why nobody can be named for those."""
    again: tuple[tuple[int, int], ...]
    """Pairs (src, dst) to measure again, one at a time, before anyone is accused; () when that is settled."""
    crowded_rounds: tuple[int, ...]
    """Rounds in which most pairs were slower than their ends can be: they share something."""

    def with_status(self, status: Status) -> tuple[Fault, ...]:
        """The faults in that state."""
        return tuple(fault for fault in self.faults if fault.status == status)

    @property
    def bad_nodes(self) -> tuple[int, ...]:
        """Nodes that are slow themselves, confirmed. The ends of a slow link are not among them."""
        return tuple(sorted({f.node for f in self.with_status("confirmed") if f.node is not None}))


def diagnose(
    pairs: Iterable[Pair],
    nodes: int,
    *,
    spec_gbytes_per_s: float | None = None,
    tau: float = TAU,
) -> Diagnosis:
    """Names what is slow among ``nodes`` nodes, from pairs each measured in one direction.

    A pair that failed (``gbytes_per_s`` None with an error) counts as 0; one that was not measured counts as
    nothing. Call it with the first pass, measure ``again`` alone, call it with both, and so on, until
    ``again`` is empty or PASSES were made; what is suspect then stays so.

    Parameters
    ----------
    spec_gbytes_per_s:
        What one node's network should reach. None, or less than that: the upper quartile of what the nodes
        reached; without a spec a cluster that is slow as a whole can't be seen.
    """
    measured = [pair for pair in pairs if pair.gbytes_per_s is not None or pair.error is not None]
    first = _best(pair for pair in measured if not pair.alone)
    alone = _Alone([pair for pair in measured if pair.alone], nodes)
    if not first:
        return _nothing(nodes)
    bounds = localise(nodes, first, spec_gbytes_per_s, tau)
    reference = _reference_alone(bounds, alone, spec_gbytes_per_s)
    faults = _faults(bounds, alone, reference, tau)
    undecided = [
        pair for pair in _worst(bounds, bounds.undecided) if alone.best.get(pair, 0.0) < tau * reference
    ]
    settled = alone.settled(undecided, 1)
    again = _again(bounds, faults, [] if settled else undecided)
    return Diagnosis(
        nodes=nodes,
        reference_gbytes_per_s=bounds.reference,
        basis="spec" if bounds.reference == spec_gbytes_per_s else "upper-quartile",
        transmit=_known(bounds.tx),
        receive=_known(bounds.rx),
        faults=tuple(faults),
        undecided=tuple(undecided),
        undecided_settled=settled,
        why=_why(bounds, nodes) if undecided else None,
        again=tuple(again),
        crowded_rounds=bounds.crowded,
    )


class _Alone:
    """The second pass: the best of each ordered pair, and how often it was measured."""

    def __init__(self, pairs: Sequence[Pair], nodes: int) -> None:
        self.enough = RERUNS if nodes <= ALL_PAIRS_UP_TO else RERUNS_ABOVE
        self.best = {key: value for key, (value, _) in _best(pairs).items()}
        self.times = Counter((pair.src, pair.dst) for pair in pairs)

    def reached(self, pairs: Iterable[tuple[int, int]]) -> float | None:
        """The best of those pairs; None where none was measured."""
        return max((self.best[pair] for pair in pairs if pair in self.best), default=None)

    def settled(self, pairs: Iterable[tuple[int, int]], needed: int) -> bool:
        """Whether so many of those pairs were measured often enough to accuse somebody."""
        return sum(self.times[pair] >= self.enough for pair in pairs) >= needed


def _nothing(nodes: int) -> Diagnosis:
    unknown = (None,) * nodes
    return Diagnosis(
        nodes=nodes,
        reference_gbytes_per_s=None,
        basis="upper-quartile",
        transmit=unknown,
        receive=unknown,
        faults=(),
        undecided=(),
        undecided_settled=False,
        why=None,
        again=(),
        crowded_rounds=(),
    )


def _best(pairs: Iterable[Pair]) -> dict[tuple[int, int], tuple[float, int]]:
    """The best value of each ordered pair, and its round: whatever disturbs only makes it slower."""
    best: dict[tuple[int, int], tuple[float, int]] = {}
    for pair in pairs:
        value = pair.gbytes_per_s or 0.0
        key = (pair.src, pair.dst)
        if key not in best or value > best[key][0]:
            best[key] = (value, pair.round)
    return best


def _why(bounds: Bounds, nodes: int) -> Why:
    if nodes == 2:
        return "two-nodes"
    good_pair = bounds.good_tx[bounds.src] & bounds.good_rx[bounds.dst] & ~bounds.slow_link
    return "too-few-witnesses" if good_pair.any() else "no-good-pair"


def _again(bounds: Bounds, faults: list[Fault], undecided: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ordered pairs to measure alone for what is suspect: nodes, then links, worst first; and controls."""
    chosen: list[tuple[int, int]] = []
    for pair in undecided[:RERUN_PARTNERS]:
        chosen += [pair, pair[::-1]]
    for fault in sorted(faults, key=lambda fault: (fault.node is None, fault.ratio)):
        if fault.status != "suspect":
            continue
        if fault.node is None:
            there = (int(fault.src or 0), int(fault.dst or 0))
            chosen += [there, there[::-1]] if fault.both_ways else [there]
        if fault.kind in ("node", "transmit"):
            chosen += _witnessed(bounds, fault.node, sends=True)
        if fault.kind in ("node", "receive"):
            chosen += _witnessed(bounds, fault.node, sends=False)
    if not chosen:
        return []
    controls = _some(bounds, _well(bounds), CONTROLS)
    return list(dict.fromkeys([*controls, *chosen]))[:MOST_RERUNS]


def _worst(bounds: Bounds, among: Flags) -> list[tuple[int, int]]:
    """The flagged samples as ordered pairs, slowest first."""
    return _some(bounds, among, int(among.sum()))[::-1]


def _well(bounds: Bounds) -> Flags:
    """Samples between two ends that are well, over a link that is."""
    return bounds.good_tx[bounds.src] & bounds.good_rx[bounds.dst] & ~bounds.slow_link


def _witnessed(bounds: Bounds, node: int | None, *, sends: bool) -> list[tuple[int, int]]:
    """A few pairs that show how a node sends or receives: with others that are well, over links that are."""
    own_samples = bounds.src == node if sends else bounds.dst == node
    others = bounds.good_rx[bounds.dst] if sends else bounds.good_tx[bounds.src]
    return _some(bounds, own_samples & others & ~bounds.slow_link, RERUN_PARTNERS)


def _some(bounds: Bounds, among: Flags, count: int) -> list[tuple[int, int]]:
    """The fastest few of the flagged samples, as ordered pairs."""
    index = np.flatnonzero(among)
    index = index[np.argsort(-bounds.value[index], kind="stable")][:count]
    return list(zip(bounds.src[index].tolist(), bounds.dst[index].tolist(), strict=True))


def _reference_alone(bounds: Bounds, alone: _Alone, spec: float | None) -> float:
    """What a good pair reaches with nothing else running; without a good one, the best of any."""
    well = _well(bounds)
    controls = zip(bounds.src[well].tolist(), bounds.dst[well].tolist(), strict=True)
    best = alone.reached(controls) or alone.reached(alone.best) or bounds.reference
    return max(best, spec or 0.0)


def _faults(bounds: Bounds, alone: _Alone, reference: float, tau: float) -> list[Fault]:
    sides: dict[tuple[int, Status], dict[str, float]] = {}
    for side, blamed, bound in (
        ("transmit", bounds.blamed_tx, bounds.tx),
        ("receive", bounds.blamed_rx, bounds.rx),
    ):
        for node in np.flatnonzero(blamed).tolist():
            seen = _witnessed(bounds, node, sends=side == "transmit")
            reached = alone.reached(seen)
            ratio = bound[node] / bounds.reference if reached is None else reached / reference
            settled = alone.settled(seen, min(WITNESSES, len(seen)))
            status = _status(float(ratio), tau, measured=reached is not None, settled=settled)
            sides.setdefault((node, status), {})[side] = float(ratio)
    return [*_nodes(sides), *_links(bounds, alone, reference, tau)]


def _status(ratio: float, tau: float, *, measured: bool, settled: bool) -> Status:
    """``measured``: alone, at all; ``settled``: often enough to accuse somebody."""
    if measured and ratio >= tau:
        return "cleared"
    return "confirmed" if settled else "suspect"


def _nodes(sides: dict[tuple[int, Status], dict[str, float]]) -> list[Fault]:
    faults = []
    for (node, status), ratios in sides.items():
        kind: Any = "node" if len(ratios) == 2 else next(iter(ratios))
        faults.append(Fault(kind=kind, node=node, ratio=min(ratios.values()), status=status))
    return faults


def _links(bounds: Bounds, alone: _Alone, reference: float, tau: float) -> list[Fault]:
    slow: dict[tuple[int, int], tuple[float, Status]] = {}
    for index in np.flatnonzero(bounds.slow_link).tolist():
        pair = (int(bounds.src[index]), int(bounds.dst[index]))
        reached = alone.reached([pair])
        ratio = float(bounds.value[index] / bounds.due[index])
        if reached is not None:
            ends = min(bounds.tx[pair[0]], bounds.rx[pair[1]]) / bounds.reference
            ratio = reached / (min(1.0, float(ends)) * reference)
        settled = alone.settled([pair], 1)
        slow[pair] = (ratio, _status(ratio, tau, measured=reached is not None, settled=settled))
    faults = []
    for (i, j), (ratio, status) in slow.items():
        back = slow.get((j, i))
        if back is None or back[1] != status:
            faults.append(Fault(kind="link", src=i, dst=j, ratio=ratio, status=status))
        elif i < j:
            both = min(ratio, back[0])
            faults.append(Fault(kind="link", src=i, dst=j, both_ways=True, ratio=both, status=status))
    return faults


def _known(values: Sequence[float] | Floats) -> tuple[float | None, ...]:
    return tuple(None if np.isnan(value) else float(value) for value in values)
