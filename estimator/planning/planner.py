"""From a job, a place and goals to ranked Plans: what fits, what of that is best, and why.

A plan fits when what it needs is within what the GPU reports. On a given number of GPUs the
order is the Ultra-Scale Playbook's: what fits, then what makes up the global batch, then the fastest. Over
all machines the cheapest a token comes first, as otherwise the most GPUs of the largest kind always would,
unless :class:`Goals` say otherwise: a deadline (the cheapest that meets it), a budget (the fastest within
it), or ``prefer="speed"``.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

from estimator import hardware
from estimator.errors import CannotFit, Change, UserError
from estimator.job import DEFAULT_BATCH, Job, Target
from estimator.plan import Plan
from estimator.planning.clusters import rank_plans, survey_places
from estimator.planning.failures import Failure, of_error, of_survey
from estimator.planning.goals import Goals
from estimator.planning.local_plan import (
    describe,
    describe_place,
    plan_local,
    pod_of_cpus,
)
from estimator.planning.places import LARGEST_MODEL_ON_CPU
from estimator.planning.ranking import Ranking, Rejection
from estimator.planning.search import Evidence, divides, indivisible
from estimator.planning.support import unlaunchable_processes, unsupported_job, with_engine
from estimator.vocabulary import AUTOMATIC_METHODS, METHODS, PARALLEL_ENGINES

if TYPE_CHECKING:
    from estimator.calibration import Calibration
    from estimator.hardware import Catalogue
    from estimator.throughput import MeasuredBandwidth

__all__ = ["LARGEST_MODEL_ON_CPU", "CannotFit", "Ranking", "Rejection", "describe", "plan", "plans"]


def plan(
    job: Job,
    target: Target,
    goals: Goals | None = None,
    *,
    calibration: Calibration | None = None,
    bandwidth: MeasuredBandwidth | None = None,
    catalogue: Catalogue | None = None,
) -> Plan:
    """The best plan for a job on a target: the first of :func:`plans`, which says what the rest mean."""
    return plans(
        job, target, goals, top=1, calibration=calibration, bandwidth=bandwidth, catalogue=catalogue
    ).best


def plans(
    job: Job,
    target: Target,
    goals: Goals | None = None,
    top: int = 5,
    *,
    calibration: Calibration | None = None,
    bandwidth: MeasuredBandwidth | None = None,
    catalogue: Catalogue | None = None,
) -> Ranking:
    """At most ``top`` plans, best first, and the nearest of what was rejected.

    Raises :class:`UserError` for values that can't go together, :class:`CannotFit` where nothing fits or
    nothing meets the goals.

    Parameters
    ----------
    calibration:
        What finished runs have measured; corrects the memory of runs like them.
    bandwidth:
        Bus bandwidth of collectives that was measured on the cluster, instead of the data sheets'.
    catalogue:
        GPUs and machines to plan with, instead of the shipped tables.
    """
    goals = goals or Goals()
    if top < 1:
        raise UserError(f"top = {top!r} must be a whole number above 0.")
    evidence = Evidence(calibration=calibration, bandwidth=bandwidth)
    with hardware.using(catalogue) if catalogue is not None else contextlib.nullcontext():
        return _plans(job, target, goals, top, evidence)


def _plans(job: Job, target: Target, goals: Goals, top: int, evidence: Evidence) -> Ranking:
    rejections: list[Rejection] = []
    jobs = _jobs(job, rejections)
    _check_world(jobs[0], target)
    if target.device == "cpu" and target.kind == "catalogue":
        raise UserError(
            (Change("resources.device", "cpu"), ": machines are chosen for their GPUs."),
            ("Leave ", Change("resources.device"), " out, or name where it is to run."),
        )
    if target.device == "cpu" and not target.at_hand:
        for name, value in (("gpu", target.gpu), ("instance_type", target.instance_type)):
            if value is not None:
                raise UserError(
                    (
                        Change("resources.device", "cpu"),
                        " and ",
                        Change(f"resources.{name}", value),
                        " contradict each other.",
                    ),
                    "Give one of them.",
                )
        target = replace(target, machine=pod_of_cpus(target.gpus or 1))
    elif _is_for_cpus(job, target, goals):
        target = replace(target, machine=pod_of_cpus(1))
    failures: list[Failure] = []
    for concrete in jobs:
        outcome = _of_method(concrete, target, goals, top, evidence)
        if isinstance(outcome, Ranking):
            return _explained(outcome, rejections) if job.method == "auto" else outcome
        failures.append(outcome)
        rejections.append(outcome.rejection)
    raise min(failures, key=lambda failure: failure.distance).error()


def _is_for_cpus(job: Job, target: Target, goals: Goals) -> bool:
    """Whether a small model goes to the CPUs of a cluster without GPUs, as it does on a machine without."""
    named = target.gpu or target.gpus or target.instance_type or goals.instance_types
    return (
        goals.cluster is not None
        and not goals.cluster.has_gpus
        and target.device == "auto"
        and not named
        and job.model.parameters <= LARGEST_MODEL_ON_CPU
    )


def _of_method(job: Job, target: Target, goals: Goals, top: int, evidence: Evidence) -> Ranking | Failure:
    if target.machine is not None:
        try:
            plan = plan_local(job, target, goals, evidence)
        except CannotFit as error:
            return of_error(job, error)
        return _with_batch_reason(job, Ranking(plans=(plan,), rejected=(), order=describe_place(target)))
    # Machines are looked for with the default batch first, and with others only where they must be
    numbered = target.nodes is not None or target.gpus is not None
    survey = survey_places(job if numbered else _with_fixed_batch(job), target, goals, evidence)
    if not survey.candidates and survey.job != job:
        survey = survey_places(job, target, goals, evidence)
    return _with_batch_reason(job, rank_plans(survey, top)) if survey.candidates else of_survey(survey)


def _with_fixed_batch(job: Job) -> Job:
    """Fix a default batch at what a single process can make up."""
    batch = job.batch_over(1)
    return job if batch is None else replace(job, global_batch_size=batch, batch_multiple=None)


def _with_batch_reason(job: Job, ranking: Ranking) -> Ranking:
    """Say in each plan whose batch is not the default one why it isn't."""
    if job.batch_multiple is None:
        return ranking
    plans = tuple(
        replace(plan, why=(*plan.why, _batch_reason(plan)))
        if plan.layout.global_batch_size != DEFAULT_BATCH
        else plan
        for plan in ranking.plans
    )
    return replace(ranking, plans=plans)


