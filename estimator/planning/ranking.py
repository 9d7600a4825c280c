"""Ranking: plans in the order of the goals, and what was rejected and why."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from estimator.formatting import format_bytes, format_duration, format_usd
from estimator.plan import Plan
from estimator.planning.capacity import why_rare
from estimator.planning.goals import Goals
from estimator.planning.interruptions import against_budget
from estimator.planning.search import INDISTINCT, Candidate, Miss, complexity, percent

WORTH_A_TRADE = 2.0  # times as fast, from which on a plan of about the same price is pointed at
RejectionKind = Literal[
    "memory",
    "host memory",
    "disk",
    "batch",
    "deadline",
    "budget",
    "price",
    "speed",
    "method",
    "interruptions",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejection:
    """A machine (or a method) that was weighed and not taken."""

    what: str
    reason: str
    kind: RejectionKind
    over: float | None = None  # by how much of the limit; None where that is no number

    def __str__(self) -> str:
        return f"{self.what}: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """Plans from the best down, and the nearest of what was rejected."""

    plans: tuple[Plan, ...]
    rejected: tuple[Rejection, ...]
    order: str  # in words

    @property
    def best(self) -> Plan:
        """The plan that ranks first."""
        return self.plans[0]

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines to read before the plans: why none can be launched, and a trade that is worth a thought."""
        only = self.best.planned_only
        first = f"This package can launch none of these plans: {only}." if only is not None else ""
        return tuple(filter(None, [first, _trade(self.plans)]))

    def to_dict(self) -> dict[str, Any]:
        """Plans and rejections as plain values."""
        return {
            "order": self.order,
            "notes": list(self.notes),
            "plans": [plan.to_dict() for plan in self.plans],
            "rejected": [asdict(rejection) for rejection in self.rejected],
        }

    def to_json(self) -> str:
        """Plans and rejections as indented JSON."""
        return json.dumps(self.to_dict(), indent=2)


def _trade(plans: tuple[Plan, ...]) -> str:
    """A later plan that is several times as fast as the first for about its price, in words; "" for none."""
    first, rate = plans[0].prediction, plans[0].prediction.tokens_per_second
    if not rate or not first.usd_per_hour:
        return ""
    trades = []
    for rank, plan in enumerate(plans[1:], 2):
        speed, hourly = plan.prediction.tokens_per_second, plan.prediction.usd_per_hour
        if not speed or not hourly or speed < WORTH_A_TRADE * rate:
            continue
        dearer = hourly / speed / (first.usd_per_hour / rate) - 1
        if dearer <= INDISTINCT:
            trades.append((speed / rate, rank, dearer))
    if not trades:
        return ""
    times, rank, dearer = max(trades)
    rare = plans[rank - 1].prediction.rarely_had
    remedy = "`--capacity any` ranks it by that" if rare else "`--prefer speed` puts the fastest first"
    return (
        f"Plan {rank} is {times:.1f} times as fast as plan 1 and {compared(dearer, 'dearer', 'cheaper')} a "
        f"token; {remedy}."
    )


def in_order(
    candidates: list[Candidate], goals: Goals, *, tokens: int | None, capacity: str
) -> list[Candidate]:
    """The candidates, best first. One rule, by which the same candidates always come in the same order.

    First come those whose memory is not tight (unless the goals accept that), whose host memory is known to
    suffice, that use all GPUs that are paid for, that (capacity ``usual``) can usually be had, that are on
    GPUs with a measured run, and whose price and speed are known. A machine never comes before a clearly
    cheaper one with the same GPUs. Among equals in this the price decides: of the whole job with its start-up
    and with starts that are expected to run out of memory, where ``tokens`` tell its size, else of a token,
    and the GPU-hours where no price is known; with a budget, or where speed is preferred, the time does.
    Figures that cannot be told apart count as equal, in bands: the best figure and all within
    :data:`INDISTINCT` of it, then the best of what is left and all within as much of that. In a band the
    lower price an hour is first, then fewer GPUs, then the simpler layout, then fewer machines.
    """
    groups: dict[tuple[bool, ...], list[tuple[float, Candidate]]] = {}
    keys = _behind_cheaper(candidates, [_group(candidate, goals, capacity) for candidate in candidates])
    for candidate, key in zip(candidates, keys, strict=True):
        groups.setdefault(key, []).append((figure(candidate, goals, tokens), candidate))
    return [candidate for key in sorted(groups) for candidate in _banded(groups[key])]


