"""Records of earlier runs from their artifacts, for runs whose containers' files are lost::

    python -m decorators.profile.finished_runs FinetuneFlow

reads the finished runs of a flow through Metaflow's client and keeps those that the local store lacks.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterator
from typing import Any

from decorators.past_runs import NeverRunError, runs_of
from decorators.profile.calibration import finished
from decorators.profile.measured import Measured
from estimator.calibration import Finished, Store
from estimator.errors import MISTAKE, UserError
from estimator.plan import Plan

MOST_RUNS = 100  # of a flow that are looked at, the newest


def collect(flow: str, most_runs: int = MOST_RUNS) -> Iterator[Finished]:
    """Return the finished runs of a flow, newest first, from their artifacts ``plan`` and ``measured``.

    Runs whose plan doesn't note its formulas are left out. Raises UserError where there is no such flow.
    """
    try:
        runs = runs_of(flow, most=most_runs)
    except NeverRunError as error:
        raise UserError(
            str(error), "Name a flow that has run, from the folder or with the profile that it was run with."
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
        return None  # pickled by a version that had other classes
    if not isinstance(measured, Measured) or not isinstance(plan, Plan):
        return None
    if measured.step != task.parent.id or not plan.prediction.memory.formulas:
        return None  # a later step that hands it on; a plan of an earlier version
    try:
        return finished(
            plan,
            measured,
            run=task.pathspec,
            date=task.finished_at.astimezone(datetime.timezone.utc).isoformat(timespec="seconds"),
            formulas=plan.prediction.memory.formulas,
        )
    except UserError:
        return None  # the two don't belong together


def main(words: list[str]) -> str:
    """Store the measurements of a flow's runs. Raises UserError unless the argument is the name of one
    flow.
    """
    if len(words) != 1:
        raise UserError(
            f"It takes one word, and got {len(words)}.", "python -m decorators.profile.finished_runs FLOW"
        )
    store = Store()
    known = {run.run for run in store.read().finished}
    new = [run for run in collect(words[0]) if run.run not in known]
    for run in reversed(new):
        store.add(run)
    return f"{len(new)} new run(s) of {words[0]} in {store.path}"


if __name__ == "__main__":
    try:
        sys.stdout.write(main(sys.argv[1:]) + "\n")
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(MISTAKE)
