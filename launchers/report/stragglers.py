"""Detection of stragglers (ranks that delay all others) from the time that ranks spend in collectives."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import mean, median, stdev

from launchers.report.telemetry import StepTiming, Straggling

WARM_UP = 2  # first steps, which are ignored: code is compiled and memory allocated
MIN_STEPS = 16  # minimum number of steps in the window
MIN_S = 5.0  # minimum training time in the window, so that short disturbances are not reported
LATE = 0.1  # minimum lag of a late rank, as a share of the step
LATE_SHARE = 0.8  # minimum share of the window's steps in which a rank is late
CERTAIN = 6.0  # minimum mean lag in standard errors of the mean; smaller lags are noise
ON_TIME = 0.05  # maximum lag of a rank that has recovered, as a share of the step


@dataclass(kw_only=True)
class _Rank:
    """Window of the newest steps of one rank."""

    newest: StepTiming
    lags: deque[tuple[int, float, float]] = field(default_factory=deque)  # step, lag, seconds of the step
    straggling: Straggling | None = None  # None: on time


class Stragglers:
    """Detector of late ranks and of their recovery, from the step timings of all ranks in any order.

    A rank's lag in a step is how much less time it spent in collectives than the median of its peers, as a
    share of the step: late ranks wait less. A rank is reported if its lag exceeds 10 % in 80 % of the newest
    steps (at least 16 steps and 5 s of training) and its mean lag is at least six standard errors above 0, so
    a single long step is never reported. With two ranks, the median is the other rank. Ranks with rows of
    unequal lengths are late in turn, not in 80 % of the steps.

    Limits: the cause (slow GPU, host or data loading) is not detected. If more than half of the ranks are
    late, none is reported. A slow link delays the collectives at both of its ends, so neither end lags.
    """

    def __init__(self, ranks: int, processes_per_node: int) -> None:
        self._count, self._per_node = ranks, processes_per_node
        self._steps: dict[int, dict[int, StepTiming]] = defaultdict(dict)
        self._ranks: dict[int, _Rank] = {}
        self._complete_steps = 0

    def add(self, timing: StepTiming) -> list[Straggling]:
        """Add one rank's timing of a step; return events of ranks that are newly late or have recovered."""
        timings = self._steps[timing.step]
        timings[timing.rank] = timing
        if len(timings) < self._count or self._count < 2:
            return []
        for step in [
            step for step in self._steps if step <= timing.step
        ]:  # earlier steps will stay incomplete
            del self._steps[step]
        self._complete_steps += 1
        if self._complete_steps <= WARM_UP:
            return []
        for rank, lag in lags(timings).items():
            state = self._ranks.setdefault(rank, _Rank(newest=timings[rank]))
            state.newest = timings[rank]
            state.lags.append((timing.step, lag, state.newest.dt))
            while _is_long_enough(list(state.lags)[1:]):
                state.lags.popleft()
        return self._changes()

    @property
    def late(self) -> tuple[Straggling, ...]:
        """Ranks that are late now."""
        return tuple(rank.straggling for rank in self._ranks.values() if rank.straggling is not None)

    def _changes(self) -> list[Straggling]:
        """Update which ranks are late, and return an event for each change."""
        changed = []
        for rank in self._ranks.values():
            if not _is_long_enough(rank.lags):
                continue
            timing, values = rank.newest, [lag for _, lag, _ in rank.lags]
            is_late_often = sum(lag > LATE for lag in values) >= LATE_SHARE * len(values)
            late = is_late_often and mean(values) > CERTAIN * stdev(values) / math.sqrt(len(values))
            if rank.straggling is None and late:
                rank.straggling = Straggling(
                    rank=timing.rank,
                    local_rank=timing.local_rank,
                    node=timing.node,
                    host=timing.host,
                    since=rank.lags[0][0],
                    step=timing.step,
                    share=median(values),
                )
                changed.append(rank.straggling)
            elif rank.straggling is not None and sum(lag > ON_TIME for lag in values) <= len(values) / 2:
                changed.append(replace(rank.straggling, step=timing.step, over=True))
                rank.straggling = None
        return [self._mark_whole_node(straggling) for straggling in changed]

    def _mark_whole_node(self, straggling: Straggling) -> Straggling:
        """Set ``whole_node`` if all ranks of the event's node are late."""
        late = {event.rank for event in self.late if event.node == straggling.node} | {straggling.rank}
        return replace(straggling, whole_node=len(late) == self._per_node)


def lags(timings: Mapping[int, StepTiming]) -> dict[int, float]:
    """Return rank -> lag: median time of its peers in collectives minus its own, as a share of the step."""
    ordered = sorted(timings.values(), key=lambda timing: timing.in_collectives)
    step_s = median(timing.dt for timing in ordered)
    peers = len(ordered) - 1
    middle = {(peers - 1) // 2, peers // 2}  # positions of the median among the peers
    lag_by_rank = {}
    for position, timing in enumerate(ordered):
        values = [ordered[index + (index >= position)].in_collectives for index in middle]
        lag_by_rank[timing.rank] = (
            (sum(values) / len(values) - timing.in_collectives) / step_s if step_s > 0 else 0.0
        )
    return lag_by_rank


def _is_long_enough(steps: Iterable[tuple[int, float, float]]) -> bool:
    seconds = [dt for _, _, dt in steps]
    return len(seconds) >= MIN_STEPS and sum(seconds) >= MIN_S


def one_per_node(newest: Iterable[Straggling]) -> list[Straggling]:
    """Keep the last event of each rank; of a node whose ranks are all late, only one event."""
    events = list(newest)
    nodes = {event.node for event in events if event.whole_node}
    return list({(event.node, -1 if event.node in nodes else event.rank): event for event in events}.values())


def late_lines(newest: Iterable[Straggling], *, on_gpus: bool) -> list[str]:
    """Describe the ranks that are or were late, one line each. ``newest``: last event of each rank."""
    return [describe(straggling, on_gpus=on_gpus) for straggling in one_per_node(newest)]


def describe(straggling: Straggling, *, on_gpus: bool) -> str:
    """Describe in one line which rank or node is late, by how much, and since when."""
    node = f"node {straggling.node}, {straggling.host}"
    if straggling.whole_node:
        subject = f"node {straggling.node} ({straggling.host})"
    elif on_gpus:
        subject = f"rank {straggling.rank} (GPU {straggling.local_rank} of {node})"
    else:
        subject = f"rank {straggling.rank} ({node})"
    if straggling.over:
        return (
            f"{subject} is on time again at step {straggling.step}; it was late since step {straggling.since}"
        )
    share, since = straggling.share, straggling.since
    return f"{subject} is late: it delays the others by {share:.0%} of each step since step {since}"
