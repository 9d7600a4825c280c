"""Ranking of plans by the goals, and reasons for rejections."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from estimator.formatting import format_bytes, format_duration, format_usd
from estimator.job import Target
from estimator.plan import Plan
from estimator.planning.candidates import TIE_MARGIN, Candidate, Shortage, complexity, percent
from estimator.planning.capacity import why_rare
from estimator.planning.goals import Goals
from estimator.planning.interruptions import completion_obstacle
from estimator.planning.report import describe_gpus

MIN_TRADE_SPEEDUP = 2.0  # minimum speedup of a plan of about the same price to mention it
# Of plans of about the same price, those slower than this share of a rival rank last (:func:`paced_by`). A
# choice, above the error of predicted speeds (TIE_MARGIN). A second machine alone halves the time of a job.
SLOWEST_SHARE = {"job": 1 / 3, "GPUs": 1 / 2}
PACES = {
    "job": "at least a third as fast as the fastest",
    "GPUs": "more than half as fast as the fastest with no more GPUs",
}
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
    """Hardware (or a method) that was not chosen."""

    what: str
    reason: str
    kind: RejectionKind
    over: float | None = None  # excess as a fraction of the limit; None: not a number

    def __str__(self) -> str:
        return f"{self.what}: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """Plans, best first, and the nearest rejected ones."""

    plans: tuple[Plan, ...]
    rejected: tuple[Rejection, ...]
    order: str  # description for users

    @property
    def best(self) -> Plan:
        """First plan."""
        return self.plans[0]

    @property
    def obstacle(self) -> str:
        """Reason why no plan can be launched; "" if the first can."""
        limit = self.best.planned_only
        return f"None of these plans can be launched: {limit}." if limit is not None else ""

    @property
    def faster(self) -> str:
        """Description of a later plan that is much faster for about the price of the first; "" for none."""
        return _faster(self.plans)

    def to_dict(self) -> dict[str, Any]:
        """Convert plans and rejections to plain values."""
        return {
            "order": self.order,
            "notes": [note for note in (self.obstacle, self.faster) if note],
            "plans": [plan.to_dict() for plan in self.plans],
            "rejected": [asdict(rejection) for rejection in self.rejected],
        }

    def to_json(self) -> str:
        """Format plans and rejections as indented JSON."""
        return json.dumps(self.to_dict(), indent=2)


_VISIBLE = 0.005  # relative difference that whole percents show


def _faster(plans: tuple[Plan, ...]) -> str:
    first, rate = plans[0].prediction, plans[0].prediction.tokens_per_second
    if not rate or not first.usd_per_hour:
        return ""
    trades = []
    for rank, plan in enumerate(plans[1:], 2):
        speed, hourly = plan.prediction.tokens_per_second, plan.prediction.usd_per_hour
        if not speed or not hourly or speed < MIN_TRADE_SPEEDUP * rate:
            continue
        extra_cost = hourly / speed / (first.usd_per_hour / rate) - 1
        if extra_cost <= TIE_MARGIN:
            trades.append((speed / rate, rank, extra_cost))
    if not trades:
        return ""
    times, rank, extra_cost = max(trades)
    plan = plans[rank - 1]
    option = "--capacity any" if plan.prediction.low_availability else "--prefer speed"
    return (
        f"{describe_gpus(plan.request)} would be {times:.1f} times as fast and "
        f"{compare_prices(1 + extra_cost)} per token: see {option}."
    )


def sort_candidates(
    candidates: list[Candidate], goals: Goals, *, tokens: int | None, target: Target
) -> list[Candidate]:
    """Sort candidates, best first, by a total order.

    First by group: memory not tight (unless the target accepts that), host memory known to suffice, all paid
    GPUs used, GPUs with a measured run, good availability (capacity ``usual``), price and speed known. A
    machine never ranks before a clearly cheaper one with the same GPUs. Within a group, by price: of the
    complete job with start-up and expected out-of-memory restarts if ``tokens`` is known, otherwise per
    token; by GPU-hours if no price is known; by time with a budget or if speed is preferred. Ties are formed
    in bands: the best figure and all within :data:`TIE_MARGIN` of it, then the best of the rest, and so on.
    Within a band, first those not much slower than its fastest (:func:`pace`), then by lower price per hour,
    fewer GPUs, simpler layout, fewer nodes.
    """
    groups: dict[tuple[bool, ...], list[_Ranked]] = {}
    groups_of = [_group(candidate, goals, target) for candidate in candidates]
    keys = _behind_cheaper(candidates, groups_of, comparable=3)
    for candidate, key in zip(candidates, keys, strict=True):
        ranked = (figure(candidate, goals, tokens), pace(candidate, goals, tokens), candidate)
        groups.setdefault(key, []).append(ranked)
    measure = paced_by(goals, tokens)
    return [candidate for key in sorted(groups) for candidate in _banded(groups[key], measure)]


def _group(candidate: Candidate, goals: Goals, target: Target) -> tuple[bool, ...]:
    """Return the criteria that are compared before any figure; False ranks first."""
    tight = candidate.memory.tight and not target.tight
    # Candidates with unknown host memory rank after those known to fit
    host = candidate.place is not None and candidate.place.ram_bytes is None
    low_availability = target.capacity == "usual" and bool(why_rare(candidate.place))
    unpriced, unmeasured = candidate.usd_per_hour is None, candidate.speed.tokens_per_second is None
    unknown_figures = (unmeasured, unpriced) if goals.by_speed else (unpriced, unmeasured)
    # The first three also define comparable instance types (_behind_cheaper)
    return (tight, host, candidate.idle_gpus > 0, candidate.unmeasured, low_availability, *unknown_figures)


def _behind_cheaper(
    candidates: list[Candidate], keys: list[tuple[bool, ...]], *, comparable: int
) -> list[tuple[bool, ...]]:
    """Adjust the groups so that none ranks before a clearly cheaper candidate with the same GPUs.

    Candidates are compared if the first ``comparable`` criteria of their groups are equal.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, candidate in enumerate(candidates):
        layout = candidate.layout
        if candidate.usd_per_hour is not None and candidate.gpu is not None:
            group = (candidate.gpu.name, layout.nodes, layout.processes_per_node)
            groups.setdefault(group, []).append(index)
    result = list(keys)
    for members in groups.values():
        prices = {index: candidates[index].usd_per_hour or 0.0 for index in members}
        for index in members:
            cheaper = [
                keys[rival]
                for rival in members
                if prices[rival] * (1 + TIE_MARGIN) < prices[index]
                and keys[rival][:comparable] == keys[index][:comparable]
            ]
            result[index] = max([keys[index], *cheaper])
    return result


