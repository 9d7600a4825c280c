"""Plans for instance types of the catalogue or nodes of a cluster."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from estimator.engines.support import unsupported_job, with_simplest_engine
from estimator.errors import CannotFit, UserError
from estimator.hardware import Gpu
from estimator.job import Job, Target
from estimator.plan import Plan
from estimator.planning import reasons
from estimator.planning.assembly import assemble
from estimator.planning.candidates import Candidate, Shortage, describe_nodes
from estimator.planning.capacity import why_rare
from estimator.planning.goals import Goals
from estimator.planning.measured_gpus import unmeasured_rule
from estimator.planning.places import Place, choose_places
from estimator.planning.ranking import (
    Ranking,
    Rejection,
    describe_order,
    distinct,
    later_ranked,
    rejection_by_goals,
    rejections_of_shortages,
    sort_candidates,
)
from estimator.planning.search import Evidence, Search, precision_of
from estimator.planning.step_requests import disk_of
from estimator.vocabulary import LAUNCHED_ENGINES, METHODS

MOST_REJECTIONS = 10
MOST_COMPARED = 16  # instance types on which other engines are tried, the best with the first engine
_log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Survey:
    """Instance types that a job may use, and the results of the search on each of them."""

    job: Job
    target: Target
    goals: Goals
    tokens: int | None
    evidence: Evidence
    places: list[Place]
    candidates: list[Candidate] = field(default_factory=list)
    goal_misses: list[tuple[Candidate, Rejection]] = field(default_factory=list)  # fits, misses the goals
    shortages: list[Shortage] = field(default_factory=list)
    searches: dict[str, Search] = field(default_factory=dict)
    is_unmeasured: Callable[[Gpu], bool] = field(default_factory=unmeasured_rule)
    indivisible: set[int] = field(default_factory=set)  # numbers of processes that do not divide the batch

    def search(self, place: Place) -> Search:
        """Return the search for the precision of this GPU; instance types of one precision share it."""
        precision = precision_of(self.job, "cuda", place.gpu)
        if precision not in self.searches:
            self.searches[precision] = Search(
                self.job, precision, "cuda", self.evidence, accepts_tight=self.target.tight
            )
        return self.searches[precision]

    def run(self) -> Survey:
        """Search all instance types, and sort the candidates by the goals."""
        for tier in sorted({place.tier for place in self.places}):
            for place in self.places:
                if place.tier == tier:
                    self._search_place(place)
            if self.candidates:
                break
        scattered = [candidate for candidate in self.candidates if self._is_scattered(candidate)]
        for candidate in scattered:
            _log.debug("discarded %s: fewer machines do as much for no higher price", candidate.hardware)
        self.candidates = sort_candidates(
            [candidate for candidate in self.candidates if candidate not in scattered],
            self.goals,
            tokens=self.tokens,
            target=self.target,
        )
        return self

    def by_engine(self, job: Job, *, machines: int = MOST_COMPARED) -> Survey:
        """Search again with the job's engine, on the instance types of this survey's best candidates."""
        places = {
            id(candidate.place): candidate.place
            for candidate in self.candidates
            if candidate.place is not None
        }
        batch = {name: getattr(self.job, name) for name in ("global_batch_size", "batch_multiple")}
        survey = replace(
            self,
            job=replace(job, **batch),
            places=list(places.values())[:machines],
            candidates=[],
            goal_misses=[],
            shortages=[],
            searches={},
        ).run()
        survey.shortages += self.shortages
        return survey

    def _is_scattered(self, candidate: Candidate) -> bool:
        """Return whether a layout uses more nodes than necessary in the cloud, without being cheaper.

        Single GPUs of several nodes are not combined if fewer nodes suffice at any price; parts of an
        instance are not used if the complete one costs the same. A number of GPUs set by the user is kept.
        """
        if candidate.layout.nodes == 1 or self.target.gpus:
            return False
        return any(_is_dominated(considered, candidate) for considered in self.candidates)

    def _search_place(self, place: Place) -> None:
        """Search all node and GPU counts of one instance type, until larger ones can only be worse."""
        search = self.search(place)
        capacity = place.gpu.usable_bytes
        cheapest = math.inf
        for nodes, count in place.shapes(self.target, self.goals):
            if not search.divides_batch(nodes, count):
                self.indivisible.add(nodes * count)
                _log.debug(
                    "discarded %s: cannot divide the global batch", describe_nodes(place, nodes, count)
                )
                continue
            best = search.best(nodes, count, capacity, place.gpu, place)
            if best is not None and self.is_unmeasured(place.gpu):
                best = replace(best, unmeasured=True)
            if best is None:
                shortage = search.smallest_shortage(
                    describe_nodes(place, nodes, count), nodes, count, capacity, place.gpu
                )
                self.shortages.append(shortage)
                _log.debug("discarded %s", shortage)
                continue
            short = host_memory_shortage(best, place) or disk_shortage(self.job, self.target, best, place)
            if short is not None:
                self.shortages.append(short)
                _log.debug("discarded %s", short)
                continue
            rejection = rejection_by_goals(best, self.goals, self.tokens)
            if rejection is None:
                self.candidates.append(best)
                _log.debug("candidate %s: %s", best.hardware, best.layout)
            else:
                self.goal_misses.append((best, rejection))
                _log.debug("discarded %s", rejection)
            cost = best.usd_per_token if best.usd_per_token is not None else math.inf
            if self._is_exhausted(place, nodes, count, rejection, priced_lower=cost < cheapest):
                break
            cheapest = min(cheapest, cost)

    def _is_exhausted(
        self, place: Place, nodes: int, count: int, rejection: Rejection | None, *, priced_lower: bool
    ) -> bool:
        """Return whether a search with more of these nodes is pointless."""
        if nodes == 1 and count < place.gpus:
            return False
        if rejection is not None and rejection.kind not in ("price", "speed"):
            return False
        if rejection is None and self.goals.by_speed:
            return False
        # One more node may avoid checkpointing or a pipeline; beyond the cheapest, it only communicates more.
        # A flow without goals uses the first that fits.
        return not (self.searches_all_places and priced_lower)

    @property
    def searches_all_places(self) -> bool:
        """Whether to continue after the first instance type that fits: for a catalogue, and with goals."""
        return self.target.kind == "catalogue" or self.goals != Goals()


def _is_dominated(better: Candidate, candidate: Candidate) -> bool:
    """Return whether ``better`` replaces ``candidate``: as many GPUs on fewer nodes of the same cloud.

    It must be no worse in availability, evidence and idle GPUs, and no more expensive unless nodes of
    ``candidate`` have one GPU.
    """
    better_place, place = better.place, candidate.place
    if better_place is None or place is None or better_place.cloud != place.cloud:
        return False
    if why_rare(better_place) and not why_rare(place):
        return False
    if (better.unmeasured, better.idle_gpus > 0) > (candidate.unmeasured, candidate.idle_gpus > 0):
        return False
    gpus = candidate.layout.world_size
    if place.gpus == 1:
        return better_place.gpus >= gpus or (
            better.layout.nodes < candidate.layout.nodes and better.layout.world_size >= gpus
        )
    prices = (better.usd_per_hour, candidate.usd_per_hour)
    more_expensive = prices[0] is None or prices[1] is None or round(prices[0], 2) > round(prices[1], 2)
    same_gpus = better_place.gpu.name == place.gpu.name and better.layout.world_size >= gpus
    return same_gpus and better.layout.nodes < candidate.layout.nodes and not more_expensive


def survey_places(job: Job, target: Target, goals: Goals, evidence: Evidence) -> Survey:
    """Search all instance types that a target and goals allow. Raises UserError if there are none."""
    tokens = goals.total_tokens(job)
    return Survey(
        job=job,
        target=target,
        goals=goals,
        tokens=tokens,
        evidence=evidence,
        places=choose_places(job, target, goals),
    ).run()


def host_memory_shortage(candidate: Candidate, place: Place) -> Shortage | None:
    """Return the shortage of host memory for a candidate; None if it suffices or is unknown."""
    if place.ram_bytes is None:
        return None
    share = place.allocatable * candidate.layout.processes_per_node / place.gpus
    available = int(place.ram_bytes * share)
    if candidate.memory.host_bytes <= available:
        return None
    return Shortage(
        hardware=candidate.hardware, needs=candidate.memory.host_bytes, has=available, where="host memory"
    )


def disk_shortage(job: Job, target: Target, candidate: Candidate, place: Place) -> Shortage | None:
    """Return the shortage of disk space for a candidate; None if it suffices or is unknown."""
    if place.disk_bytes is None:
        return None
    needs = disk_of(job, target, candidate.layout)
    if needs <= place.disk_bytes:
        return None
    return Shortage(hardware=candidate.hardware, needs=needs, has=place.disk_bytes, where="disk")


def rank_plans(survey: Survey, top: int) -> Ranking:
    """Rank the candidates of a survey: the best ``top`` plans, and the nearest rejected ones."""
    best = survey.candidates[0]
    order = distinct(survey.candidates)
    shortages = rejections_of_shortages(survey.shortages, MOST_REJECTIONS // 2)
    by_distance = sorted(
        (rejection for _, rejection in survey.goal_misses),
        key=lambda rejection: (rejection.over is None, rejection.over or 0.0),
    )
    goals_missed = list(
        {rejection.what.split(" (")[0]: rejection for rejection in reversed(by_distance)}.values()
    )[::-1]
    near_goals = goals_missed[: MOST_REJECTIONS // 3]
    later_machines = later_ranked(best, order[1:], survey.goals, MOST_REJECTIONS)
    gpu_names = {candidate.gpu.name for candidate in order[:top] if candidate.gpu}
    other_machines = [
        line for line in later_machines if not any(f"x {name} (" in line.what for name in gpu_names)
    ]
    rejected = (*near_goals, *shortages, *other_machines)[:MOST_REJECTIONS]
    plan_notes = tuple(str(line) for line in (*near_goals, *shortages[:3], *later_machines))[:5]
    plans = [
        build_plan(survey, candidate, plan_notes if candidate is best else (), best)
        for candidate in order[:top]
    ]
    return Ranking(
        plans=tuple(plans),
        rejected=tuple(rejected),
        order=describe_order(
            survey.goals,
            survey.target.capacity,
            survey.tokens,
            priced=survey.candidates[0].usd_per_hour is not None,
        ),
    )


def build_plan(survey: Survey, candidate: Candidate, rejected: Iterable[str], best: Candidate) -> Plan:
    """Build the Plan of a candidate of a survey, with the differences to the ``best`` one as reasons."""
    search = survey.searches[candidate.layout.precision]
    if not survey.candidates:
        lines = reasons.missed_goals_note(candidate)
    elif candidate is best:
        lines = reasons.of_machine(candidate, survey.candidates, survey.target, survey.goals, survey.tokens)
    else:
        lines = reasons.compare_to_best(candidate, best)
    lines += reasons.of_layout(search, candidate)
    return assemble(
        survey.job,
        survey.target,
        candidate,
        lines,
        tuple(rejected),
        survey.tokens,
        survey.goals.max_disruptions,
    )


def best_or_none(job: Job, target: Target, goals: Goals | None = None) -> Plan | None:
    """Return the best plan of a job on other hardware, without alternatives, or None.

    It never searches for suggestions, as the suggestions of a failed plan are found with it.
    """
    try:
        survey = survey_places(job, target, goals or Goals(), Evidence())
    except UserError:
        return None
    return build_plan(survey, survey.candidates[0], (), survey.candidates[0]) if survey.candidates else None


def as_qlora(job: Job) -> Job | None:
    """Return the job with QLoRA, on its engine or another one that supports it; None if none does."""
    if METHODS[job.method].quantized or job.model.experts:
        return None
    quantized = replace(job, method="qlora")
    if job.engine not in LAUNCHED_ENGINES or unsupported_job(quantized) is None:
        return quantized
    if job.precision == "bf16-mixed":
        return None  # the engines with QLoRA cannot train this model
    lean = replace(
        quantized, engine="auto", zero_stage=None, offload="none", fsdp_sharding=None, replicas=None
    )
    quantized = with_simplest_engine(lean)
    # A model that no engine can train is planned only, with any method
    return quantized if unsupported_job(quantized) is None or unsupported_job(job) is not None else None


__all__ = ["CannotFit", "Survey", "as_qlora", "best_or_none", "rank_plans", "survey_places"]
