"""The bottleneck model: what goes from i to j is the least of what i sends, j receives and the link carries.

So the best that i reached with anybody is a bound of its sending side, the best that anybody reached with j
one of its receiving side, and a pair that stays below both its ends' bounds has a slow link. All of that in
shares of what pairs of the same class of path reach (:mod:`checklist.analysis.paths`), so that an NVLink
domain is no measure of the network, nor one kind of node of another.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from checklist.analysis.baseline import MAD_TO_SIGMA, SPREADS
from checklist.analysis.paths import ACROSS, DOMAIN, LEAF, Paths

TAU = 0.8  # below this share of what is due a side or a link is slow; simulated in benchmarks/diagnosis.py
SLIGHT_TAU = 0.92  # between the two it is slow a little, if that is outside of the run's own spread
UNEVEN = 1.1  # times the reference: nodes of one kind on one class of path differ less
LEAST_SAMPLES = 12  # four nodes' pairs; fewer have no spread of their own
WITNESSES = 2  # well partners that must see a node slow before it is named
ROUND_SAMPLES = 8  # values of a round from which on its median says how crowded it was

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Samples:
    """One pass of measurements: {(src, dst): (GB/s, round)} as columns, each with what it is held against.

    A node has two sides that send and two that receive, one for the network and one for NVLink between nodes,
    which is other hardware: side = node, or node + the number of nodes.
    """

    nodes: int
    src: Ints
    dst: Ints
    value: Floats
    rounds: Ints
    classes: Ints
    due_gbytes_per_s: Floats
    """Of each sample: its class's reference."""
    references: dict[int, float]
    """By class: the median of the best of its sides, or the spec where that is more, GB/s."""
    share: Floats
    """value / due."""
    sender: Ints
    receiver: Ints
    tells_sender: Flags
    """Whether it says something of its sender's side: not where the other end or the path limits it."""
    tells_receiver: Flags

    @property
    def main_reference(self) -> float:
        """That of the class with the most samples."""
        numbers, counts = np.unique(self.classes, return_counts=True)
        return self.references[int(numbers[counts.argmax()])]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What follows from one pass, in shares of the references; the index of tx and rx is the side."""

    samples: Samples
    tx: Floats
    rx: Floats
    good_tx: Flags
    good_rx: Flags
    blamed_tx: Flags
    blamed_rx: Flags
    ability: Floats
    """What each sample's ends could do, of its class's reference."""
    due: Floats
    """The same, times how crowded its round was."""
    slow_link: Flags
    undecided: Flags
    crowded: tuple[int, ...]

    @property
    def well(self) -> Flags:
        """Samples between two ends that are well, over a link that is."""
        ends = self.good_tx[self.samples.sender] & self.good_rx[self.samples.receiver]
        return ends & ~self.slow_link

    @property
    def spread(self) -> float:
        """The standard deviation, from its MAD, of the links' own shares of what is due."""
        reached = self.samples.share[self.due > 0] / self.due[self.due > 0]
        if not reached.size:
            return 0.0
        return MAD_TO_SIGMA * float(np.median(np.abs(reached - np.median(reached))))

    @property
    def slight_tau(self) -> float | None:
        """Below this share a side or link is slow a little; None: this run's spread is too wide to say so."""
        tau = min(SLIGHT_TAU, 1 - SPREADS * self.spread)
        return tau if self.samples.value.size >= LEAST_SAMPLES and tau > TAU else None


@dataclass(frozen=True, slots=True)
class Uneven:
    """A class of paths between nodes of one kind, of which fewer than half are far above the others."""

    number: int
    fast: tuple[int, ...]
    nodes: int
    """All that have such paths."""
    most_gbytes_per_s: float


def uneven(bounds: Bounds, paths: Paths) -> tuple[Uneven, ...]:
    """Classes with sides above ``UNEVEN`` times the reference, outside of the run's own spread.

    A path is fast both ways: the way back must be above by half as much at least, where it was measured. One
    direction alone is luck, as on a line that lets a burst through after its sender was held up.
    """
    samples, found = bounds.samples, []
    limit = max(UNEVEN, 1 + SPREADS * bounds.spread)
    due = samples.due_gbytes_per_s
    far_above = samples.value > limit * due
    back_above = _of_ways_back(samples, samples.value > (1 + limit) / 2 * due)
    for number, reference in samples.references.items():
        inside = samples.classes == number
        nodes = np.union1d(samples.src[inside], samples.dst[inside])
        above = inside & far_above & back_above
        if not paths.one_kind(number) or inside.sum() < LEAST_SAMPLES or not above.any() or not reference:
            continue
        fast = np.union1d(samples.src[above], samples.dst[above])
        found.append(Uneven(number, tuple(fast.tolist()), nodes.size, float(samples.value[above].max())))
    return tuple(found)


def _of_ways_back(samples: Samples, flags: Flags) -> Flags:
    """What ``flags`` say of each sample's way back; True where that was not measured."""
    ends = zip(samples.src.tolist(), samples.dst.tolist(), strict=True)
    by_ends = dict(zip(ends, flags.tolist(), strict=True))
    ends = zip(samples.dst.tolist(), samples.src.tolist(), strict=True)
    return np.array([by_ends.get(pair, True) for pair in ends], dtype=np.bool_)


