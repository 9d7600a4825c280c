"""Earlier runs of a fine-tuning flow as records that can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from metaflow import Run, namespace
from metaflow.exception import MetaflowException

from decorators.card.runs import RunRecord
from decorators.past_runs import NeverRunError, runs_of
from estimator.errors import UserError
from launchers.settings import Settings, flat

_TRAINING = ("train", "train_nodes")


def read_runs(flow: str, chosen: Sequence[str], last: int) -> list[RunRecord]:
    """Records of these runs, or of the newest so many, the newest first.

    Raises UserError where there is none, or one that is named is not there.
    """
    namespace(None)  # whoever has started them
    where = "Call it in the folder where the runs were started, or configure Metaflow as they were."
    if chosen:
        found = [_run(flow, name, where) for name in chosen]
    else:
        try:
            found = list(runs_of(flow, most=last))
        except NeverRunError as error:
            raise UserError(str(error), where) from None
    records = [record for run in found if (record := _record(run)) is not None]
    if not records:
        raise UserError(f"None of {flow}'s runs has got as far as its plan.", where)
    return records


def _run(flow: str, name: str, where: str) -> Run:
    try:
        return Run(f"{flow}/{name.rpartition('/')[2]}")
    except MetaflowException:
        raise UserError(f"There is no run {name} of {flow}.", where) from None


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
    return "failed" if run.finished else "not finished"


def _outcome(run: Any) -> Any | None:
    """What node 0's training has left; None while it trains, or where it failed."""
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
    try:
        return [task for task in run[step] if task.finished]
    except KeyError:  # the run has not come so far
        return []
