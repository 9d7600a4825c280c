"""Plans for a trial on the hardware of a plan before the run: the best layouts by prediction."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

from estimator import hardware, throughput
from estimator.engines.setups import setup_of
from estimator.job import Job
from estimator.plan import Layout, Override, Plan
from estimator.planning.search import Evidence, Search

TRIED = 3  # plans of one trial


def trial_plans(plan: Plan, job: Job) -> tuple[Plan, ...]:
    """Return the plan and the next best layouts of its job on the same hardware, by predicted speed.

    Per spread, the largest micro batch that fits and the next smaller one. If the speed is unknown, in the
    order of the planner. The result is the same on every node, as it depends on plan and job only. ``job``
    has the values set by the user, which are kept.
    """
    layout, capacity = plan.layout, plan.prediction.memory.capacity_bytes
    if capacity is None:
        return (plan,)
    gpu = hardware.find_gpu_by_nvml_name(plan.request.gpu_type) if plan.request.gpu_type else None
    search = Search(job, layout.precision, layout.device, Evidence())
    layouts = search.fitting(layout.nodes, layout.processes_per_node, capacity, gpu)
    if job.micro_batch_size is None:
        layouts = [*layouts, *(smaller for option in layouts if (smaller := _smaller(option)) is not None)]
    other_layouts = [option for option in dict.fromkeys(layouts) if option != layout]
    speeds = {option: search.speed(option, gpu, None).tokens_per_second or 0.0 for option in other_layouts}
    other_layouts.sort(key=lambda option: -speeds[option])
    return (plan, *(_plan_of(plan, job, search, option, gpu) for option in other_layouts[: TRIED - 1]))


def _smaller(layout: Layout) -> Layout | None:
    """Return the layout with half the micro batch; None if that is not a whole number."""
    if layout.micro_batch_size % 2:
        return None
    return replace(
        layout, micro_batch_size=layout.micro_batch_size // 2, accumulation=layout.accumulation * 2
    )


def _plan_of(plan: Plan, job: Job, search: Search, layout: Layout, gpu: hardware.Gpu | None) -> Plan:
    """Return the plan with another layout on the same hardware, and its prediction."""
    estimate = search.estimate(layout, gpu).with_capacity(plan.prediction.memory.capacity_bytes)
    speed = search.speed(layout, gpu, None)
    prediction = replace(
        plan.prediction,
        memory=estimate,
        flops_per_token=throughput.flops_per_token(setup_of(job, layout)),
        tokens_per_second=speed.tokens_per_second,
        tokens_per_second_range=speed.tokens_per_second_range,
        uncorrected_tokens_per_second=speed.uncorrected,
        step_parts=speed.parts.kinds if speed.parts else (),
        throughput_basis=speed.basis,
        mfu=speed.mfu,
        hours=None,
        usd=None,
    )
    notes = tuple(
        Override(
            name=field.name,
            planned=str(getattr(plan.layout, field.name)),
            used=str(getattr(layout, field.name)),
            given_by="the trial",
        )
        for field in dataclasses.fields(Layout)
        if getattr(plan.layout, field.name) != getattr(layout, field.name)
    )
    return replace(plan, layout=layout, prediction=prediction, overrides=(*plan.overrides, *notes))
