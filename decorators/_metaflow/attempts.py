"""Hooks around the attempts of a step: before a retry, and after the last failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from metaflow.decorators import _base_step_decorator
from metaflow.plugins.catch_decorator import CatchDecorator

from decorators._metaflow.commands import Backend, command
from decorators._metaflow.endings import user_errors
from decorators._metaflow.steps import StepView


class _CatchNodeFailure(CatchDecorator):  # type: ignore[misc]
    """``@catch`` that also works for multi-node steps on Kubernetes.

    Metaflow runs the fallback of a failed step where the run was launched; an exception from the missing pod
    environment is caught there, too. In a deployment the fallback is disabled: Argo would request all nodes
    again only to record the failure.
    """

    name = "catch_node_failure"

    def step_task_retry_count(self) -> tuple[int, int]:
        step_retries, fallback_retries = super().step_task_retry_count()
        return step_retries, 0 if command() == "deploy" else fallback_retries


def catch_node_failure(var: str) -> Callable[[Any], Any]:
    """Return a decorator that continues the flow after a failure; artifact ``var`` holds the exception."""
    wrapped: Callable[[Any], Any] = _base_step_decorator(_CatchNodeFailure, var=var, print_exception=False)
    return wrapped


def before_retry(step: StepView, backend: Backend, prepare: Callable[[str, int], dict[str, str]]) -> None:
    """Call ``prepare(run id, attempt)`` before every attempt of a step except the first.

    ``prepare`` runs in the process that runs the flow, just before the decorator's values are written into
    the attempt's command. It returns environment variables for the process that waits for the container.
    """
    decorator = step._find(backend)
    original = decorator.runtime_step_cli

    def runtime_step_cli(cli_args: Any, retry_count: int, *args: Any) -> None:
        if retry_count > 0:
            with user_errors():
                cli_args.env.update(prepare(str(cli_args.task.run_id), retry_count))
        original(cli_args, retry_count, *args)

    decorator.runtime_step_cli = runtime_step_cli
