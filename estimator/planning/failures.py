"""What is said when nothing will do: what is missing, by how much, and what would work instead.

Everything that is suggested was planned before it is said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from estimator.errors import CannotFit, UserError
from estimator.job import METHODS, Job, Target
from estimator.plan import Plan
from estimator.planning.clusters import Survey, as_qlora, best_or_none, plan_of
from estimator.planning.goals import Goals
from estimator.planning.ranking import Rejection
from estimator.planning.search import Candidate, title

SHORTEST_SEQUENCE = 256  # shorter ones train on little more than a prompt
MOST_SUGGESTIONS = 5


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a method has no plan. The error is made when it is wanted, as its suggestions take time."""

    rejection: Rejection
    distance: tuple[int, float]  # how far from a plan: methods compare by it
    error: Callable[[], UserError]


def of_error(job: Job, error: CannotFit) -> Failure:
    """Of a method that this machine can't run; the leanest method says best what it takes."""
    rejection = Rejection(what=job.method, reason=error.problem.removesuffix("."), kind="method")
    return Failure(rejection, (0, -float(METHODS.index(job.method))), lambda: error)


def of_survey(seen: Survey) -> Failure:
    """Of a survey that has found no plan."""
    method = seen.job.method
    if seen.beyond:
        problem, nearest, option = _goals_missed(seen)
        figure = (nearest.usd if option.startswith("--budget") else nearest.hours)(seen.tokens)
        return Failure(
            Rejection(what=method, reason=problem, kind="method"),
            (0, math.inf if figure is None else figure),
            lambda: CannotFit(
                f"{problem}.",
                f"It would run with {option}.",
                wanted=plan_of(seen, nearest, (), nearest),
                suggestions=(option,),
            ),
        )
    miss = min(seen.misses, key=lambda miss: miss.over, default=None)
    if miss is not None:
        what = f"{method} on {miss.what}"
        problem = f"{title(seen.job)} fits on none of the machines asked for; nearest: {miss}."
        return Failure(
            Rejection(what=what, reason=miss.reason, kind="method", over=miss.over),
            (1, miss.over),
            lambda: _memory_missed(seen, problem),
        )
    reason = _no_batch(seen)
    advice = "Choose another batch, or leave parallel degrees or numbers of GPUs to the planner."
    return Failure(
        Rejection(what=method, reason=reason, kind="method"),
        (2, 0.0),
        lambda: UserError(f"{reason[0].upper()}{reason[1:]}.", advice),
    )


def _no_batch(seen: Survey) -> str:
    counts = sorted(seen.indivisible)
    if not counts:
        return "no machine has as many GPUs as the options ask for and allow"
    numbers = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"a batch of {seen.job.global_batch_size} can't be made up by {numbers} GPU(s) with these choices"


def _goals_missed(seen: Survey) -> tuple[str, Candidate, str]:
    """The problem, the nearest plan, and the option that would admit it."""
    goals, tokens = seen.goals, seen.tokens
    kinds = {miss.kind for _, miss in seen.beyond}
    amount = f"{_count(tokens)} tokens of {seen.job.model.name} ({seen.job.method})"
    if "budget" in kinds:
        # Those that miss the deadline as well are no help
        near = [found for found, miss in seen.beyond if miss.kind == "budget"]
        best = min(near, key=lambda found: found.usd(tokens) or math.inf)
        within = f" within {goals.deadline_hours:g} h" if goals.deadline_hours is not None else ""
        usd = best.usd(tokens) or 0.0
        problem = (
            f"No plan trains {amount}{within} for ${goals.budget_usd:,.2f}; the cheapest is ${usd:,.2f}, "
            f"in {best.hours(tokens) or 0:,.1f} h on {best.what}"
        )
        return problem, best, f"--budget-usd {math.ceil(usd)}"
    if "deadline" in kinds:
        near = [found for found, miss in seen.beyond if miss.kind == "deadline"]
        best = min(near, key=lambda found: found.hours(tokens) or math.inf)
        hours, price = best.hours(tokens) or 0.0, best.usd(tokens)
        problem = (
            f"No plan trains {amount} within {goals.deadline_hours:g} h; the fastest takes {hours:,.1f} h "
            f"on {best.what}" + (f", for ${price:,.2f}" if price is not None else "")
        )
        return problem, best, f"--deadline-hours {math.ceil(hours * 10) / 10:g}"
    found, miss = seen.beyond[0]
    goal = "deadline" if miss.kind == "speed" else "budget"
    problem = f"{title(seen.job)} fits, but nothing says whether the {goal} is met; {miss}"
    return problem, found, f"no --{'deadline-hours' if goal == 'deadline' else 'budget-usd'}"


