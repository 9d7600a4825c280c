"""Ranking: plans in the order of the goals, and what was rejected and why."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from estimator.plan import Plan
from estimator.planning.goals import Goals
from estimator.planning.search import Candidate, Miss, gib, percent

RejectionKind = Literal["memory", "host memory", "batch", "deadline", "budget", "price", "speed", "method"]


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

    def to_dict(self) -> dict[str, Any]:
        """Plans and rejections as plain values."""
        return {
            "order": self.order,
            "plans": [plan.to_dict() for plan in self.plans],
            "rejected": [asdict(rejection) for rejection in self.rejected],
        }

    def to_json(self) -> str:
        """Plans and rejections as indented JSON."""
        return json.dumps(self.to_dict(), indent=2)


def sort_key(candidate: Candidate, goals: Goals) -> tuple[float, ...]:
    """A candidate's place in the order of the goals: the smaller, the better.

    Unknown prices and speeds come after known ones.
    """
    cost, speed = candidate.usd_per_token, candidate.speed.tokens_per_second
    # What is not known to fit the machine's memory comes after what is
    host = candidate.place is not None and candidate.place.ram_bytes is None
    by_price = (cost is None, cost or 0.0)
    by_speed = (speed is None, -(speed or 0.0))
    size = (candidate.layout.nodes, candidate.layout.world_size)
    if goals.by_speed:
        return (host, *by_speed, *by_price, *size)
    hourly = candidate.usd_per_hour
    unpriced = (hourly is None, hourly or 0.0) if cost is None else (False, 0.0)
    return (host, by_price[0], by_speed[0], by_price[1], *unpriced, by_speed[1], *size)


def against_goals(candidate: Candidate, goals: Goals, tokens: int | None) -> Rejection | None:
    """Why a candidate misses the deadline or the budget; None where it meets both."""
    hours, usd = candidate.hours(tokens), candidate.usd(tokens)
    if goals.deadline_hours is not None:
        if hours is None:
            return Rejection(
                what=candidate.what, reason=f"speed unknown: {candidate.speed.basis}", kind="speed"
            )
        if hours > goals.deadline_hours:
            over = hours / goals.deadline_hours - 1
            reason = f"takes {hours:,.1f} h of {goals.deadline_hours:g}: {percent(over)} over"
            return Rejection(what=candidate.what, reason=reason, kind="deadline", over=over)
    if goals.budget_usd is not None:
        if usd is None:
            return Rejection(what=candidate.what, reason=unknown(candidate, goals), kind="price")
        if usd > goals.budget_usd:
            over = usd / goals.budget_usd - 1
            reason = f"costs ${usd:,.2f} of ${goals.budget_usd:,.2f}: {percent(over)} over"
            return Rejection(what=candidate.what, reason=reason, kind="budget", over=over)
    return None


def of_misses(misses: list[Miss], most: int) -> list[Rejection]:
    """A rejection for each GPU type on which nothing fits, nearest first, at most ``most``."""
    nearest: dict[str, Rejection] = {}
    for miss in sorted(misses, key=lambda miss: miss.over):
        kind: RejectionKind = "host memory" if miss.where == "host memory" else "memory"
        rejection = Rejection(what=miss.what, reason=miss.reason, kind=kind, over=miss.over)
        nearest.setdefault(miss.what.split(" (")[0].partition("x ")[2], rejection)
    return list(nearest.values())[:most]


def distinct(candidates: list[Candidate]) -> list[Candidate]:
    """Of each cloud, GPU and number of GPUs the best candidate: others with the same only cost more."""
    first: dict[tuple[object, ...], Candidate] = {}
    for candidate in candidates:
        gpu, place, layout = candidate.gpu, candidate.place, candidate.layout
        cloud = place.cloud if place else None
        name = gpu.name if gpu else None
        first.setdefault((name, cloud, layout.nodes, layout.processes_per_node), candidate)
    return list(first.values())


def dearer(best: Candidate, others: list[Candidate], goals: Goals, most: int) -> list[Rejection]:
    """A rejection for each GPU type that fits as well but comes later in the order, at most ``most``."""
    lines: list[Rejection] = []
    gpu_names = {best.gpu.name if best.gpu else ""}
    for other in others:
        if other.gpu is None or other.gpu.name in gpu_names or len(lines) == most:
            continue
        gpu_names.add(other.gpu.name)
        lines.append(_behind(best, other, goals))
    return lines


def _behind(best: Candidate, other: Candidate, goals: Goals) -> Rejection:
    if other.place is not None and other.place.ram_bytes is None:
        needs = gib(other.memory.host_bytes)
        reason = f"fits its GPUs; needs {needs} of host memory, which the table does not tell"
        return Rejection(what=other.what, reason=reason, kind="host memory")
    speeds = (best.speed.tokens_per_second, other.speed.tokens_per_second)
    if goals.by_speed and speeds[0] and speeds[1]:
        slower = 1 - speeds[1] / speeds[0]
        reason = f"fits, {percent(slower)} slower" if slower else "fits, as fast and dearer"
        return Rejection(what=other.what, reason=reason, kind="speed", over=slower)
    if other.usd_per_token is not None and best.usd_per_token is not None:
        over = other.usd_per_token / best.usd_per_token - 1
        reason = f"fits, {percent(over)} dearer a token"
        return Rejection(what=other.what, reason=reason, kind="price", over=over)
    return Rejection(what=other.what, reason=f"fits; {unknown(other, goals)}", kind="price")


def unknown(candidate: Candidate, goals: Goals) -> str:
    """Which of a candidate's price and speed is not known, in words."""
    if candidate.usd_per_hour is None:
        return f"its {'spot ' if goals.spot else ''}price is not known"
    return f"its speed is not known: {candidate.speed.basis}"
