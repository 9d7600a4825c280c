"""Assembly of a Plan from a layout on an instance type: request, prediction and reasons."""

from __future__ import annotations

from dataclasses import replace

from estimator import throughput
from estimator.engines import automatic
from estimator.engines.setups import setup_of
from estimator.engines.support import planned_only
from estimator.job import Job, Target
from estimator.plan import Interruptions, Plan, Prediction
from estimator.planning import learning_rate
from estimator.planning.candidates import Candidate
from estimator.planning.capacity import why_rare
from estimator.planning.goals import DISRUPTIONS
from estimator.planning.interruptions import completion_probability, describe, expected, unknown_rate
from estimator.planning.job_settings import changed_settings
from estimator.planning.step_requests import for_evaluation, for_preparation, for_training
from estimator.vocabulary import LAUNCHED_ENGINES, product_type


def assemble(
    job: Job,
    target: Target,
    candidate: Candidate,
    reasons: list[str],
    rejected: tuple[str, ...],
    tokens: int | None = None,
    max_disruptions: int = DISRUPTIONS,
) -> Plan:
    """Build the Plan of a candidate.

    ``reasons`` and ``rejected``: lines for users; ``tokens``: of the complete job, for its hours and price.
    """
    layout, place = candidate.layout, candidate.place
    job = automatic.with_choices(job, layout.device, layout.precision, layout.sharding)
    setup = setup_of(job, layout)
    request = for_training(job, target, candidate)
    peak = None
    if candidate.gpu is not None:
        peak = candidate.gpu.peak_flops(product_type(layout.precision))
    interruptions = _interruptions(job, candidate, tokens, max_disruptions)
    if interruptions is not None:
        reasons = [*reasons, *describe(interruptions)]
    elif place is not None and place.spot:
        reasons = [*reasons, unknown_rate(place.interruptions)]
    plan = Plan(
        model=job.model.name,
        parameters=job.model.parameters,
        method=job.method,  # type: ignore[arg-type]  # "auto" is resolved before
        engine=job.engine,
        target=target.kind,
        request=request,
        layout=layout,
        prediction=Prediction(
            memory=candidate.memory,
            flops_per_token=throughput.flops_per_token(setup),
            peak_flops_per_gpu=peak,
            tokens_per_second=candidate.speed.tokens_per_second,
            hours=candidate.hours(tokens),
            usd_per_hour=candidate.usd_per_hour,
            usd=candidate.usd(tokens),
            evaluation_hours=candidate.evaluation_hours or 0.0,
            throughput_basis=candidate.speed.basis,
            tokens=tokens,
            mfu=candidate.speed.mfu,
            tokens_per_second_range=candidate.speed.tokens_per_second_range,
            price_kind="spot" if place is not None and place.spot else "on demand",
            price_source=place.price if place is not None else "",
            start_up=candidate.start_up,
            step_parts=candidate.speed.parts.kinds if candidate.speed.parts else (),
            step_kernels=candidate.speed.parts.of_compute if candidate.speed.parts else (),
            step_collectives=candidate.speed.parts.collectives if candidate.speed.parts else (),
            uncorrected_tokens_per_second=candidate.speed.uncorrected,
            speed_formulas=candidate.speed.formulas,
            low_availability=why_rare(place),
            checkpoint_bytes=candidate.checkpoint_bytes,
            interruptions=interruptions,
        ),
        why=tuple(reasons),
        rejected=rejected,
        learning_rates=learning_rate.hints(job),
        task=job.task,
        packing=bool(job.packing),
        liger=bool(job.liger),
        compile=bool(job.compile),
        settings=tuple((name, str(value)) for name, value in changed_settings(job)),
        planned_only=planned_only(job, layout.world_size),
        prepare=None if target.hardware_given else for_preparation(job, request),
        evaluate=None if target.hardware_given else for_evaluation(job, candidate, request),
    )
    if plan.planned_only is None:
        return plan
    # The reason of an engine that is never launched contains "planned only"
    prefix = "planned only: " if job.engine in LAUNCHED_ENGINES else ""
    return replace(plan, why=(*plan.why, f"{prefix}{plan.planned_only}"))


def _interruptions(job: Job, candidate: Candidate, tokens: int | None, budget: int) -> Interruptions | None:
    """Predict the effect of interruptions on the complete run; None if speed or length are unknown."""
    interruptions = candidate.interruptions
    speed = candidate.speed.tokens_per_second
    if interruptions is None or speed is None:
        return interruptions
    steps = max(1, round(interruptions.interval_seconds * speed / job.tokens_per_step))
    hours, trained = candidate.hours(tokens), candidate.training_hours(tokens)
    if hours is None or trained is None:
        return replace(interruptions, steps=steps)
    start = candidate.start_up.hours if candidate.start_up is not None else 0.0
    return replace(
        interruptions,
        steps=steps,
        expected=expected(hours, interruptions),
        lost_hours=hours - start - trained,
        ends_well=completion_probability(hours, interruptions, budget),
    )