def _memory_missed(seen: Survey, problem: str) -> CannotFit:
    job, target, goals = seen.job, seen.target, seen.goals
    free = Target(kind=target.kind)
    unlimited = Goals()
    wanted = best_or_none(job, free) if (free, unlimited) != (target, goals) else None
    suggestions: list[str] = []
    if wanted is not None:
        suggestions.append(f"--nodes {wanted.request.nodes} --instance-type {wanted.request.instance_type}")
    suggestions += _other_machines(job, target, goals)
    cli = target.kind == "catalogue" or bool(goals.cluster_nodes)
    suggestions += smaller(job, lambda other: best_or_none(other, target, goals) is not None, cli=cli)
    suggestions = list(dict.fromkeys(suggestions))[:MOST_SUGGESTIONS]
    return CannotFit(
        problem,
        "It would run with " + ", or ".join(suggestions) + "." if suggestions else "",
        wanted=wanted,
        suggestions=tuple(suggestions),
        here=f"{len(seen.places)} machine types that go with the options given",
    )


def _other_machines(job: Job, target: Target, goals: Goals) -> Iterator[str]:
    """More of the same, or another GPU in the same number."""
    limited = target.gpus or target.nodes or goals.max_nodes or goals.max_gpus
    if limited:
        more = best_or_none(
            job, replace(target, gpus=None, nodes=None), replace(goals, max_nodes=None, max_gpus=None)
        )
        if more is not None and not goals.cluster_nodes:
            yield _numbers(more)
    if target.gpu and limited:
        other = best_or_none(job, replace(target, gpu=None), goals)
        if other is not None:
            yield f'--gpu "{other.request.gpu}"'


def _numbers(plan: Plan) -> str:
    return f"--nodes {plan.request.nodes} --gpus {plan.request.gpus_per_node}"


def smaller(job: Job, fits: Callable[[Job], bool], *, cli: bool) -> list[str]:
    """Options that need less memory and would do; where no single one does, the first few together that do.

    ``cli``: as ``finetune plan`` names them; otherwise as the flow does.
    """
    singles = [option for option, change in _changes(job, cli=cli) if fits(change(job))]
    seq_len = _shorter(job, fits)
    if seq_len is not None:
        singles.append(f"--seq-len {seq_len}")
    if singles:
        return singles
    options: list[str] = []
    for option, change in _changes(job, cli=cli):
        if option == "--method lora":
            continue  # QLoRA, which comes next, needs less
        job = change(job)
        options.append(option)
        if len(options) > 1 and fits(job):
            return [" ".join(options)]
    seq_len = _shorter(job, fits) if options else None
    return [" ".join([*options, f"--seq-len {seq_len}"])] if seq_len is not None else []


def _changes(job: Job, *, cli: bool) -> list[tuple[str, Callable[[Job], Job]]]:
    """What would make the job smaller, as an option and as a change, from what costs least."""
    found: list[tuple[str, Callable[[Job], Job]]] = []
    if job.activation_checkpointing is False:
        option = "--checkpointing" if cli else "--set activation_checkpointing=true"
        found.append((option, lambda job: replace(job, activation_checkpointing=True)))
    if (job.micro_batch_size or 1) > 1:
        found.append(("--micro-batch-size 1", lambda job: replace(job, micro_batch_size=1)))
    if job.method == "full":
        found.append(("--method lora", lambda job: replace(job, method="lora")))
    quantised = as_qlora(job)
    if quantised is not None:
        switched = quantised.engine != job.engine
        engine = f" --engine {quantised.engine}" if switched else ""
        found.append((f"--method qlora{engine}", lambda job: as_qlora(job) or job))
    return found


def _shorter(job: Job, fits: Callable[[Job], bool]) -> int | None:
    """The longest half, quarter... of the sequence that fits."""
    seq_len = job.seq_len // 2
    # Memory falls with the length: where the shortest doesn't fit, none does
    if seq_len < SHORTEST_SEQUENCE or not fits(replace(job, seq_len=SHORTEST_SEQUENCE)):
        return None
    while seq_len > SHORTEST_SEQUENCE and not fits(replace(job, seq_len=seq_len)):
        seq_len //= 2
    return max(seq_len, SHORTEST_SEQUENCE)


def _count(tokens: int | None) -> str:
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if tokens is not None and tokens >= size:
            return f"{tokens / size:,.3g} {word}"
    return f"{tokens:,}"