def figure(candidate: Candidate, goals: Goals, tokens: int | None) -> float:
    """Return the figure that orders a group, smaller is better; 0 if neither price nor speed is known."""
    cost = candidate.expected_usd(tokens) if tokens is not None else candidate.usd_per_token
    speed = candidate.speed.tokens_per_second
    time = candidate.expected_hours(tokens) if tokens is not None else None if speed is None else 1 / speed
    # Without prices, GPU-hours represent the cost
    effort = None if time is None else time * candidate.layout.world_size
    figures = [time, cost] if goals.by_speed else [cost, effort]
    return next((figure for figure in figures if figure is not None), 0.0)


def pace(candidate: Candidate, goals: Goals, tokens: int | None) -> float:
    """Return the speed that decides among plans of about the same price; 0: it does not decide.

    Jobs per hour, start-up included, or tokens per second (:func:`paced_by`).
    """
    measure, speed = paced_by(goals, tokens), candidate.speed.tokens_per_second
    if measure is None or candidate.usd_per_hour is None or speed is None:
        return 0.0
    hours = candidate.expected_hours(tokens) if measure == "job" else None
    return speed if hours is None else 1 / hours


def paced_by(goals: Goals, tokens: int | None) -> Literal["job", "GPUs"] | None:
    """Return how plans of about the same price are compared: by the job's time, or on no more GPUs.

    On no more GPUs if the amount of training is unknown, as a short job pays mostly start-up, and in a
    cluster, whose GPUs others need too. None: not at all, as a deadline states which time is acceptable.
    """
    if goals.by_speed or goals.deadline_hours is not None:
        return None
    return "job" if tokens is not None and goals.cluster is None else "GPUs"


_Ranked = tuple[float, float, Candidate]  # figure, pace, candidate


