"""Who holds a training up: the rank for which all others wait, from how long each stands in collectives."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median, stdev

from launchers.report.telemetry import Pace, Straggling

WARM_UP = 2  # steps that are left out: what is compiled, allocated or read for the first time
LEAST_STEPS = 16
LEAST_S = 5.0  # of training: what another process does for a moment is nobody's fault
LATE = 0.1  # of a step: others wait so much longer
STEADILY = 0.8  # in so many of the steps
CERTAIN = 6.0  # standard errors of the mean: lags that scatter as much as they weigh are noise
ON_TIME = 0.05  # of a step: one that was named and is so late at most has come back


@dataclass(kw_only=True)
class _Rank:
    newest: Pace
    lags: deque[tuple[int, float, float]] = field(default_factory=deque)  # step, its lag, seconds of it
    named: Straggling | None = None


class Stragglers:
    """Takes the paces of all ranks, in any order; says who is late, and when that is over.

    A rank's lag in a step is how much less it has stood in collectives than the others' median, as a share
    of the step. It is named when in four fifths of the newest steps (16 at least, and 5 s of training, which
    is more of short steps) its lag is above a tenth, and their mean is six standard errors above none: so
    never because of one step, however long. With two ranks the other one is the median. Ranks whose data
    differ lawfully (rows of other lengths) are late in turn, and not in four fifths of the steps.

    It can't tell why: a GPU that is slow, a host, or what its rank reads. Where more than half of the ranks
    are late, it names nobody. A slow link delays both of its ends' collectives, which is nobody's lag.
    """

    def __init__(self, ranks: int, processes_per_node: int) -> None:
        self._count, self._per_node = ranks, processes_per_node
        self._steps: dict[int, dict[int, Pace]] = defaultdict(dict)
        self._known: dict[int, _Rank] = {}
        self._seen = 0  # whole steps

    def add(self, pace: Pace) -> list[Straggling]:
        """What has changed with this rank's step: who is named now, and who is no more."""
        of_step = self._steps[pace.step]
        of_step[pace.rank] = pace
        if len(of_step) < self._count or self._count < 2:
            return []
        for step in [each for each in self._steps if each <= pace.step]:  # earlier ones stay incomplete
            del self._steps[step]
        self._seen += 1
        if self._seen <= WARM_UP:
            return []
        for rank, lag in lags(of_step).items():
            known = self._known.setdefault(rank, _Rank(newest=of_step[rank]))
            known.newest = of_step[rank]
            known.lags.append((pace.step, lag, known.newest.dt))
            while _is_enough(list(known.lags)[1:]):
                known.lags.popleft()
        return self._changes()

    @property
    def named(self) -> tuple[Straggling, ...]:
        """Who is late at present."""
        return tuple(rank.named for rank in self._known.values() if rank.named is not None)

    def _changes(self) -> list[Straggling]:
        changed = []
        for known in self._known.values():
            if not _is_enough(known.lags):
                continue
            pace, values = known.newest, [lag for _, lag, _ in known.lags]
            late = sum(lag > LATE for lag in values) >= STEADILY * len(values) and _certain(values)
            if known.named is None and late:
                known.named = Straggling(
                    rank=pace.rank,
                    local_rank=pace.local_rank,
                    node=pace.node,
                    host=pace.host,
                    since=known.lags[0][0],
                    step=pace.step,
                    share=median(values),
                )
                changed.append(known.named)
            elif known.named is not None and sum(lag > ON_TIME for lag in values) <= len(values) / 2:
                changed.append(replace(known.named, step=pace.step, over=True))
                known.named = None
        return [self._with_node(each) for each in changed]

    def _with_node(self, each: Straggling) -> Straggling:
        late = {named.rank for named in self.named if named.node == each.node} | {each.rank}
        return replace(each, whole_node=len(late) == self._per_node)


def lags(of_step: Mapping[int, Pace]) -> dict[int, float]:
    """By rank, how much longer the others (their median) stood in collectives, as a share of the step."""
    ordered = sorted(of_step.values(), key=lambda pace: pace.in_collectives)
    took = median(pace.dt for pace in ordered)
    others = len(ordered) - 1
    middle = {(others - 1) // 2, others // 2}  # places of their median among the others
    found = {}
    for place, pace in enumerate(ordered):
        values = [ordered[each + (each >= place)].in_collectives for each in middle]
        found[pace.rank] = (sum(values) / len(values) - pace.in_collectives) / took if took > 0 else 0.0
    return found


def _certain(values: Sequence[float]) -> bool:
    return bool(mean(values) > CERTAIN * stdev(values) / math.sqrt(len(values)))


def _is_enough(steps: Iterable[tuple[int, float, float]]) -> bool:
    seconds = [took for _, _, took in steps]
    return len(seconds) >= LEAST_STEPS and sum(seconds) >= LEAST_S


def shown(newest: Iterable[Straggling]) -> list[Straggling]:
    """One of each rank, but of a node that is late as a whole one of all its ranks."""
    events = list(newest)
    nodes = {each.node for each in events if each.whole_node}
    return list({(each.node, -1 if each.node in nodes else each.rank): each for each in events}.values())


def late_lines(newest: Iterable[Straggling], *, on_gpus: bool) -> list[str]:
    """In words, those who are late or were; ``newest``: the last that was said of each rank."""
    return [words(each, on_gpus=on_gpus) for each in shown(newest)]


def words(each: Straggling, *, on_gpus: bool) -> str:
    """One line: who, how much, and since when."""
    place = f"node {each.node}, {each.host}"
    if each.whole_node:
        who = f"node {each.node} ({each.host})"
    elif on_gpus:
        who = f"rank {each.rank} (GPU {each.local_rank} of {place})"
    else:
        who = f"rank {each.rank} ({place})"
    if each.over:
        return f"{who} is no longer late, at step {each.step}; it was since step {each.since}"
    return f"{who} is late: the others wait for it {each.share:.0%} of each step, since step {each.since}"
