"""Bottleneck model: bandwidth from i to j is the minimum of what i sends, j receives and the link carries.

The best bandwidth from i to any node bounds i's sending side, the best from any node to j bounds j's
receiving side, and a pair below the bounds of both ends has a slow link. All values are shares of the
reference of the pair's class of paths (:mod:`checklist.analysis.paths`), so an NVLink domain is never the
reference for the network, nor one kind of node for another.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from checklist.analysis.baseline import MAD_TO_SIGMA, SPREADS
from checklist.analysis.paths import ACROSS, DOMAIN, LEAF, Paths

TAU = (
    0.8  # a side or link below this share of the expected value is slow; simulated in benchmarks/diagnosis.py
)
SLIGHT_TAU = 0.92  # between TAU and this it is slightly slow, if that is outside the run's spread
UNEVEN = 1.1  # multiple of the reference; nodes of one kind on one class of path differ less
LEAST_SAMPLES = 12  # pairs of four nodes; fewer samples give no usable spread
WITNESSES = 2  # healthy partners that must measure a node slow before it is reported
ROUND_SAMPLES = 8  # minimum values per round for its median to show contention

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Samples:
    """One pass of measurements, {(src, dst): (GB/s, round)} as columns, each with its reference.

    A node has two sending and two receiving sides: one for the network and one for NVLink between nodes,
    which is separate hardware. Index of a side: node for the network, node + number of nodes for NVLink.
    """

    nodes: int
    src: Ints
    dst: Ints
    value: Floats
    rounds: Ints
    classes: Ints
    expected_gbytes_per_s: Floats
    """Reference of each sample's class."""
    references: dict[int, float]
    """Reference by class, GB/s: median over its sides of each side's best, or the spec if higher."""
    share: Floats
    """value / expected_gbytes_per_s."""
    sender: Ints
    receiver: Ints
    tells_sender: Flags
    """Whether the sample bounds its sender's side: False where the other end or the path is the limit."""
    tells_receiver: Flags

    @property
    def main_reference(self) -> float:
        """Reference of the class with the most samples, GB/s."""
        numbers, counts = np.unique(self.classes, return_counts=True)
        return self.references[int(numbers[counts.argmax()])]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds derived from one pass, as shares of the references; ``tx`` and ``rx`` are indexed by side."""

    samples: Samples
    tx: Floats
    rx: Floats
    good_tx: Flags
    good_rx: Flags
    blamed_tx: Flags
    blamed_rx: Flags
    ability: Floats
    """Share of its class's reference that the ends of each sample can reach."""
    expected: Floats
    """``ability`` times the contention factor of the sample's round."""
    slow_link: Flags
    undecided: Flags
    crowded: tuple[int, ...]

    @property
    def healthy(self) -> Flags:
        """Samples between two healthy ends over a healthy link."""
        usable = self.good_tx[self.samples.sender] & self.good_rx[self.samples.receiver]
        return usable & ~self.slow_link

    @property
    def spread(self) -> float:
        """Standard deviation (from the MAD) of the links' measured / expected shares."""
        ratios = self.samples.share[self.expected > 0] / self.expected[self.expected > 0]
        if not ratios.size:
            return 0.0
        return MAD_TO_SIGMA * float(np.median(np.abs(ratios - np.median(ratios))))

    @property
    def slight_tau(self) -> float | None:
        """Share below which a side or link is slightly slow; None if this run's spread is too wide."""
        tau = min(SLIGHT_TAU, 1 - SPREADS * self.spread)
        return tau if self.samples.value.size >= LEAST_SAMPLES and tau > TAU else None


@dataclass(frozen=True, slots=True)
class Uneven:
    """A class of paths between nodes of one kind on which fewer than half are far above the others."""

    number: int
    fast: tuple[int, ...]
    nodes: int
    """Number of nodes with paths of this class."""
    most_gbytes_per_s: float


