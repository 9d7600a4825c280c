"""Retries of a deployed flow by its scheduler.

In an interactive run, the process that waits for a step resubmits it after a disruption, and ``@retry``
counts only failures. A deployment has no such process: its scheduler counts both as attempts.
"""

from __future__ import annotations

from collections.abc import Iterable

from metaflow.metaflow_config import MAX_ATTEMPTS
from metaflow.system_context import system_context

from decorators._metaflow.endings import forbid_retry
from decorators._metaflow.steps import StepView

RETRIES = MAX_ATTEMPTS - 2  # maximum of @retry: the first attempt and the one of @catch count, too
WAIT_MINUTES = 2
_retries_failures: dict[str, bool] = {}


def retry_deployed(steps: Iterable[StepView]) -> None:
    """Set the maximum number of retries on the steps of a flow that is being deployed.

    Unchanged: steps with ``@retry(times=0)``, and steps with ``@catch_node_failure``.
    """
    for step in steps:
        retry_times = step.user_values("retry").get("times")
        if step.has("catch_node_failure") or (retry_times is not None and int(retry_times.value) == 0):
            continue
        if step.name not in _retries_failures:  # in a second call, @retry was set by the first one
            _retries_failures[step.name] = step.has("retry")
        step.set_values("retry", {"times": RETRIES, "minutes_between_retries": WAIT_MINUTES})


def retries_failures(step: str) -> bool:
    """Whether the flow itself sets ``@retry`` on a step, so that failures of its code are retried, too."""
    return _retries_failures.get(step, False)


def limit_failures(step: str, failures: int) -> None:
    """Forbid another attempt of a deployed step whose failures exceed the ``@retry`` of the flow.

    Called in the task. Its scheduler counts lost attempts as failures, and has more attempts than ``@retry``.
    """
    decorators = getattr(system_context.flow, step).decorators
    allowed = [int(each.attributes["times"]) for each in decorators if each.name == "retry"]
    if allowed and allowed[0] < (system_context.max_user_code_retries or 0) and failures > allowed[0]:
        forbid_retry()