def samples_of(first: dict[tuple[int, int], tuple[float, int]], spec: float | None, paths: Paths) -> Samples:
    """A pass that is not empty, with its references.

    The reference of a class is the median of the best that each of its sides reached, or ``spec``, what one
    node's network should reach in GB/s, where that is more. So neither a few fast ones nor half of them being
    slow moves it. Within a leaf at least as much is due as across leaves, by nodes of the same kinds.
    """
    ends = np.array(list(first), dtype=np.int64)
    src, dst = ends[:, 0], ends[:, 1]
    columns = np.array(list(first.values()), dtype=np.float64)
    value, rounds = columns[:, 0], columns[:, 1].astype(np.int64)
    nodes = len(paths.kinds)
    classes = paths.classes(src, dst)
    references = _references(nodes, src, dst, value, classes, spec)
    _narrow_as_wide(references, len(paths.names))
    due = np.array([references[number] for number in np.unique(classes)])[
        np.unique(classes, return_inverse=True)[1]
    ]
    over_nvlink = nodes * (paths.path(src, dst) == DOMAIN)
    sender, receiver = src + over_nvlink, dst + over_nvlink
    most = np.zeros(2 * nodes)
    np.fmax.at(most, np.concatenate([sender, receiver]), np.concatenate([due, due]))
    share = np.divide(value, due, out=np.zeros_like(value), where=due > 0)
    return Samples(
        nodes,
        src,
        dst,
        value,
        rounds,
        classes,
        due,
        references,
        share,
        sender,
        receiver,
        due >= TAU * most[sender],
        due >= TAU * most[receiver],
    )


def _references(
    nodes: int, src: Ints, dst: Ints, value: Floats, classes: Ints, spec: float | None
) -> dict[int, float]:
    references = {}
    for number in np.unique(classes).tolist():
        inside = classes == number
        sides = np.full(2 * nodes, np.nan)
        np.fmax.at(sides, src[inside], value[inside])
        np.fmax.at(sides, nodes + dst[inside], value[inside])
        middle = float(np.percentile(sides[~np.isnan(sides)], 50, method="higher"))
        references[number] = max(middle, spec or 0.0)
    return references


def _narrow_as_wide(references: dict[int, float], kinds: int) -> None:
    """A path within a leaf is part of each path across: its few pairs are no measure of themselves."""
    each = kinds * kinds
    for number in references:
        if number // each == LEAF:
            across = references.get(number - (LEAF - ACROSS) * each, 0.0)
            references[number] = max(references[number], across)


def localise(samples: Samples, tau: float) -> Bounds:
    """Bounds of all sides, and what is below ``tau`` of what is due: sides with witnesses, then links."""
    sides = 2 * samples.nodes
    tx, rx = np.full(sides, np.nan), np.full(sides, np.nan)
    sent, received = samples.tells_sender, samples.tells_receiver
    np.fmax.at(tx, samples.sender[sent], samples.share[sent])
    np.fmax.at(rx, samples.receiver[received], samples.share[received])
    good_tx, good_rx = tx >= tau, rx >= tau
    seen_tx = np.bincount(samples.sender, good_rx[samples.receiver] & sent, sides)
    seen_rx = np.bincount(samples.receiver, good_tx[samples.sender] & received, sides)
    blamed_tx, blamed_rx = (tx < tau) & (seen_tx >= WITNESSES), (rx < tau) & (seen_rx >= WITNESSES)
    ability = _ability(samples, tx, rx)
    crowding, crowded = _crowding(samples.share, ability, samples.rounds, tau)
    due = ability * crowding
    slow_link = samples.share < tau * due
    # Between two ends that are well, the link's own rule has spoken
    good_ends = good_tx[samples.sender] & good_rx[samples.receiver]
    explained = blamed_tx[samples.sender] | blamed_rx[samples.receiver] | slow_link | good_ends
    undecided = (samples.share < tau * crowding) & ~explained
    return Bounds(
        samples,
        tx,
        rx,
        good_tx,
        good_rx,
        blamed_tx,
        blamed_rx,
        ability,
        due,
        slow_link,
        undecided,
        crowded,
    )


def _ability(samples: Samples, tx: Floats, rx: Floats) -> Floats:
    """What the two ends of each sample can do, as a share of its class's reference, 1 at most.

    A side's bound is a share of the best of its classes; over a path that carries less it can be enough.
    """
    most = np.zeros(len(tx))
    both = np.concatenate([samples.sender, samples.receiver])
    np.fmax.at(most, both, np.tile(samples.due_gbytes_per_s, 2))
    known = samples.due_gbytes_per_s > 0
    times = np.ones((2, samples.value.size))
    for row, ends in enumerate((samples.sender, samples.receiver)):
        np.divide(most[ends], samples.due_gbytes_per_s, out=times[row], where=known)
    send, receive = tx[samples.sender] * times[0], rx[samples.receiver] * times[1]
    ability: Floats = np.minimum(1.0, np.minimum(send, receive))
    return ability


def _crowding(value: Floats, ability: Floats, rounds: Ints, tau: float) -> tuple[Floats, tuple[int, ...]]:
    """How much of its ends' ability the median pair of each sample's round reached, 1 at most.

    Pairs that run together can share a switch. What all of a round lose is no link's fault, so it is taken
    out before links are suspected; in small rounds one slow link would move the median, so it is left.
    """
    share = np.ones_like(value)
    crowded = []
    for number in np.unique(rounds):
        inside = rounds == number
        reached = value[inside & (ability > 0)] / ability[inside & (ability > 0)]
        if reached.size >= ROUND_SAMPLES:
            share[inside] = min(1.0, float(np.median(reached)))
            if share[inside][0] < tau:
                crowded.append(int(number))
    return share, tuple(crowded)
