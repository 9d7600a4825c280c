"""Attempts at a step: before one that follows, and after the last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from metaflow.decorators import _base_step_decorator
from metaflow.plugins.catch_decorator import CatchDecorator

from decorators._metaflow.commands import Backend, command
from decorators._metaflow.endings import user_errors
from decorators._metaflow.steps import StepView


class _Outlived(CatchDecorator):  # type: ignore[misc]
    """``@catch`` for nodes' steps, those on several nodes of Kubernetes too.

    Metaflow runs a failed step's fallback in the process's own place, where the run was launched; what it
    misses of the pods' environment there is one more exception that is caught. A deployment has no such
    place: Argo would ask for all the nodes once more, only to note on them that they were lost.
    """

    name = "outlived"

    def step_task_retry_count(self) -> tuple[int, int]:
        own, errors = super().step_task_retry_count()
        return own, 0 if command() == "deploy" else errors


def outlived(var: str) -> Callable[[Any], Any]:
    """A step decorator: where the step fails the flow goes on, with the exception as artifact ``var``."""
    wrapped: Callable[[Any], Any] = _base_step_decorator(_Outlived, var=var, print_exception=False)
    return wrapped


def before_retry(step: StepView, backend: Backend, prepare: Callable[[str, int], dict[str, str]]) -> None:
    """Call ``prepare(run id, attempt)`` before a step's every attempt but the first is started.

    In the process that runs the flow. The decorator's values go into the attempt's command right after it;
    what it returns are environment variables for the process that waits for the container.
    """
    decorator = step._find(backend)
    begin = decorator.runtime_step_cli

    def runtime_step_cli(cli_args: Any, retry_count: int, *others: Any) -> None:
        if retry_count > 0:
            with user_errors():
                cli_args.env.update(prepare(str(cli_args.task.run_id), retry_count))
        begin(cli_args, retry_count, *others)

    decorator.runtime_step_cli = runtime_step_cli
