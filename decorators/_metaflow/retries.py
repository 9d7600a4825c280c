"""Retries of a deployed flow, which its scheduler makes.

Where a run is launched by hand, the process that waits for a step submits it again after a disruption, and
``@retry`` counts failures alone. A deployment has no such process: its scheduler counts both as attempts.
"""

from __future__ import annotations

from collections.abc import Iterable

from metaflow.metaflow_config import MAX_ATTEMPTS

from decorators._metaflow.steps import StepView

RETRIES = MAX_ATTEMPTS - 2  # the most that @retry takes: the first attempt and that of @catch count, too
WAIT_MINUTES = 2
_retries_failures: dict[str, bool] = {}


def retry_deployed(steps: Iterable[StepView]) -> None:
    """Give the steps of a flow that is being deployed as many attempts as Metaflow takes.

    Left as they are: steps with ``@retry(times=0)``, and those whose loss is a result (``outlived``).
    """
    for step in steps:
        asked_for = step.given("retry").get("times")
        if step.has("outlived") or (asked_for is not None and int(asked_for.value) == 0):
            continue
        if step.name not in _retries_failures:  # the second time, the retries are those that were given here
            _retries_failures[step.name] = step.has("retry")
        step.set_values("retry", {"times": RETRIES, "minutes_between_retries": WAIT_MINUTES})


def retries_failures(step: str) -> bool:
    """Whether a step has ``@retry`` in the flow, so that it is retried where its own code fails, too."""
    return _retries_failures.get(step, False)
