"""Planner: from a job, a target and goals to ranked Plans.

A plan fits if the needed memory is within that reported by the GPU. For a given number of GPUs, the order is
that of the Ultra-Scale Playbook: layouts that fit, that divide the global batch, then by speed. Over all
instance types, the cheapest per token ranks first, as otherwise the most GPUs of the largest type always
would, unless :class:`Goals` have a deadline (the cheapest that meets it), a budget (the fastest within it),
or ``prefer="speed"``.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import NoneType
from typing import TYPE_CHECKING

from estimator import hardware
from estimator.engines.support import jobs_by_engine, unlaunchable_processes, unsupported_job
from estimator.errors import CannotFit, UserError
from estimator.formatting import format_count, format_list
from estimator.job import DEFAULT_BATCH, Job, Target
from estimator.option_checks import check_count, check_type
from estimator.plan import Plan
from estimator.planning.candidates import TIE_MARGIN
from estimator.planning.capacity import why_rare
from estimator.planning.clusters import Survey, rank_plans, survey_places
from estimator.planning.engine_choice import (
    by_preference,
    clearly_better,
    faster_than,
    reason,
    speeds_on_best,
)
from estimator.planning.failures import Failure, of_error, of_survey
from estimator.planning.goals import Goals
from estimator.planning.local_plan import describe, describe_place, plan_local, pod_of_cpus
from estimator.planning.measured_gpus import UNMEASURED
from estimator.planning.places import LARGEST_MODEL_ON_CPU
from estimator.planning.ranking import Ranking, Rejection, figure
from estimator.planning.search import Evidence, divides, indivisible_batch_error
from estimator.throughput import MeasuredBandwidth
from estimator.vocabulary import AUTOMATIC_METHODS, METHODS, PARALLEL_ENGINES

if TYPE_CHECKING:
    from estimator.calibration import Calibration
    from estimator.hardware import Catalogue

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
    """Return the best plan for a job on a target: the first of :func:`plans`, with the same parameters."""
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
    """Return at most ``top`` plans, best first, and the nearest rejected ones.

    Raises :class:`UserError` for contradictory values, :class:`CannotFit` if nothing fits or meets the goals.

    Parameters
    ----------
    calibration:
        Measurements of finished runs, which correct the memory of similar runs.
    bandwidth:
        Measured bus bandwidth of collectives on the cluster, instead of that of data sheets.
    catalogue:
        GPUs and instance types, instead of the shipped tables.
    """
    check_type("job", job, Job, "Write Job(model=models.find(NAME)).")
    check_type("target", target, Target, 'Write Target(kind="catalogue").')
    check_type("goals", goals, (Goals, NoneType), "Write Goals(tokens=10**9, deadline_hours=8).")
    check_type("catalogue", catalogue, (hardware.Catalogue, NoneType), "Use hardware.catalogue(Path(FILE)).")
    check_type("bandwidth", bandwidth, (MeasuredBandwidth, NoneType), "Use throughput.MeasuredBandwidth.")
    check_count("top", top)
    goals = goals or Goals()
    evidence = Evidence(calibration=calibration, bandwidth=bandwidth)
    with hardware.using(catalogue) if catalogue is not None else contextlib.nullcontext():
        return _plans(job, target, goals, top, evidence)


def _plans(job: Job, target: Target, goals: Goals, top: int, evidence: Evidence) -> Ranking:
    rejections: list[Rejection] = []
    jobs = _jobs(job, rejections)
    _check_world(jobs[0], target)
    if target.device == "cpu" and target.kind == "catalogue":
        raise UserError(
            "--device cpu: instance types are chosen for their GPUs.",
            "Remove --device, or add --here or --from-cluster.",
        )
    if target.device == "cpu" and not target.hardware_given:
        for name, value in (("--gpu", target.gpu), ("--instance-type", target.instance_type)):
            if value is not None:
                raise UserError(
                    f"--device cpu and {name} {value} contradict each other.", "Remove one of them."
                )
        target = replace(target, machine=pod_of_cpus(target.gpus or 1))
    elif _is_for_cpus(job, target, goals):
        target = replace(target, machine=pod_of_cpus(1))
    failures: list[Failure] = []
    for engine_jobs in jobs:
        outcome = _plan_method(engine_jobs, target, goals, top, evidence)
        if isinstance(outcome, Ranking):
            return _with_method_reason(outcome, job, rejections) if job.method == "auto" else outcome
        failures.append(outcome)
        rejections.append(outcome.rejection)
    error = min(failures, key=lambda failure: failure.distance).error()
    raise _with_complete_example(error, job, target, goals, evidence)


def _with_complete_example(
    error: UserError, job: Job, target: Target, goals: Goals, evidence: Evidence
) -> UserError:
    """Replace the example plan of a job that does not fit by the plan of the first suggested command.

    The example was planned with the method and engine of one failure; the suggested command leaves them open.
    An example that misses a goal is kept.
    """
    if not isinstance(error, CannotFit):
        return error
    example = error.example_plan
    if example is None or example.prediction.tokens is not None or example.target in ("local", "allocation"):
        return error
    request = example.request
    elsewhere = Target(kind=example.target, capacity=target.capacity, tight=target.tight)
    if target.machine is None:
        elsewhere = replace(elsewhere, nodes=request.nodes, instance_type=request.instance_type)
    with contextlib.suppress(UserError):
        error.example_plan = _plans(job, elsewhere, Goals(cluster=goals.cluster), 1, evidence).best
    return error


def _is_for_cpus(job: Job, target: Target, goals: Goals) -> bool:
    """Return whether to train a small model on the CPUs of a cluster without GPUs."""
    named = target.gpu or target.gpus or target.instance_type or goals.instance_types
    return (
        goals.cluster is not None
        and not goals.cluster.has_gpus
        and target.device == "auto"
        and not named
        and job.model.parameters <= LARGEST_MODEL_ON_CPU
    )


def _plan_method(
    jobs: list[Job], target: Target, goals: Goals, top: int, evidence: Evidence
) -> Ranking | Failure:
    """Plan a method with one of the engines that can train it, or return the failure."""
    machine = target.machine
    on_cpu = machine is not None and (not machine.gpus or target.device == "cpu")
    failures: list[Failure] = []
    skipped, uncertain = "", list[Ranking]()
    for group in [jobs[:1]] if on_cpu else by_preference(jobs):
        if group[0].precision != jobs[0].precision and not all(_is_tight(each, target) for each in uncertain):
            break  # pure bf16 only if fp32 master weights fit nowhere
        if machine is not None:
            outcome = _plan_engines_locally(group, target, goals, evidence, skipped)
        else:
            outcome = _plan_engines(group, target, goals, top, evidence, skipped)
        masters = f"with fp32 master weights, {format_list([job.engine for job in group])} would"
        if isinstance(outcome, Failure):
            failures.append(outcome)
            skipped = f"{masters} not fit"
        elif _is_tight(outcome, target):
            uncertain.append(outcome)
            skipped = f"{masters} risk running out of memory"
        elif _is_well_founded(outcome.best):
            return _with_batch_reason(jobs[0], outcome)
        else:
            uncertain.append(outcome)
            skipped = f"{masters} use GPUs without measurements or with low availability"
    if uncertain:
        chosen = next((each for each in uncertain if not _is_tight(each, target)), uncertain[0])
        return _with_batch_reason(jobs[0], chosen)
    return min(failures, key=lambda failure: failure.distance)


def _is_tight(ranking: Ranking, target: Target) -> bool:
    """Return whether the best plan risks running out of memory more than the target accepts."""
    return ranking.best.prediction.memory.tight and not target.tight


def _is_well_founded(plan: Plan) -> bool:
    """Return whether a plan uses GPUs with a measured run, and instance types with good availability."""
    return UNMEASURED not in plan.why and not plan.prediction.low_availability


def _plan_engines_locally(
    jobs: list[Job], target: Target, goals: Goals, evidence: Evidence, skipped: str
) -> Ranking | Failure:
    """Plan for the available hardware with the fastest engine; among ties, with the simplest."""
    outcomes: dict[str, Plan | Failure] = {
        job.engine: _plan_locally(job, target, goals, evidence) for job in jobs
    }
    plans = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Plan)}
    if not plans:
        failures = (outcome for outcome in outcomes.values() if isinstance(outcome, Failure))
        return min(failures, key=lambda failure: failure.distance)
    speeds: dict[str, float | None] = dict.fromkeys(outcomes)
    speeds |= {name: plan.prediction.tokens_per_second for name, plan in plans.items()}
    simplest = next(iter(plans))
    engine = faster_than(simplest, speeds) or simplest
    chosen = plans[engine]
    if len(jobs) > 1 or skipped:
        why = reason(engine, speeds, skipped=skipped)
        chosen = replace(chosen, why=(why, *chosen.why) if skipped else (*chosen.why, why))
    return Ranking(plans=(chosen,), rejected=(), order=describe_place(target))


def _plan_locally(job: Job, target: Target, goals: Goals, evidence: Evidence) -> Plan | Failure:
    try:
        return plan_local(job, target, goals, evidence)
    except CannotFit as error:
        return of_error(job, error)


def _plan_engines(
    jobs: list[Job], target: Target, goals: Goals, top: int, evidence: Evidence, skipped: str
) -> Ranking | Failure:
    """Rank plans for other hardware, with the engine chosen on the hardware of the best plan."""
    surveys: list[Survey] = []
    for job in jobs:
        surveys.append(_survey(job, target, goals, evidence))
        if surveys[-1].candidates:
            break
    survey = surveys[-1]
    if not survey.candidates:
        return min(map(of_survey, surveys), key=lambda failure: failure.distance)
    if len(jobs) == 1 and not skipped:
        return rank_plans(survey, top)
    faster_job = clearly_better(survey, jobs)
    if faster_job is not None:
        survey = survey.by_engine(faster_job)
    speeds = speeds_on_best(survey, jobs, target, evidence)
    ranking = rank_plans(survey, top)
    engine_reason = reason(survey.job.engine, speeds, skipped=skipped)
    reasons = ranking.best.why
    best = replace(ranking.best, why=(engine_reason, *reasons) if skipped else (*reasons, engine_reason))
    return replace(ranking, plans=(best, *ranking.plans[1:]))


def _survey(job: Job, target: Target, goals: Goals, evidence: Evidence) -> Survey:
    """Search with the default batch size first, and with others where it excludes better founded hardware.

    The default batch size limits the number of GPUs. Others are used if no hardware divides it, or if it
    leaves GPUs without a measured run and others cost no more.
    """
    if target.nodes is not None or target.gpus is not None:
        return survey_places(job, target, goals, evidence)
    survey = survey_places(_with_fixed_batch(job), target, goals, evidence)
    if survey.job == job or (survey.candidates and not survey.candidates[0].unmeasured):
        return survey
    with_any_batch = survey_places(job, target, goals, evidence)
    if not survey.candidates or not with_any_batch.candidates:
        return with_any_batch if not survey.candidates else survey
    costs = [figure(each.candidates[0], goals, each.tokens) for each in (survey, with_any_batch)]
    is_better = _doubts(with_any_batch) < _doubts(survey) and costs[1] <= costs[0] * (1 + TIE_MARGIN)
    return with_any_batch if is_better else survey


def _doubts(survey: Survey) -> tuple[bool, bool]:
    """Return whether the best candidate has GPUs without a measured run, and of low availability."""
    best = survey.candidates[0]
    return best.unmeasured, survey.target.capacity == "usual" and bool(why_rare(best.place))


def _with_fixed_batch(job: Job) -> Job:
    """Set a default batch size to the value for a single process."""
    batch = job.batch_over(1)
    return job if batch is None else replace(job, global_batch_size=batch, batch_multiple=None)


def _with_batch_reason(job: Job, ranking: Ranking) -> Ranking:
    """Add a reason to each plan whose batch size differs from the default."""
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
        f"global batch {layout.global_batch_size}: the nearest possible one to the default of "
        f"{DEFAULT_BATCH} ({layout.micro_batch_size} x {layout.accumulation} on {layout.data_parallel} "
        "data-parallel processes)"
    )


def _jobs(job: Job, rejections: list[Rejection]) -> list[list[Job]]:
    """Return the jobs by method to try, in order: for each method one job per engine that supports it.

    Unsupported methods are appended to ``rejections``. If no method is supported, plans use a substitute
    engine.
    """
    if job.method != "auto":
        return [jobs_by_engine(job)]
    jobs = [jobs_by_engine(replace(job, method=method)) for method in job.methods]
    reasons = [unsupported_job(group[0]) for group in jobs]
    if all(reasons):
        reasons = [
            "experts are not quantized here"
            if METHODS[group[0].method].quantized and job.model.experts
            else None
            for group in jobs
        ]
    rejections += [
        Rejection(what=group[0].method, reason=reason, kind="method")
        for group, reason in zip(jobs, reasons, strict=True)
        if reason is not None
    ]
    return [group for group, reason in zip(jobs, reasons, strict=True) if reason is None]


def _with_method_reason(ranking: Ranking, job: Job, rejections: list[Rejection]) -> Ranking:
    """Add the reason for the chosen method to all plans of method "auto"."""
    method = ranking.best.method
    skipped = job.methods[: job.methods.index(method)]
    skipped_first = [line for line in rejections if line.what.split()[0] in skipped]
    reason = "".join(f"; {line}" for line in skipped_first)
    adapters = "" if job.methods == AUTOMATIC_METHODS else ", as options of adapters are set"
    method_reason = f"method {method}: the first of {', '.join(job.methods)} that fits{adapters}{reason}"
    plans = tuple(replace(plan, why=(method_reason, *plan.why)) for plan in ranking.plans)
    return replace(ranking, plans=plans, rejected=(*skipped_first, *ranking.rejected))


def _check_world(jobs: list[Job], target: Target) -> None:
    """Raise UserError unless the requested nodes and GPUs divide the batch, with one of the engines."""
    job = jobs[0]
    if job.tensor_parallel and target.gpus and target.gpus % job.tensor_parallel:
        raise UserError(
            f"--tp {job.tensor_parallel} must divide the {target.gpus} GPUs of a node.",
            "Use a multiple of it with --gpus.",
        )
    if not target.nodes and not target.gpus:
        return
    if job.engine in PARALLEL_ENGINES and not (target.nodes and target.gpus):
        return  # the open number may allow parallel degrees that divide the batch
    nodes, gpus = target.nodes or 1, target.gpus or 1
    reasons = [unlaunchable_processes(candidate, nodes * gpus) for candidate in jobs]
    if all(reasons):
        raise UserError(f"{reasons[0]}.", "Request another number of nodes or GPUs.")
    if not any(divides(candidate, nodes, gpus) for candidate in jobs):
        raise indivisible_batch_error(
            job, nodes * gpus, f"{format_count(nodes, 'node')} of {format_count(gpus, 'process')}"
        )