def _batch_reason(plan: Plan) -> str:
    layout = plan.layout
    return (
        f"global batch {layout.global_batch_size}: the workable one nearest to the default of "
        f"{DEFAULT_BATCH} ({layout.micro_batch_size} x {layout.accumulation} on {layout.data_parallel} "
        "data parallel process(es))"
    )


def _jobs(job: Job, rejections: list[Rejection]) -> list[Job]:
    """The job with each method that is to be tried, in order, and the engine that can do it.

    A method that no engine can do is a rejection. Where none can do any, all are planned with the first.
    """
    if job.method != "auto":
        return [with_engine(job)]
    jobs = [with_engine(replace(job, method=method)) for method in AUTOMATIC_METHODS]
    reasons = [unsupported_job(each) for each in jobs]
    if all(reasons):
        reasons = [
            "experts are not quantised here" if METHODS[each.method].quantized and job.model.experts else None
            for each in jobs
        ]
    rejections += [
        Rejection(what=each.method, reason=reason, kind="method")
        for each, reason in zip(jobs, reasons, strict=True)
        if reason is not None
    ]
    return [each for each, reason in zip(jobs, reasons, strict=True) if reason is None]


def _explained(ranking: Ranking, rejections: list[Rejection]) -> Ranking:
    """The ranking of method "auto", with the reason for the method."""
    method = ranking.best.method
    skipped = AUTOMATIC_METHODS[: AUTOMATIC_METHODS.index(method)]
    before = [line for line in rejections if line.what.split()[0] in skipped]
    reason = "".join(f"; {line}" for line in before)
    why = f"method {method}: the first of {', '.join(AUTOMATIC_METHODS)} that will do{reason}"
    plans = tuple(replace(plan, why=(why, *plan.why)) for plan in ranking.plans)
    return replace(ranking, plans=plans, rejected=(*before, *ranking.rejected))


def _check_world(job: Job, target: Target) -> None:
    """The user's nodes and GPUs must divide the batch."""
    if job.tensor_parallel and target.gpus and target.gpus % job.tensor_parallel:
        raise UserError(
            f"tensor_parallel = {job.tensor_parallel} stays inside a node and does not divide its "
            f"{target.gpus} GPUs.",
            ("Give a multiple of it with ", Change("resources.gpus"), "."),
        )
    if not target.nodes and not target.gpus:
        return
    if job.engine in PARALLEL_ENGINES and not (target.nodes and target.gpus):
        return  # what is left open may hold the parallel degrees that reach the batch
    nodes, gpus = target.nodes or 1, target.gpus or 1
    reason = unlaunchable_processes(job, nodes * gpus)
    if reason is not None:
        raise UserError(f"{reason}.", "Ask for another number of nodes or GPUs.")
    if not divides(job, nodes, gpus):
        raise indivisible(job, nodes * gpus, f"{nodes} node(s) of {gpus} process(es)")
