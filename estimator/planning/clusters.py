"""Plans for machines other than this one: which of the catalogue's or the cluster's, and how many."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from estimator.errors import CannotFit, UserError
from estimator.job import Job, Target
from estimator.plan import Plan
from estimator.planning import reasons
from estimator.planning.assembly import assemble
from estimator.planning.goals import Goals
from estimator.planning.places import Place, places
from estimator.planning.ranking import Ranking, Rejection, against_goals, dearer, distinct, of_misses, rank
from estimator.planning.search import Candidate, Evidence, Miss, Search, precision_of, shape

MOST_REJECTIONS = 10


@dataclass(kw_only=True, slots=True)
class Survey:
    """What was found on all machines."""

    job: Job
    target: Target
    goals: Goals
    tokens: int | None
    evidence: Evidence
    places: list[Place]
    found: list[Candidate] = field(default_factory=list)
    beyond: list[tuple[Candidate, Rejection]] = field(default_factory=list)  # fits, misses the goals
    misses: list[Miss] = field(default_factory=list)
    searches: dict[str, Search] = field(default_factory=dict)
    indivisible: set[int] = field(default_factory=set)  # numbers of processes that can't make up the batch

    def search(self, place: Place) -> Search:
        precision = precision_of(self.job, "cuda", place.gpu)
        if precision not in self.searches:
            self.searches[precision] = Search(self.job, precision, "cuda", self.evidence)
        return self.searches[precision]

    def run(self) -> Survey:
        for place in self.places:
            self._look_at(place)
        self.found.sort(key=lambda candidate: rank(candidate, self.goals))
        return self

    def _look_at(self, place: Place) -> None:
        """All shapes of one machine type, until larger ones can only be worse."""
        search = self.search(place)
        capacity = place.gpu.vram_bytes
        cheapest = math.inf
        for nodes, count in place.shapes(self.target, self.goals):
            if not search.reaches(nodes, count):
                self.indivisible.add(nodes * count)
                continue
            best = search.best(nodes, count, capacity, place.gpu, place)
            if best is None:
                self.misses.append(
                    search.leanest(shape(place, nodes, count), nodes, count, capacity, place.gpu)
                )
                continue
            short = host_miss(best, place)
            if short is not None:
                self.misses.append(short)
                continue
            missed = against_goals(best, self.goals, self.tokens)
            if missed is None:
                self.found.append(best)
            else:
                self.beyond.append((best, missed))
            cost = best.usd_per_token if best.usd_per_token is not None else math.inf
            if self._enough(place, nodes, count, missed, cheaper=cost < cheapest):
                break
            cheapest = min(cheapest, cost)

    def _enough(
        self, place: Place, nodes: int, count: int, missed: Rejection | None, *, cheaper: bool
    ) -> bool:
        """Whether more of these machines can't be better."""
        if nodes == 1 and count < place.gpus:
            return False
        if missed is not None and missed.kind not in ("price", "speed"):
            return False
        if missed is None and self.goals.by_speed:
            return False
        # One node more may need no checkpointing, or no pipeline; beyond the cheapest it only communicates
        # more. A flow without goals takes the first that fits.
        return not (self.thorough and cheaper)

    @property
    def thorough(self) -> bool:
        return self.target.kind == "catalogue" or self.goals != Goals()


def survey(job: Job, target: Target, goals: Goals, evidence: Evidence) -> Survey:
    tokens = goals.total_tokens(job)
    return Survey(
        job=job,
        target=target,
        goals=goals,
        tokens=tokens,
        evidence=evidence,
        places=places(job, target, goals),
    ).run()


def host_miss(candidate: Candidate, place: Place) -> Miss | None:
    """The nodes' memory, where the job needs more of it than it may have."""
    if place.ram_bytes is None:
        return None
    share = place.allocatable * candidate.layout.processes_per_node / place.gpus
    has = int(place.ram_bytes * share)
    if candidate.memory.host_bytes <= has:
        return None
    return Miss(what=candidate.what, needs=candidate.memory.host_bytes, has=has, where="host memory")


def ranking(seen: Survey, top: int) -> Ranking:
    """The first ``top`` plans of a survey that has found some."""
    best = seen.found[0]
    order = distinct(seen.found)
    misses = of_misses(seen.misses, MOST_REJECTIONS // 2)
    near = sorted((miss for _, miss in seen.beyond), key=lambda miss: (miss.over is None, miss.over or 0.0))
    goals_missed = list({miss.what.split(" (")[0]: miss for miss in reversed(near)}.values())[::-1]
    near_goals = goals_missed[: MOST_REJECTIONS // 3]
    later = dearer(best, order[1:], seen.goals, MOST_REJECTIONS)
    shown = {candidate.gpu.name for candidate in order[:top] if candidate.gpu}
    rest = [line for line in later if not any(f"x {name} (" in line.what for name in shown)]
    rejected = (*near_goals, *misses, *rest)[:MOST_REJECTIONS]
    noted = tuple(str(line) for line in (*near_goals, *misses[:3], *later))[:5]
    plans = [plan_of(seen, candidate, noted if candidate is best else (), best) for candidate in order[:top]]
    return Ranking(plans=tuple(plans), rejected=tuple(rejected), order=seen.goals.order)


def plan_of(seen: Survey, candidate: Candidate, rejected: Iterable[str], best: Candidate) -> Plan:
    search = seen.searches[candidate.layout.precision]
    asked = bool(seen.target.instance_type)
    if not seen.found:
        why = reasons.nearest(candidate)
    elif candidate is best:
        why = reasons.of_machine(candidate, seen.found, asked, seen.goals)
    else:
        why = reasons.behind(candidate, best)
    why += reasons.of_layout(search, candidate)
    return assemble(seen.job, seen.target, candidate, why, tuple(rejected), seen.tokens)


def best_or_none(job: Job, target: Target, goals: Goals | None = None) -> Plan | None:
    """A plan without its failure's alternatives; never recurses into them."""
    try:
        seen = survey(job, target, goals or Goals(), Evidence())
    except UserError:
        return None
    return plan_of(seen, seen.found[0], (), seen.found[0]) if seen.found else None


def as_qlora(job: Job) -> Job | None:
    """The same job with QLoRA on torchtune; None where there is no such thing."""
    if job.method == "qlora" or job.model.experts or job.precision == "bf16-mixed":
        return None
    engine = "torchtune" if job.engine == "deepspeed" else job.engine  # DeepSpeed here has no QLoRA
    return replace(job, method="qlora", engine=engine, zero_stage=None, offload="none")


__all__ = ["CannotFit", "Survey", "as_qlora", "best_or_none", "ranking", "survey"]