def find_uneven(bounds: Bounds, paths: Paths) -> tuple[Uneven, ...]:
    """Return classes with sides above ``UNEVEN`` times the reference and outside the run's spread.

    A fast path is fast both ways: if the reverse direction was measured, it must exceed the reference by at
    least half as much. A single fast direction is noise, e.g. a burst that passes after its sender was held
    up.
    """
    samples, classes = bounds.samples, []
    limit = max(UNEVEN, 1 + SPREADS * bounds.spread)
    expected = samples.expected_gbytes_per_s
    forward_above = samples.value > limit * expected
    reverse_above = _flags_of_reverse(samples, samples.value > (1 + limit) / 2 * expected)
    for number, reference in samples.references.items():
        members = samples.classes == number
        nodes = np.union1d(samples.src[members], samples.dst[members])
        fast_mask = members & forward_above & reverse_above
        if (
            not paths.one_kind(number)
            or members.sum() < LEAST_SAMPLES
            or not fast_mask.any()
            or not reference
        ):
            continue
        fast = np.union1d(samples.src[fast_mask], samples.dst[fast_mask])
        classes.append(
            Uneven(number, tuple(fast.tolist()), nodes.size, float(samples.value[fast_mask].max()))
        )
    return tuple(classes)


def _flags_of_reverse(samples: Samples, flags: Flags) -> Flags:
    """Return the flag of each sample's reverse direction; True if that was not measured."""
    directions = zip(samples.src.tolist(), samples.dst.tolist(), strict=True)
    by_ends = dict(zip(directions, flags.tolist(), strict=True))
    directions = zip(samples.dst.tolist(), samples.src.tolist(), strict=True)
    return np.array([by_ends.get(pair, True) for pair in directions], dtype=np.bool_)


def samples_of(first: dict[tuple[int, int], tuple[float, int]], spec: float | None, paths: Paths) -> Samples:
    """Build the samples and references of a pass that is not empty.

    The reference of a class is the median of the best bandwidth of each of its sides, or ``spec`` (specified
    GB/s of one node's network) if higher. A few fast sides, or half of them being slow, do not move it. The
    reference within a leaf is at least the one across leaves for nodes of the same kinds.
    """
    endpoints = np.array(list(first), dtype=np.int64)
    src, dst = endpoints[:, 0], endpoints[:, 1]
    columns = np.array(list(first.values()), dtype=np.float64)
    value, rounds = columns[:, 0], columns[:, 1].astype(np.int64)
    nodes = len(paths.kinds)
    classes = paths.classes(src, dst)
    references = _references(nodes, src, dst, value, classes, spec)
    _raise_within_leaf(references, len(paths.names))
    expected = np.array([references[number] for number in np.unique(classes)])[
        np.unique(classes, return_inverse=True)[1]
    ]
    # Each node has two sides: its network (index: the node) and its NVLink domain (the node plus ``nodes``)
    over_nvlink = nodes * (paths.path(src, dst) == DOMAIN)
    sender, receiver = src + over_nvlink, dst + over_nvlink
    # Highest reference of each side; a sample with a much lower reference is limited by its path instead
    best_expected = np.zeros(2 * nodes)
    np.fmax.at(best_expected, np.concatenate([sender, receiver]), np.concatenate([expected, expected]))
    share = np.divide(value, expected, out=np.zeros_like(value), where=expected > 0)
    return Samples(
        nodes=nodes,
        src=src,
        dst=dst,
        value=value,
        rounds=rounds,
        classes=classes,
        expected_gbytes_per_s=expected,
        references=references,
        share=share,
        sender=sender,
        receiver=receiver,
        tells_sender=expected >= TAU * best_expected[sender],
        tells_receiver=expected >= TAU * best_expected[receiver],
    )


