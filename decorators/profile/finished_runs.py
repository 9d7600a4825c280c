"""Calibration records of earlier runs from their artifacts, for runs in containers::

    python -m decorators.profile.finished_runs FinetuneFlow

reads the finished runs of a flow through Metaflow's client and stores those that the local store lacks.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterator
from typing import Any

from decorators import _metaflow
from decorators.past_runs import NeverRunError, runs_of
from decorators.profile.calibration import finished
from decorators.profile.measured import Measured
from estimator.calibration import Finished, Store
from estimator.errors import USER_ERROR_STATUS, UserError
from estimator.formatting import format_count
from estimator.plan import Plan
from estimator.terminal import print

MAX_RUNS = 100  # number of newest runs of a flow to read


def collect(flow: str, max_runs: int = MAX_RUNS) -> Iterator[Finished]:
    """Return the finished runs of a flow, newest first, from their artifacts ``plan`` and ``measured``.

    Runs whose plan does not record its formulas are skipped. Raises UserError if there is no such flow.
    """
    try:
        runs = runs_of(flow, limit=max_runs)
    except NeverRunError as error:
        raise UserError(
            str(error), "Name a flow that has run, in the same folder or with the same Metaflow profile."
        ) from None
    for run in runs:
        if not run.successful:
            continue
        for task in (task for step in run for task in step):
            record = _of_task(task)
            if record is not None:
                yield record


def _of_task(task: Any) -> Finished | None:
    names = {artifact.id for artifact in task}
    if not {"plan", "measured"} <= names:
        return None
    try:
        measured, plan = task["measured"].data, task["plan"].data
    except (AttributeError, ImportError, TypeError):
        return None  # pickled by a version with other classes
    if not isinstance(measured, Measured) or not isinstance(plan, Plan):
        return None
    if measured.step != task.parent.id or not plan.prediction.memory.formulas:
        return None  # a later step that passes the artifact on, or a plan of an earlier version
    try:
        return finished(
            plan,
            measured,
            run=task.pathspec,
            date=task.finished_at.astimezone(datetime.timezone.utc).isoformat(timespec="seconds"),
            formulas=plan.prediction.memory.formulas,
            speed_formulas=plan.prediction.speed_formulas,
        )
    except UserError:
        return None  # plan and measurement do not belong together


def main(arguments: list[str]) -> str:
    """Store the measurements of a flow's runs. Raises UserError unless one flow is named."""
    if len(arguments) != 1:
        raise UserError(
            f"Expected one flow name, got {len(arguments)} arguments.",
            "python -m decorators.profile.finished_runs FLOW",
        )
    _metaflow.ensure_user()
    store = Store()
    stored = {run.run for run in store.read().finished}
    added = [run for run in collect(arguments[0]) if run.run not in stored]
    for run in reversed(added):
        store.add(run)
    return f"{format_count(len(added), 'new run')} of {arguments[0]} in {store.path}"


if __name__ == "__main__":
    try:
        print(main(sys.argv[1:]))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(USER_ERROR_STATUS)