def _group(candidate: Candidate, goals: Goals, capacity: str) -> tuple[bool, ...]:
    """Return the criteria that are compared before any figure; False is first."""
    tight = candidate.memory.tight and not goals.tight
    # What is not known to fit the machine's memory comes after what is
    host = candidate.place is not None and candidate.place.ram_bytes is None
    rare = capacity == "usual" and bool(why_rare(candidate.place))
    unpriced, unmeasured = candidate.usd_per_hour is None, candidate.speed.tokens_per_second is None
    known = (unmeasured, unpriced) if goals.by_speed else (unpriced, unmeasured)
    # The first three also say which machines are alike (_behind_cheaper)
    return (tight, host, candidate.idle_gpus > 0, rare, candidate.unmeasured, *known)


def _behind_cheaper(candidates: list[Candidate], keys: list[tuple[bool, ...]]) -> list[tuple[bool, ...]]:
    """The groups, with each machine in none before that of a clearly cheaper one with the same GPUs."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, candidate in enumerate(candidates):
        layout = candidate.layout
        if candidate.usd_per_hour is not None and candidate.gpu is not None:
            same = (candidate.gpu.name, layout.nodes, layout.processes_per_node)
            alike.setdefault(same, []).append(index)
    found = list(keys)
    for members in alike.values():
        prices = {index: candidates[index].usd_per_hour or 0.0 for index in members}
        for index in members:
            cheaper = [
                keys[other]
                for other in members
                if prices[other] * (1 + INDISTINCT) < prices[index] and keys[other][:3] == keys[index][:3]
            ]
            found[index] = max([keys[index], *cheaper])
    return found


def figure(candidate: Candidate, goals: Goals, tokens: int | None) -> float:
    """Return the figure that orders a group, smaller is better; 0 if neither price nor speed is known."""
    cost = candidate.expected_usd(tokens) if tokens is not None else candidate.usd_per_token
    speed = candidate.speed.tokens_per_second
    time = candidate.expected_hours(tokens) if tokens is not None else None if speed is None else 1 / speed
    # Without a price the GPUs are what is paid
    effort = None if time is None else time * candidate.layout.world_size
    known = [time, cost] if goals.by_speed else [cost, effort]
    return next((figure for figure in known if figure is not None), 0.0)


def _banded(group: list[tuple[float, Candidate]]) -> Iterator[Candidate]:
    left = sorted(group, key=lambda item: item[0])
    while left:
        limit = left[0][0] * (1 + INDISTINCT)
        band = [item for item in left if item[0] <= limit]
        left = left[len(band) :]
        yield from (candidate for _, candidate in sorted(band, key=_within_band))


def _within_band(item: tuple[float, Candidate]) -> tuple[object, ...]:
    figure, candidate = item
    hourly = candidate.usd_per_hour
    layout = candidate.layout
    return (
        math.inf if hourly is None else round(hourly, 2),  # a dozen small machines cost what a large one does
        layout.world_size,
        complexity(layout),
        layout.nodes,
        figure,
    )


def order_in_words(goals: Goals, capacity: str, *, priced: bool = True) -> str:
    """Describe the order of :func:`in_order` in one line; ``priced``: whether prices are known."""
    rare = "low on-demand availability, " if capacity == "usual" else ""
    first = goals.order if priced else goals.unpriced_order
    ties = f"plans within {100 * INDISTINCT:.0f} % are treated as ties"
    last = f"last: {rare}GPUs without a measured run, machines used in part"
    return f"{first}; {ties}: then lower price per hour, fewer GPUs, simpler layout; {last}"


def against_goals(candidate: Candidate, goals: Goals, tokens: int | None) -> Rejection | None:
    """Return the reason why a candidate misses deadline or budget, or would hardly finish on spot; None if
    it meets them.
    """
    hours, usd = candidate.hours(tokens), candidate.usd(tokens)
    if candidate.interruptions is not None and hours is not None:
        reason = against_budget(hours, candidate.interruptions, goals.max_disruptions)
        if reason is not None:
            return Rejection(what=candidate.what, reason=reason, kind="interruptions", over=hours)
    if goals.deadline_hours is not None:
        if hours is None:
            return Rejection(
                what=candidate.what, reason=f"speed unknown: {candidate.speed.basis}", kind="speed"
            )
        if hours > goals.deadline_hours:
            over = hours / goals.deadline_hours - 1
            reason = (
                f"takes {format_duration(hours * 3600)} of {goals.deadline_hours:g} h: {percent(over)} over"
            )
            return Rejection(what=candidate.what, reason=reason, kind="deadline", over=over)
    if goals.budget_usd is not None:
        if usd is None:
            return Rejection(what=candidate.what, reason=unknown(candidate, goals), kind="price")
        if usd > goals.budget_usd:
            over = usd / goals.budget_usd - 1
            reason = f"costs {format_usd(usd)} of {format_usd(goals.budget_usd)}: {percent(over)} over"
            return Rejection(what=candidate.what, reason=reason, kind="budget", over=over)
    return None


def of_misses(misses: list[Miss], most: int) -> list[Rejection]:
    """A rejection for each GPU type on which nothing fits, nearest first, at most ``most``."""
    nearest: dict[str, Rejection] = {}
    for miss in sorted(misses, key=lambda miss: miss.over):
        kind: RejectionKind = miss.where
        rejection = Rejection(what=miss.what, reason=miss.reason, kind=kind, over=miss.over)
        nearest.setdefault(miss.what.split(" (")[0].partition("x ")[2], rejection)
    return list(nearest.values())[:most]


def distinct(candidates: list[Candidate]) -> list[Candidate]:
    """Keep the best candidate of each cloud, GPU and number of GPUs: others of the same only cost more."""
    first: dict[tuple[object, ...], Candidate] = {}
    for candidate in candidates:
        gpu, place, layout = candidate.gpu, candidate.place, candidate.layout
        cloud = place.cloud if place else None
        name = gpu.name if gpu else None
        first.setdefault((name, cloud, layout.nodes, layout.processes_per_node), candidate)
    return list(first.values())


def dearer(best: Candidate, others: list[Candidate], goals: Goals, most: int) -> list[Rejection]:
    """A rejection for each GPU type that fits as well but comes later in the order, at most ``most``.

    First those that only come later because they can rarely be had.
    """
    lines: list[Rejection] = []
    gpu_names = {best.gpu.name if best.gpu else ""}
    limit = (best.usd_per_token or 0.0) * (1 + INDISTINCT)
    for other in sorted(
        others, key=lambda each: not (why_rare(each.place) and (each.usd_per_token or math.inf) < limit)
    ):
        if other.gpu is None or other.gpu.name in gpu_names or len(lines) == most:
            continue
        gpu_names.add(other.gpu.name)
        lines.append(_behind(best, other, goals))
    return lines


def _behind(best: Candidate, other: Candidate, goals: Goals) -> Rejection:
    if other.place is not None and other.place.ram_bytes is None:
        needs = format_bytes(other.memory.host_bytes)
        reason = f"fits its GPUs; needs {needs} of host memory, which the table does not tell"
        return Rejection(what=other.what, reason=reason, kind="host memory")
    rare = why_rare(other.place)
    mark = f"; low availability: {rare}" if rare else ""
    speeds = (best.speed.tokens_per_second, other.speed.tokens_per_second)
    if goals.by_speed and speeds[0] and speeds[1]:
        slower = 1 - speeds[1] / speeds[0]
        reason = f"fits, {compared(slower, 'slower', 'faster')}" if slower else "fits, as fast and dearer"
        return Rejection(what=other.what, reason=reason + mark, kind="speed", over=slower)
    if other.usd_per_token is not None and best.usd_per_token is not None:
        over = other.usd_per_token / best.usd_per_token - 1
        hourly = f", at {format_usd(other.usd_per_hour)} an hour" if abs(over) < INDISTINCT else ""
        reason = f"fits, {compared(over, 'dearer', 'cheaper')} a token{hourly}{mark}"
        return Rejection(what=other.what, reason=reason, kind="price", over=over)
    return Rejection(what=other.what, reason=f"fits; {unknown(other, goals)}{mark}", kind="price")


def compared(more: float, if_more: str, if_less: str) -> str:
    """A difference in words: "3.0 % dearer"."""
    return f"{percent(abs(more))} {if_more if more >= 0 else if_less}"


def unknown(candidate: Candidate, goals: Goals) -> str:
    """Name the unknown ones of a candidate's price and speed."""
    if candidate.usd_per_hour is None:
        return f"its {'spot ' if goals.spot else ''}price is not known"
    return f"its speed is not known: {candidate.speed.basis}"
