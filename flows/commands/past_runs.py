"""Earlier runs of a fine-tuning flow: as records that can be compared, and what they have cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from typing import Any, get_args

from metaflow import Run, namespace
from metaflow.exception import MetaflowException

from decorators.arguments import Role
from decorators.backends.overrides import request_for
from decorators.card.runs import RunRecord
from decorators.past_runs import Attempt, NeverRunError, attempts_of, runs_of
from estimator.costs import NOBODY, RunCost, Span
from estimator.errors import UserError
from estimator.plan import Plan
from launchers.settings import Settings, flat

_TRAINING = ("train", "train_nodes")
_WITH_GPUS: dict[str, Role] = dict.fromkeys(_TRAINING, "train")  # a step: its part of the plan
_WITH_GPUS |= {role: role for role in get_args(Role) if role in ("evaluate", "generate", "score", "compare")}
_WHERE = "Call it in the folder where the runs were started, or configure Metaflow as they were."


def read_runs(flow: str, chosen: Sequence[str], last: int) -> list[RunRecord]:
    """Records of these runs, or of the newest so many, the newest first.

    Raises UserError where there is none, or one that is named is not there.
    """
    namespace(None)  # whoever has started them
    if chosen:
        found = [_run(flow, name) for name in chosen]
    else:
        try:
            found = list(runs_of(flow, most=last))
        except NeverRunError as error:
            raise UserError(str(error), _WHERE) from None
    records = [record for run in found if (record := _record(run)) is not None]
    if not records:
        raise UserError(f"None of {flow}'s runs has got as far as its plan.", _WHERE)
    return records


def read_costs(flows: Sequence[str], since: datetime) -> list[RunCost]:
    """Read the node usage for training and evaluation of the runs of these flows since that time.

    Raises UserError where none of the flows has ever run.
    """
    namespace(None)
    read = [_costs_of(flow, since) for flow in flows]
    if all(costs is None for costs in read):
        raise UserError(f"There is no run of {', '.join(flows)} where Metaflow looks.", _WHERE)
    return [cost for costs in read for cost in costs or ()]


def _costs_of(flow: str, since: datetime) -> list[RunCost] | None:
    """None: that flow has never run."""
    try:
        return list(_costs_since(runs_of(flow), since))
    except NeverRunError:
        return None


def _costs_since(runs: Iterator[Any], since: datetime) -> Iterator[RunCost]:
    for run in runs:
        if _in_utc(run.created_at) < since:
            return
        cost = _cost(run)
        if cost.spans:
            yield cost


def _in_utc(moment: datetime) -> datetime:
    """Metaflow's moments have no zone: they are this machine's."""
    return moment.astimezone(timezone.utc)


def _cost(run: Any) -> RunCost:
    settings, plan = (_readable(run, "start", name) for name in ("used_settings", "plan"))
    team = settings.resources.team if isinstance(settings, Settings) else None
    user = next((tag.partition(":")[2] for tag in run.tags if tag.startswith("user:")), NOBODY)
    return RunCost(
        run=str(run.id),
        user=user,
        team=team or NOBODY,
        model=plan.model if isinstance(plan, Plan) else NOBODY,
        spans=tuple(
            _span(attempt, plan if isinstance(plan, Plan) else None, role)
            for step, role in _WITH_GPUS.items()
            for task in _all_tasks(run, step)
            for attempt in attempts_of(task)
        ),
    )


def _readable(run: Any, step: str, name: str) -> Any | None:
    """An artifact; None where there is none, or where another version of this package has pickled it."""
    try:
        found = _artifacts(run, step, name)
    except (AttributeError, ImportError, TypeError, ValueError):
        return None
    return found[name] if found is not None else None


def _span(attempt: Attempt, plan: Plan | None, role: Role) -> Span:
    price = None
    if plan is not None and plan.prediction.usd_per_hour is not None and plan.request.gpus_per_node:
        of_a_gpu = plan.prediction.usd_per_hour / plan.request.nodes / plan.request.gpus_per_node
        price = of_a_gpu * request_for(plan, role).gpus_per_node
    hours = None if attempt.seconds is None else attempt.seconds / 3600
    return Span(hours=hours, failed=not attempt.succeeded, usd_per_hour=price)


def _run(flow: str, name: str) -> Run:
    try:
        return Run(f"{flow}/{name.rpartition('/')[2]}")
    except MetaflowException:
        raise UserError(f"There is no run {name} of {flow}.", _WHERE) from None


def _record(run: Any) -> RunRecord | None:
    """None for a run that ended before it had settled its settings and plan."""
    begin = _artifacts(run, "start", "used_settings", "plan")
    if begin is None:
        return None
    settings, plan = begin["used_settings"], begin["plan"]
    outcome = _outcome(run)
    evaluated = _artifacts(run, "evaluate", "evaluation")
    if outcome is not None:
        plan = outcome.plan
    prepared = _artifacts(run, "prepare", "used_settings")
    settings = prepared["used_settings"] if prepared else settings
    return RunRecord(
        run=str(run.id),
        begun=run.created_at,
        state=_state(run),
        plan=plan,
        settings=flat(settings) if isinstance(settings, Settings) else {},
        metrics=outcome.metrics if outcome else (),
        measured=outcome.measured if outcome else None,
        evaluation=evaluated["evaluation"] if evaluated else None,
        evaluations=outcome.evaluations if outcome else (),
    )


def _state(run: Any) -> str:
    if run.successful:
        return "finished"
    return "failed" if run.finished else "running or killed"


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
    except KeyError:  # the run has not come so far
        return []