def _banded(group: list[_Ranked], measure: Literal["job", "GPUs"] | None) -> Iterator[Candidate]:
    remaining = sorted(group, key=lambda item: item[0])
    while remaining:
        limit = remaining[0][0] * (1 + TIE_MARGIN)
        band = [item for item in remaining if item[0] <= limit]
        remaining = remaining[len(band) :]
        slow = _behind_cheaper(
            [item[-1] for item in band], [(_is_slow(item, band, measure),) for item in band], comparable=0
        )
        order = sorted(zip(slow, band, strict=True), key=lambda entry: (entry[0], _within_band(entry[1])))
        yield from (item[-1] for _, item in order)


def _is_slow(item: _Ranked, band: list[_Ranked], measure: Literal["job", "GPUs"] | None) -> bool:
    """Return whether a candidate is much slower than a rival of its band, with ``"GPUs"`` on no more GPUs."""
    if measure is None:
        return False
    _, own_pace, candidate = item
    most_gpus = math.inf if measure == "job" else candidate.layout.world_size
    rivals = [pace for _, pace, rival in band if rival.layout.world_size <= most_gpus]
    return own_pace < max(rivals) * SLOWEST_SHARE[measure]


def _within_band(item: _Ranked) -> tuple[object, ...]:
    figure, _, candidate = item
    hourly = candidate.usd_per_hour
    layout = candidate.layout
    return (
        math.inf
        if hourly is None
        else round(hourly, 2),  # several small instances may cost the same as a large one
        layout.world_size,
        complexity(layout),
        layout.nodes,
        figure,
    )


def describe_order(goals: Goals, capacity: str, tokens: int | None, *, priced: bool = True) -> str:
    """Describe the order of :func:`sort_candidates` in one line; ``priced``: whether prices are known."""
    availability = "low on-demand availability, " if capacity == "usual" else ""
    first = goals.order if priced else goals.unpriced_order
    hourly = "lower price per hour, " if priced else ""
    measure = paced_by(goals, tokens) if priced else None
    pace = f"first those {PACES[measure]}, then " if measure else ""
    ties = f"Ties (within {100 * TIE_MARGIN:.0f} %): {pace}{hourly}fewer GPUs, simpler layout"
    last = f"Last: {availability}GPUs without a measured run, machines used in part"
    return f"{first}. {ties}. {last}"


def rejection_by_goals(candidate: Candidate, goals: Goals, tokens: int | None) -> Rejection | None:
    """Return the reason why a candidate misses deadline or budget, or is unlikely to finish, or None."""
    hours, usd = candidate.hours(tokens), candidate.usd(tokens)
    if candidate.interruptions is not None and hours is not None:
        reason = completion_obstacle(hours, candidate.interruptions, goals.max_disruptions)
        if reason is not None:
            return Rejection(what=candidate.hardware, reason=reason, kind="interruptions", over=hours)
    if goals.deadline_hours is not None:
        if hours is None:
            return Rejection(
                what=candidate.hardware, reason=f"speed unknown: {candidate.speed.basis}", kind="speed"
            )
        if hours > goals.deadline_hours:
            excess = hours / goals.deadline_hours - 1
            limit = format_duration(goals.deadline_hours * 3600)
            reason = f"takes {format_duration(hours * 3600)} of {limit}: {percent(excess)} over"
            return Rejection(what=candidate.hardware, reason=reason, kind="deadline", over=excess)
    if goals.budget_usd is not None:
        if usd is None:
            return Rejection(what=candidate.hardware, reason=unknown(candidate, goals), kind="price")
        if usd > goals.budget_usd:
            excess = usd / goals.budget_usd - 1
            reason = f"costs {format_usd(usd)} of {format_usd(goals.budget_usd)}: {percent(excess)} over"
            return Rejection(what=candidate.hardware, reason=reason, kind="budget", over=excess)
    return None


def rejections_of_shortages(shortages: list[Shortage], limit: int) -> list[Rejection]:
    """Return at most ``limit`` rejections, one per GPU type on which nothing fits, nearest first."""
    nearest: dict[str, Rejection] = {}
    for shortage in sorted(shortages, key=lambda shortage: shortage.over):
        kind: RejectionKind = shortage.where
        rejection = Rejection(what=shortage.hardware, reason=shortage.reason, kind=kind, over=shortage.over)
        nearest.setdefault(shortage.hardware.split(" (")[0].partition("x ")[2], rejection)
    return list(nearest.values())[:limit]


