"""Next plan after a run ran out of memory: the same training step, with less memory.

In this order: checkpointing of complete blocks instead of parts, a smaller micro batch with the same global
batch, activation checkpointing, more sharding, and, if hardware can be chosen, the next GPU with more memory.
Values set by the user are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from estimator import hardware
from estimator.errors import UserError
from estimator.formatting import format_bytes
from estimator.hardware import Gpu
from estimator.job import Job, Target
from estimator.plan import Layout, MemoryEstimate, Override, Plan
from estimator.planning.assembly import assemble
from estimator.planning.candidates import Candidate
from estimator.planning.goals import Goals
from estimator.planning.ladders import Ladder
from estimator.planning.places import Place, choose_places
from estimator.planning.search import Evidence, Search

AFTER = "out of memory in attempt"  # origin of the override
_RECOMPUTED = ("recompute", "recompute_every")


@dataclass(frozen=True, kw_only=True, slots=True)
class NextPlan:
    """Plan of the attempt after one that ran out of memory."""

    plan: Plan
    change: str
    """Description of the difference."""
    needs_other_machine: bool = False
    """Whether it needs another GPU than the failed attempt, and so a new request."""


def after_out_of_memory(
    plan: Plan, job: Job, *, attempt: int, other_machines: bool = True
) -> NextPlan | None:
    """Return the next plan after ``plan`` ran out of memory; None if no plan needs less.

    Keeps the numbers of nodes and processes, as a retry has the same nodes, and the rows per step.

    Parameters
    ----------
    plan:
        The plan that failed.
    job:
        The job it was made for, with the values set by the user, which are kept.
    attempt:
        The attempt that failed, from 0; recorded as the reason for the change.
    other_machines:
        Whether the next attempt can use another instance type.
    """
    search = Search(job, plan.layout.precision, plan.layout.device, Evidence())
    failed_estimate = search.estimate(plan.layout)
    for layout in _leaner(search, plan.layout):
        estimate = search.estimate(layout)
        if estimate.needs_bytes < failed_estimate.needs_bytes:
            return _same_machine(plan, layout, estimate, attempt)
    return _other_machine(plan, job, search, attempt) if other_machines else None


def _leaner(search: Search, failed: Layout) -> Iterator[Layout]:
    """Yield layouts of the same processes that may need less, in the order to try them."""
    if failed.activation_checkpointing and (failed.recompute, failed.recompute_every) != ("full", 1):
        yield replace(failed, recompute="full", recompute_every=1)
    ladders = search.ladders.of(failed.nodes, failed.processes_per_node)
    same_ladders = [  # ladders that differ from the failed layout in the micro batch only
        ladder
        for ladder in ladders
        if ladder.checkpointing == failed.activation_checkpointing and _shards_alike(ladder, failed, search)
    ]
    # At least halved, as there are usually only two attempts
    yield from _rungs(search, same_ladders, failed.micro_batch_size // 2)
    recomputed = [
        ladder
        for ladder in ladders
        if ladder.checkpointing
        and not failed.activation_checkpointing
        and _shards_alike(ladder, failed, search)
    ]
    yield from _rungs(search, recomputed, failed.micro_batch_size)
    for ladder in ladders:  # sorted by sharding, least first
        if ladder.checkpointing >= failed.activation_checkpointing and not _shards_alike(
            ladder, failed, search
        ):
            yield from _rungs(search, [ladder], failed.micro_batch_size)


def _rungs(search: Search, ladders: list[Ladder], max_size: int) -> Iterator[Layout]:
    """Yield from each ladder the layout with the largest micro batch up to ``max_size``."""
    for ladder in ladders:
        fitting = [step for step, size in enumerate(search.ladders.sizes(ladder)) if size <= max_size]
        if fitting:
            yield search.ladders.rung(ladder, fitting[-1])


def _shards_alike(ladder: Ladder, failed: Layout, search: Search) -> bool:
    """Return whether a ladder shards the model like the failed layout."""
    first = search.ladders.rung(ladder)
    varying = ("micro_batch_size", "accumulation", "activation_checkpointing", *_RECOMPUTED)
    equalized = replace(first, **{name: getattr(failed, name) for name in varying})
    return equalized == failed


def _same_machine(plan: Plan, layout: Layout, estimate: MemoryEstimate, attempt: int) -> NextPlan:
    prediction = plan.prediction
    changed = replace(
        plan,
        layout=layout,
        prediction=replace(
            prediction,
            memory=estimate.with_capacity(prediction.memory.capacity_bytes),
            # The speed of the failed layout does not apply, and the links of the node are unknown here
            tokens_per_second=None,
            tokens_per_second_range=None,
            uncorrected_tokens_per_second=None,
            mfu=None,
            hours=None,
            usd=None,
            throughput_basis=f"not estimated for the plan after {AFTER} {attempt}",
        ),
    )
    notes = [
        Override(
            name=name,
            planned=str(getattr(plan.layout, name)),
            used=str(getattr(layout, name)),
            given_by=f"{AFTER} {attempt}",
        )
        for name in ("micro_batch_size", "accumulation", "activation_checkpointing", *_RECOMPUTED, "sharding")
        if getattr(plan.layout, name) != getattr(layout, name)
    ]
    changed = replace(changed, overrides=(*plan.overrides, *notes))
    return NextPlan(plan=changed, change=_describe_change(notes, plan, changed))


def _other_machine(plan: Plan, job: Job, search: Search, attempt: int) -> NextPlan | None:
    """Return the layout on the cheapest instance type with the next larger GPU memory, or None."""
    request = plan.request
    if plan.target not in ("kubernetes", "batch") or request.gpu_type is None:
        return None
    failed_gpu = hardware.gpu(request.gpu_type)
    for place in _larger(plan, job, failed_gpu):
        memory = search.estimate(plan.layout, place.gpu).with_capacity(place.gpu.usable_bytes)
        speed = search.speed(plan.layout, place.gpu, place)
        candidate = Candidate(
            layout=plan.layout,
            memory=memory,
            gpu=place.gpu,
            place=place,
            speed=speed,
            evaluated_tokens=job.evaluated_sequences * job.seq_len,
        )
        target = Target(kind=plan.target, nodes=request.nodes, gpus=request.gpus_per_node)
        next_plan = assemble(job, target, candidate, list(plan.why), plan.rejected, plan.prediction.tokens)
        note = Override(
            name="gpu_type", planned=failed_gpu.name, used=place.gpu.name, given_by=f"{AFTER} {attempt}"
        )
        next_plan = replace(
            next_plan,
            request=replace(next_plan.request, node_labels=request.node_labels),
            overrides=(*plan.overrides, note),
        )
        return NextPlan(
            plan=next_plan, change=_describe_change([note], plan, next_plan), needs_other_machine=True
        )
    return None


def _larger(plan: Plan, job: Job, failed_gpu: Gpu) -> list[Place]:
    request = plan.request
    target = Target(kind=plan.target, nodes=request.nodes, gpus=request.gpus_per_node, cloud=request.cloud)
    try:
        candidates = choose_places(job, target, Goals())
    except UserError:  # no instance type of that cloud has this many GPUs
        return []
    larger = [
        place
        for place in candidates
        if place.gpu.usable_bytes > failed_gpu.usable_bytes and place.gpus >= request.gpus_per_node
    ]
    unpriced = float("inf")
    return sorted(
        larger, key=lambda place: (place.gpu.usable_bytes, place.usd_per_hour or unpriced, place.name)
    )


def _describe_change(notes: list[Override], old_plan: Plan, new_plan: Plan) -> str:
    changes = ", ".join(
        f"{note.name.removesuffix('_size').replace('_', ' ')} {note.planned} -> {note.used}" for note in notes
    )
    old_bytes, new_bytes = (plan.prediction.memory.needs_bytes for plan in (old_plan, new_plan))
    if old_bytes == new_bytes:
        return changes
    return f"{changes}: {format_bytes(new_bytes)} per process instead of {format_bytes(old_bytes)}"