def _references(
    nodes: int, src: Ints, dst: Ints, value: Floats, classes: Ints, spec: float | None
) -> dict[int, float]:
    references = {}
    for number in np.unique(classes).tolist():
        in_class = classes == number
        best_per_side = np.full(2 * nodes, np.nan)
        np.fmax.at(best_per_side, src[in_class], value[in_class])
        np.fmax.at(best_per_side, nodes + dst[in_class], value[in_class])
        reference = float(np.percentile(best_per_side[~np.isnan(best_per_side)], 50, method="higher"))
        references[number] = max(reference, spec or 0.0)
    return references


def _raise_within_leaf(references: dict[int, float], kinds: int) -> None:
    """Raise references within a leaf to those across leaves.

    Every path across leaves includes one within a leaf, and pairs within a leaf are too few for a reference.
    """
    class_count = kinds * kinds
    for number in references:
        if number // class_count == LEAF:
            wide_reference = references.get(number - (LEAF - ACROSS) * class_count, 0.0)
            references[number] = max(references[number], wide_reference)


def localize(samples: Samples, tau: float) -> Bounds:
    """Compute all sides' bounds; flag sides with enough witnesses, then links, below ``tau`` of expected."""
    side_count = 2 * samples.nodes
    tx, rx = np.full(side_count, np.nan), np.full(side_count, np.nan)
    informs_sender, informs_receiver = samples.tells_sender, samples.tells_receiver
    np.fmax.at(tx, samples.sender[informs_sender], samples.share[informs_sender])
    np.fmax.at(rx, samples.receiver[informs_receiver], samples.share[informs_receiver])
    good_tx, good_rx = tx >= tau, rx >= tau
    seen_tx = np.bincount(samples.sender, good_rx[samples.receiver] & informs_sender, side_count)
    seen_rx = np.bincount(samples.receiver, good_tx[samples.sender] & informs_receiver, side_count)
    blamed_tx, blamed_rx = (tx < tau) & (seen_tx >= WITNESSES), (rx < tau) & (seen_rx >= WITNESSES)
    ability = _ability(samples, tx, rx)
    crowding, crowded_rounds = _crowding(samples.share, ability, samples.rounds, tau)
    expected = ability * crowding
    slow_link = samples.share < tau * expected
    # Between two healthy ends the rule for links has already decided
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
        expected,
        slow_link,
        undecided,
        crowded_rounds,
    )


def _ability(samples: Samples, tx: Floats, rx: Floats) -> Floats:
    """Return the share of its class's reference that the ends of each sample can reach, at most 1.

    A side's bound is a share of its best class, so a slow side may still fill a path of lower capacity.
    """
    best = np.zeros(len(tx))
    sides = np.concatenate([samples.sender, samples.receiver])
    np.fmax.at(best, sides, np.tile(samples.expected_gbytes_per_s, 2))
    has_expectation = samples.expected_gbytes_per_s > 0
    times = np.ones((2, samples.value.size))
    for row, side in enumerate((samples.sender, samples.receiver)):
        np.divide(best[side], samples.expected_gbytes_per_s, out=times[row], where=has_expectation)
    send, receive = tx[samples.sender] * times[0], rx[samples.receiver] * times[1]
    ability: Floats = np.minimum(1.0, np.minimum(send, receive))
    return ability


def _crowding(value: Floats, ability: Floats, rounds: Ints, tau: float) -> tuple[Floats, tuple[int, ...]]:
    """Return, per sample, the share of its ends' ability that the round's median pair reached (at most 1).

    Pairs of one round can share a switch. A loss common to the round is not a link fault and is divided out
    before links are suspected. Small rounds are not corrected, because one slow link would move their median.
    """
    share = np.ones_like(value)
    crowded_rounds = []
    for number in np.unique(rounds):
        in_round = rounds == number
        ratios = value[in_round & (ability > 0)] / ability[in_round & (ability > 0)]
        if ratios.size >= ROUND_SAMPLES:
            share[in_round] = min(1.0, float(np.median(ratios)))
            if share[in_round][0] < tau:
                crowded_rounds.append(int(number))
    return share, tuple(crowded_rounds)