def distinct(candidates: list[Candidate]) -> list[Candidate]:
    """Keep the best candidate per cloud, GPU and number of GPUs: others only cost more."""
    first: dict[tuple[object, ...], Candidate] = {}
    for candidate in candidates:
        gpu, place, layout = candidate.gpu, candidate.place, candidate.layout
        cloud = place.cloud if place else None
        name = gpu.name if gpu else None
        first.setdefault((name, cloud, layout.nodes, layout.processes_per_node), candidate)
    return list(first.values())


def later_ranked(
    best: Candidate, candidates: list[Candidate], goals: Goals, max_lines: int
) -> list[Rejection]:
    """Return at most ``max_lines`` rejections, one per GPU type that fits but ranks later.

    First those that rank later only because of low availability.
    """
    lines: list[Rejection] = []
    gpu_names = {best.gpu.name if best.gpu else ""}
    limit = (best.usd_per_token or 0.0) * (1 + TIE_MARGIN)
    for candidate in sorted(
        candidates, key=lambda item: not (why_rare(item.place) and (item.usd_per_token or math.inf) < limit)
    ):
        if candidate.gpu is None or candidate.gpu.name in gpu_names or len(lines) == max_lines:
            continue
        gpu_names.add(candidate.gpu.name)
        lines.append(_later_rejection(best, candidate, goals))
    return lines


def _later_rejection(best: Candidate, candidate: Candidate, goals: Goals) -> Rejection:
    if candidate.place is not None and candidate.place.ram_bytes is None:
        needs = format_bytes(candidate.memory.host_bytes)
        reason = f"fits its GPUs; needs {needs} of host memory, whose size is unknown"
        return Rejection(what=candidate.hardware, reason=reason, kind="host memory")
    scarcity = why_rare(candidate.place)
    mark = f"; low availability: {scarcity}" if scarcity else ""
    speeds = (best.speed.tokens_per_second, candidate.speed.tokens_per_second)
    if goals.by_speed and speeds[0] and speeds[1]:
        ratio = speeds[1] / speeds[0]
        reason = f"fits, {compare_speeds(ratio)}" + (" and more expensive" if ratio == 1 else "")
        return Rejection(what=candidate.hardware, reason=reason + mark, kind="speed", over=1 - ratio)
    if candidate.usd_per_token is not None and best.usd_per_token is not None:
        excess = candidate.usd_per_token / best.usd_per_token - 1
        hourly = f", at {format_usd(candidate.usd_per_hour)} per hour" if abs(excess) < TIE_MARGIN else ""
        reason = f"fits, {format_change(excess, 'more expensive', 'cheaper')} per token{hourly}{mark}"
        return Rejection(what=candidate.hardware, reason=reason, kind="price", over=excess)
    return Rejection(what=candidate.hardware, reason=f"fits; {unknown(candidate, goals)}{mark}", kind="price")


def format_change(difference: float, if_positive: str, if_negative: str) -> str:
    """Describe a relative difference: "3.0 % cheaper"."""
    return f"{percent(abs(difference))} {if_positive if difference >= 0 else if_negative}"


def compare_prices(ratio: float) -> str:
    """Describe a price as a multiple of another: "3.0 % cheaper", "equally expensive"."""
    return (
        "equally expensive"
        if abs(ratio - 1) < _VISIBLE
        else format_change(ratio - 1, "more expensive", "cheaper")
    )


def compare_speeds(ratio: float) -> str:
    """Describe a speed as a multiple of another: "20 % faster", "3.1 times as fast", "equally fast"."""
    if abs(ratio - 1) < _VISIBLE:
        return "equally fast"
    return f"{ratio:.1f} times as fast" if ratio >= 2 else format_change(ratio - 1, "faster", "slower")


def unknown(candidate: Candidate, goals: Goals) -> str:
    """Describe which of a candidate's price and speed is unknown."""
    if candidate.usd_per_hour is None:
        return f"its {'spot ' if goals.spot else ''}price is unknown"
    return f"its speed is unknown: {candidate.speed.basis}"
