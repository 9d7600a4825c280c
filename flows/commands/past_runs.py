"""Earlier runs of a fine-tuning flow: records for comparison, and costs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from itertools import takewhile
from typing import Any, get_args

from metaflow import namespace

from decorators import _metaflow
from decorators.arguments import Role
from decorators.backends.overrides import request_for
from decorators.card.runs import RunRecord
from decorators.past_runs import ADVICE, Attempt, NeverRunError, attempts_of, find_run, runs_of
from estimator.costs import UNNAMED, RunCost, Span
from estimator.errors import UserError
from estimator.plan import Plan
from launchers.settings import Settings, flat

_TRAINING = ("train", "train_nodes")
_WITH_GPUS: dict[str, Role] = dict.fromkeys(_TRAINING, "train")  # a step: its part of the plan
_WITH_GPUS |= {role: role for role in get_args(Role) if role in ("evaluate", "generate", "score", "compare")}


def read_runs(flow: str, names: Sequence[str], count: int) -> list[RunRecord]:
    """Return the records of the chosen runs, or of the ``count`` newest ones, newest first.

    Raises UserError if there is none, or a chosen run does not exist.
    """
    namespace(None)  # runs of all users
    if names:
        found = [find_run([flow], name.rpartition("/")[2]) for name in names]
    else:
        try:
            found = list(runs_of(flow, limit=count))
        except NeverRunError as error:
            raise UserError(str(error), ADVICE) from None
    records = [record for run in found if (record := _record(run)) is not None]
    if not records:
        raise UserError(f"None of {flow}'s runs has a plan yet.", ADVICE)
    return records


def read_costs(flows: Sequence[str], since: datetime) -> list[RunCost]:
    """Read the node usage of these flows' runs since a time, for training and evaluation.

    Raises UserError if none of the flows has ever run.
    """
    namespace(None)
    read = [_costs_of(flow, since) for flow in flows]
    if all(costs is None for costs in read):
        raise UserError(f"Metaflow finds no run of {', '.join(flows)}.", ADVICE)
    return [cost for costs in read for cost in costs or ()]


def _costs_of(flow: str, since: datetime) -> list[RunCost] | None:
    """Return the costs of a flow's runs; None if it has never run."""
    try:
        # Metaflow's times are in this machine's zone
        recent = takewhile(lambda run: run.created_at.astimezone(timezone.utc) >= since, runs_of(flow))
        return [cost for run in recent if (cost := _cost(run)).spans]
    except NeverRunError:
        return None


def _cost(run: Any) -> RunCost:
    settings, plan = (_readable(run, name) for name in ("used_settings", "plan"))
    team = settings.resources.team if isinstance(settings, Settings) else None
    user = next((tag.partition(":")[2] for tag in run.tags if tag.startswith("user:")), UNNAMED)
    return RunCost(
        run=str(run.id),
        user=user,
        team=team or UNNAMED,
        model=plan.model if isinstance(plan, Plan) else UNNAMED,
        spans=tuple(
            _span(attempt, plan if isinstance(plan, Plan) else None, role)
            for step, role in _WITH_GPUS.items()
            for task in _all_tasks(run, step)
            for attempt in attempts_of(task)
        ),
    )


def _readable(run: Any, name: str) -> Any | None:
    """Return an artifact of ``start``; None without it, or if another version of this package pickled it."""
    try:
        artifacts = _artifacts(run, "start", name)
    except (AttributeError, ImportError, TypeError, ValueError):
        return None
    return artifacts[name] if artifacts is not None else None


def _span(attempt: Attempt, plan: Plan | None, role: Role) -> Span:
    price = None
    if plan is not None and plan.prediction.usd_per_hour is not None and plan.request.gpus_per_node:
        of_a_gpu = plan.prediction.usd_per_hour / plan.request.nodes / plan.request.gpus_per_node
        price = of_a_gpu * request_for(plan, role).gpus_per_node
    hours = None if attempt.seconds is None else attempt.seconds / 3600
    return Span(hours=hours, failed=not attempt.succeeded, usd_per_hour=price)


def _record(run: Any) -> RunRecord | None:
    """Return the record of a run; None if it ended before its settings and plan were stored."""
    start = _artifacts(run, "start", "used_settings", "plan")
    if start is None:
        return None
    settings, plan = start["used_settings"], start["plan"]
    outcome = _outcome(run)
    evaluated = _artifacts(run, "evaluate", "evaluation")
    if outcome is not None:
        plan = outcome.plan
    prepared = _artifacts(run, "prepare", "used_settings")
    settings = prepared["used_settings"] if prepared else settings
    return RunRecord(
        run=str(run.id),
        started=run.created_at,
        state=_state(run),
        plan=plan,
        settings=flat(settings) if isinstance(settings, Settings) else {},
        metrics=outcome.metrics if outcome else (),
        measured=outcome.measured if outcome else None,
        evaluation=evaluated["evaluation"] if evaluated else None,
        evaluations=outcome.evaluations if outcome else (),
    )


def _state(run: Any) -> str:
    if run.finished:
        return "finished" if run.successful else "failed"
    alive = _metaflow.is_alive(run)
    if alive is None:
        return "running or killed"
    if alive:
        return "running"
    return "failed" if any(_failed(task) for step in run for task in step) else "killed"


def _failed(task: Any) -> bool:
    """Whether the last attempt raised an exception; a signal ends a task without one."""
    last = attempts_of(task)[-1:]
    ended = bool(last) and last[0].seconds is not None and not last[0].succeeded
    return ended and task.exception is not None


def _outcome(run: Any) -> Any | None:
    """Return the outcome of node 0's training; None while it trains, or if it failed."""
    for name in _TRAINING:
        for task in _tasks(run, name):
            outcome = task["outcome"].data if "outcome" in task else None
            if outcome is not None and outcome.output:
                return outcome
    return None


def _artifacts(run: Any, step: str, *names: str) -> dict[str, Any] | None:
    for task in _tasks(run, step):
        if all(name in task for name in names):
            return {name: task[name].data for name in names}
    return None


def _tasks(run: Any, step: str) -> list[Any]:
    return [task for task in _all_tasks(run, step) if task.finished]


def _all_tasks(run: Any, step: str) -> list[Any]:
    try:
        return list(run[step])
    except KeyError:  # the run has not reached this step
        return []
