"""Explanations of jobs without a plan: the shortage, and suggestions that fit.

Every suggestion has been planned before it is shown.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from estimator.engines import automatic
from estimator.engines.support import unsupported_job
from estimator.errors import CannotFit, UserError
from estimator.formatting import format_count, format_duration, format_usd
from estimator.job import Job, Target
from estimator.plan import Plan
from estimator.planning.candidates import Candidate
from estimator.planning.clusters import Survey, as_qlora, best_or_none, build_plan
from estimator.planning.goals import Goals
from estimator.planning.ranking import Rejection
from estimator.planning.search import describe_job
from estimator.suggestions import Suggestion, format_suggestion
from estimator.vocabulary import ENGINES, LAUNCHED_ENGINES, METHODS, SHARDINGS, LaunchedOptimizer

SHORTEST_SEQUENCE = 256  # shorter ones have room for little more than a prompt
MOST_SUGGESTIONS = 5
# Training quality equals that of 32-bit states (Dettmers et al. 2021, arXiv:2110.02861); paged states are
# slowed by transfers to the host
STATES_IN_8_BITS: LaunchedOptimizer = "adamw8bit"
PAGED_STATES: LaunchedOptimizer = "paged-adamw8bit"


@dataclass(frozen=True, slots=True)
class Failure:
    """Reason why a method has no plan. The error is built on demand, as its suggestions take time."""

    rejection: Rejection
    distance: tuple[int, float]  # distance from a plan, to compare methods
    error: Callable[[], UserError]


def of_error(job: Job, error: CannotFit) -> Failure:
    """Build the failure of a method that this machine cannot run.

    Of several methods, the error of the one that needs the least memory is shown.
    """
    reason = error.shortage or error.problem.removesuffix(".")
    rejection = Rejection(what=job.method, reason=reason, kind="method")
    return Failure(rejection, (0, -float(list(METHODS).index(job.method))), lambda: error)


def of_survey(survey: Survey) -> Failure:
    """Build the failure of a survey of layouts and machines without a plan."""
    method = survey.job.method
    if survey.goal_misses and all(rejection.kind == "interruptions" for _, rejection in survey.goal_misses):
        return _interrupted(survey)
    too_late = [item for item, rejection in survey.goal_misses if rejection.kind == "deadline"]
    start_up = min((item.start_up_hours for item in too_late), default=0.0)
    if start_up and start_up >= (survey.goals.deadline_hours or math.inf):
        return _ends_before_training(survey, start_up)
    if survey.goal_misses:
        problem, nearest, suggestion = _goals_missed(survey)
        figure = (nearest.usd if "budget_usd" in suggestion else nearest.hours)(survey.tokens)
        return Failure(
            Rejection(what=method, reason=problem, kind="method"),
            (0, math.inf if figure is None else figure),
            lambda: CannotFit(
                f"{problem}.",
                example_plan=build_plan(survey, nearest, (), nearest),
                suggestions=(suggestion,),
            ),
        )
    # A layout that lacks only disk space is nearer than one that does not fit the GPUs
    shortage = min(
        survey.shortages, key=lambda shortage: (shortage.where != "disk", shortage.over), default=None
    )
    if shortage is not None:
        subject = f"{method} on {shortage.hardware}"
        problem = f"{describe_job(survey.job)} does not fit on the requested hardware; nearest: {shortage}."
        problem += _DISK if shortage.where == "disk" else _no_sharding_note(survey.job)
        return Failure(
            Rejection(what=subject, reason=shortage.reason, kind="method", over=shortage.over),
            (1, shortage.over),
            lambda: _memory_missed(survey, problem),
        )
    reason = _indivisible_batch(survey)
    advice = "Choose another batch size, or leave parallelism or GPU counts to the planner."
    return Failure(
        Rejection(what=method, reason=reason, kind="method"),
        (2, 0.0),
        lambda: UserError(f"{reason[0].upper()}{reason[1:]}.", advice),
    )


def _interrupted(survey: Survey) -> Failure:
    """Build the failure of spot instances that are interrupted too often for the run to finish."""
    nearest, rejection = min(survey.goal_misses, key=lambda pair: pair[1].over or math.inf)
    problem = f"On spot instances this run would hardly finish on {nearest.hardware}: {rejection.reason}"
    return Failure(
        Rejection(what=survey.job.method, reason=problem, kind="method"),
        (0, rejection.over or math.inf),
        lambda: UserError(
            f"{problem}.",
            (
                "Remove --spot, train for fewer hours or on fewer nodes, or give a rate that you have "
                "measured: --interruption-rate RATE."
            ),
        ),
    )


def _ends_before_training(survey: Survey, start_up: float) -> Failure:
    """Build the failure of a deadline within the start-up of all machines. ``start_up``: hours, at least."""
    deadline = f"--deadline-hours {survey.goals.deadline_hours:g}"
    problem = f"{deadline} is shorter than the start-up of every machine: {format_duration(start_up * 3600)}"
    _, fastest, suggestion = _goals_missed(survey)
    price = fastest.usd(survey.tokens)
    cost = f", for {format_usd(price)}" if price is not None else ""
    advice = f"{fastest.hardware} would meet {format_suggestion(suggestion)}{cost}; more hours are cheaper."
    return Failure(
        Rejection(what=survey.job.method, reason=problem, kind="method"),
        (0, fastest.hours(survey.tokens) or math.inf),
        lambda: UserError(f"{problem} (new nodes, image and weights).", advice),
    )


def _indivisible_batch(survey: Survey) -> str:
    counts = sorted(survey.indivisible)
    if not counts:
        return "no instance type has the requested number of GPUs"
    first, last = counts[0], counts[-1]
    gpus = format_count(first, "GPU") if first == last else f"{first} to {last} GPUs"
    return f"a batch of {survey.job.global_batch_size} is not divisible over {gpus} with these options"


def _goals_missed(survey: Survey) -> tuple[str, Candidate, Suggestion]:
    """Return the problem, the nearest plan, and the change that would allow it."""
    goals, tokens = survey.goals, survey.tokens
    kinds = {rejection.kind for _, rejection in survey.goal_misses}
    amount = f"{_count(tokens)} tokens of {survey.job.model.name} ({survey.job.method})"
    if "budget" in kinds:
        # Candidates that miss the deadline as well do not help
        over_budget = [item for item, rejection in survey.goal_misses if rejection.kind == "budget"]
        best = min(over_budget, key=lambda item: item.usd(tokens) or math.inf)
        within = f" within {goals.deadline_hours:g} h" if goals.deadline_hours is not None else ""
        usd = best.usd(tokens) or 0.0
        problem = (
            f"No plan trains {amount}{within} for {format_usd(goals.budget_usd)}; "
            f"the cheapest is {format_usd(usd)}, "
            f"in {format_duration((best.hours(tokens) or 0) * 3600)} on {best.hardware}"
        )
        return problem, best, {"budget_usd": math.ceil(usd)}
    if "deadline" in kinds:
        too_slow = [item for item, rejection in survey.goal_misses if rejection.kind == "deadline"]
        best = min(too_slow, key=lambda item: item.hours(tokens) or math.inf)
        hours, price = best.hours(tokens) or 0.0, best.usd(tokens)
        problem = (
            f"No plan trains {amount} within {goals.deadline_hours:g} h; "
            f"the fastest takes {format_duration(hours * 3600)} on {best.hardware}"
            + (f", for {format_usd(price)}" if price is not None else "")
        )
        return problem, best, {"deadline_hours": f"{math.ceil(hours * 10) / 10:g}"}
    candidate, rejection = survey.goal_misses[0]
    goal = "deadline" if rejection.kind == "speed" else "budget"
    problem = f"{describe_job(survey.job)} fits, but whether it meets the {goal} is unknown; {rejection}"
    return problem, candidate, {"deadline_hours" if goal == "deadline" else "budget_usd": None}


def _no_sharding_note(job: Job) -> str:
    """Return a sentence about an engine that shards no states; empty for other engines."""
    if any(SHARDINGS[name].divides for name in ENGINES[job.engine].shardings):
        return ""
    return f" Engine {job.engine} does not shard: each GPU holds the whole model."


_DISK = " Weights, checkpoints and the result need ephemeral storage: use nodes with a larger disk."


def _memory_missed(survey: Survey, problem: str) -> CannotFit:
    job, target, goals = survey.job, survey.target, survey.goals
    free = Target(kind=target.kind, capacity=target.capacity, tight=target.tight)
    unlimited = Goals(cluster=goals.cluster)
    example_plan = best_or_none(job, free, unlimited) if (free, unlimited) != (target, goals) else None
    suggestions: list[Suggestion] = []
    if example_plan is not None:
        request = example_plan.request
        suggestions.append(
            {"resources.nodes": request.nodes, "resources.instance_type": request.instance_type}
        )

    def fits(changed: Job) -> bool:
        return best_or_none(changed, target, goals) is not None

    suggestions += without_costly_options(job, fits)
    suggestions += _other_machines(job, target, goals)
    suggestions += with_lean_states(job, fits)
    suggestions += smaller(job, fits)
    suggestions = [
        suggestion for n, suggestion in enumerate(suggestions) if suggestion not in suggestions[:n]
    ]
    machines = len({place.name for place in survey.places})
    return CannotFit(
        problem,
        example_plan=example_plan,
        suggestions=tuple(suggestions[:MOST_SUGGESTIONS]),
        available=f"{machines} instance type{'s' * (machines != 1)} for these options",
    )


def _other_machines(job: Job, target: Target, goals: Goals) -> Iterator[Suggestion]:
    """Suggest more of the same GPUs, or the same number of another GPU."""
    limited = target.gpus or target.nodes or goals.max_nodes or goals.max_gpus
    if limited:
        plan = best_or_none(
            job, replace(target, gpus=None, nodes=None), replace(goals, max_nodes=None, max_gpus=None)
        )
        if plan is not None and goals.cluster is None:
            yield _numbers(plan)
    if target.gpu and limited:
        plan = best_or_none(job, replace(target, gpu=None), goals)
        if plan is not None:
            yield {"resources.gpu": plan.request.gpu_type}


def _numbers(plan: Plan) -> Suggestion:
    request = plan.request
    return {"resources.nodes": request.nodes, "resources.gpus": request.gpus_per_node}


def smaller(job: Job, fits: Callable[[Job], bool]) -> list[Suggestion]:
    """Suggest changes that reduce memory and fit; if no single one does, the first few in combination."""
    single_changes = [suggestion for suggestion, change in _leaner(job) if fits(change(job))]
    seq_len = _shorter(job, fits)
    if seq_len is not None:
        single_changes.append({"seq_len": seq_len})
    if single_changes:
        return single_changes
    together: Suggestion = {}
    for suggestion, change in _leaner(job):
        if suggestion == _LORA:
            continue  # QLoRA, which follows, needs less
        job = change(job)
        has_earlier = bool(together)
        together = together | suggestion
        if has_earlier and fits(job):
            return [together]
    seq_len = _shorter(job, fits) if together else None
    return [together | {"seq_len": seq_len}] if seq_len is not None else []


_LEFT_TO_THE_PLANNER = {
    "zero.stage": "zero_stage",
    "fsdp.sharding": "fsdp_sharding",
    "fsdp.replicas": "replicas",
    "recompute.what": "recompute",
    "recompute.every": "recompute_every",
    "micro_batch_size": "micro_batch_size",
}
"""Settings that the planner decides if they are not set, with the name of the field of Job."""


def without_costly_options(job: Job, fits: Callable[[Job], bool]) -> Iterator[Suggestion]:
    """Suggest leaving out one option that takes memory, or a lower rank, if that makes the job fit."""
    options: list[tuple[Suggestion, dict[str, object]]] = []
    if job.precision == "fp32":
        options.append(({"precision": None}, {"precision": "auto"}))
    if job.precision == "bf16-mixed" and "bf16" in ENGINES[job.engine].precisions:
        options.append(({"precision": "bf16"}, {"precision": "bf16"}))
    options += [
        ({setting: None}, {name: None})
        for setting, name in _LEFT_TO_THE_PLANNER.items()
        if getattr(job, name) is not None
    ]
    if job.activation_checkpointing is False:
        options.append(({"activation_checkpointing": True}, {"activation_checkpointing": True}))
    if job.packing:
        options.append(({"packing": None}, {"packing": False}))
    if job.low_rank and job.trained_modules and not job.new_tokens:
        options.append(({"lora.modules_to_save": None}, {"trained_modules": ()}))
    if job.low_rank and job.lora_experts:
        options.append(({"lora.experts": None}, {"lora_experts": False}))
    fitting = [each for each, change in options if fits(replace(job, **change))]  # type: ignore[arg-type]
    yield from fitting
    if len(options) > 1 and not fitting:
        together = {name: value for _, change in options for name, value in change.items()}
        if fits(replace(job, **together)):  # type: ignore[arg-type]
            yield {setting: value for each, _ in options for setting, value in each.items()}
    if job.low_rank:
        ranks = (2**power for power in range(job.lora_rank.bit_length() - 1, 2, -1))
        lower = (rank for rank in ranks if rank < job.lora_rank and fits(replace(job, lora_rank=rank)))
        yield from ({"lora.rank": rank} for rank in itertools.islice(lower, 1))


def with_lean_states(job: Job, fits: Callable[[Job], bool]) -> Iterator[Suggestion]:
    """Suggest smaller AdamW states with which full training would fit, the cheapest first.

    8-bit states, with the job's engine or FSDP2 in bf16; Adafactor in bf16 for a task that no engine trains
    with 8-bit states (grpo); or an optimizer in the backward pass, as in torchtune's recipes, which excludes
    gradient accumulation: with the largest batch that fits.
    """
    if job.adapters or job.optimizer != "adamw":
        return
    lean = replace(job, optimizer=STATES_IN_8_BITS)
    suggestion: Suggestion = {"optimizer.name": STATES_IN_8_BITS}
    if unsupported_job(lean) is not None:
        lean = replace(lean, engine="fsdp2", precision="bf16")
        suggestion |= {"engine": "fsdp2", "precision": "bf16"}
    if unsupported_job(lean) is not None:
        lean = replace(job, optimizer="adafactor", precision="bf16")
        suggestion = {"optimizer.name": "adafactor", "precision": "bf16"}
    if unsupported_job(lean) is None and fits(lean):
        yield suggestion
        return
    if not ENGINES[job.engine].optimizer_in_backward or job.micro_batch_size is not None:
        return
    lean = replace(job, optimizer=PAGED_STATES, optimizer_in_backward=True)
    if unsupported_job(lean) is not None or not fits(replace(lean, global_batch_size=1)):
        return
    batches = [job.global_batch_size // 2**power for power in range(job.global_batch_size.bit_length())]
    batch = next(batch for batch in batches if fits(replace(lean, global_batch_size=batch)))
    smaller_batch = {"global_batch_size": batch} if batch != job.global_batch_size else {}
    yield {"optimizer.name": PAGED_STATES, "optimizer.in_backward": True, **smaller_batch}


_LORA: Suggestion = {"method": "lora"}


def _leaner(job: Job) -> Iterator[tuple[Suggestion, Callable[[Job], Job]]]:
    """Yield changes that make the job smaller, as options and as functions of jobs, cheapest first."""
    if job.activation_checkpointing is False:
        yield {"activation_checkpointing": True}, lambda job: replace(job, activation_checkpointing=True)
    if (job.micro_batch_size or 1) > 1:
        yield {"micro_batch_size": None}, lambda job: replace(job, micro_batch_size=None)
    yield from _on_the_loop(job)
    if not job.adapters:
        yield _LORA, lambda job: replace(job, method="lora")
    quantized = as_qlora(job)
    if quantized is not None:
        yield _differences(job, quantized), lambda job: as_qlora(job) or job


def _on_the_loop(job: Job) -> Iterator[tuple[Suggestion, Callable[[Job], Job]]]:
    """Suggest Liger-Kernel's fused loss, states in host memory, or both: the same training in less memory.

    With the job's engine, otherwise the first engine that supports them.
    """
    for fields in ({"liger": True}, {"offload": "cpu"}, {"liger": True, "offload": "cpu"}):
        missing = {name: value for name, value in fields.items() if getattr(job, name) != value}
        if len(missing) < len(fields):
            continue
        engine = next(
            (name for name in (job.engine, "fsdp2", "deepspeed") if _can_train(job, name, missing)), None
        )
        if engine is None:
            continue
        if "liger" in missing and _liger_by_default(job, engine):
            del missing["liger"]
            if not missing and engine == job.engine:
                continue
        section = ENGINES[engine].sharding_options
        names = {"liger": "liger", "offload": f"{section}.offload"}
        suggestion: Suggestion = {names[name]: value for name, value in missing.items()}
        if engine != job.engine:
            suggestion["engine"] = engine
        values = {**missing, "engine": engine}
        yield suggestion, lambda job, values=values: replace(job, **values)  # type: ignore[misc]


def _liger_by_default(job: Job, engine: str) -> bool:
    """Return whether Liger-Kernel is on with this engine without its option."""
    return bool(automatic.with_choices(replace(job, engine=engine), "cuda", "bf16").liger)  # type: ignore[arg-type]


def _can_train(job: Job, engine: str, fields: dict[str, object]) -> bool:
    """Return whether an engine can train the job with these changes."""
    try:
        changed = replace(job, engine=engine, **fields)  # type: ignore[arg-type]
    except UserError:  # options of another engine
        return False
    return engine in LAUNCHED_ENGINES and unsupported_job(changed) is None


def _differences(job: Job, quantized: Job) -> Suggestion:
    """Return the changes from one job to the other; options of the old engine are removed."""
    suggestion: Suggestion = {"method": quantized.method}
    if quantized.engine == job.engine:
        return suggestion
    suggestion["engine"] = quantized.engine
    if job.zero_stage is not None:
        suggestion["zero.stage"] = None
    if job.fsdp_sharding is not None:
        suggestion["fsdp.sharding"] = None
    if job.replicas is not None:
        suggestion["fsdp.replicas"] = None
    if job.offload != "none":
        suggestion[f"{ENGINES[job.engine].sharding_options}.offload"] = "none"
    return suggestion


def _shorter(job: Job, fits: Callable[[Job], bool]) -> int | None:
    """Return the longest half, quarter... of the sequence that fits, or None."""
    seq_len = job.seq_len // 2
    # Memory decreases with the length: if the shortest does not fit, none does
    if seq_len < SHORTEST_SEQUENCE or not fits(replace(job, seq_len=SHORTEST_SEQUENCE)):
        return None
    while seq_len > SHORTEST_SEQUENCE and not fits(replace(job, seq_len=seq_len)):
        seq_len //= 2
    return max(seq_len, SHORTEST_SEQUENCE)


def _count(tokens: int | None) -> str:
    for size, unit in ((10**9, "billion"), (10**6, "million")):
        if tokens is not None and tokens >= size:
            return f"{tokens / size:,.3g} {unit}"
    return f"{tokens:,}"
