"""Common behavior of step mutators: calls, the deciding step, and refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from decorators._metaflow import FinetuneError, StepView
from decorators.backends.options import Options
from decorators.launch import Once, build_step_request, check_nodes, first_step, user_errors_for_metaflow
from estimator.errors import UserError
from tests.decorators.backends.plans import planned
from tests.decorators.backends.steps import RecordedStep

REQUEST = planned("llama-70b", "full", "H100", 4).request


class Flow:
    """Steps in order, each with the roles of its mutators."""

    def __init__(self, *roles: str, parallel: bool = False) -> None:
        self._steps = [self._step(role, parallel) for role in roles]

    def _step(self, role: str, parallel: bool) -> Any:
        mutator = SimpleNamespace(role=role, external_init=lambda: None)
        return SimpleNamespace(
            name=role,
            steps=lambda: self._steps,
            mutators=lambda _: [mutator],
            has=lambda decorator: parallel and decorator == "parallel",
        )

    @property
    def start(self) -> StepView:
        return cast("StepView", self._steps[0])


def test_a_function_of_the_parameters_is_called_once_for_all_steps() -> None:
    requests = []

    def plan(parameters: dict[str, Any], backend: str) -> int:
        requests.append((parameters, backend))
        return len(requests)

    once = Once()
    assert [once(plan, {"a": 1, "b": 2}, "local"), once(plan, {"b": 2, "a": 1}, "local")] == [1, 1]
    assert (once(plan, {"a": 2}, "local"), once(plan, {"a": 1, "b": 2}, "batch")) == (2, 3)
    assert Once()(plan, {"a": 1, "b": 2}, "local") == 4


def test_the_first_step_that_matches_is_selected_or_else_the_start_step() -> None:
    flow = Flow("data", "train", "train")
    assert first_step(flow.start, object, lambda mutator: mutator.role == "train").name == "train"
    assert first_step(flow.start, object, lambda mutator: mutator.role == "node") is flow.start


def test_a_plan_for_several_nodes_needs_a_parallel_step() -> None:
    check_nodes(Flow("train", parallel=True).start, REQUEST)
    with pytest.raises(FinetuneError) as caught:
        check_nodes(Flow("train").start, REQUEST)
    assert "no step of this flow is @parallel" in caught.value.problem
    assert "--nodes 1" in caught.value.advice


def test_a_user_error_at_launch_is_a_metaflow_exception_of_two_lines() -> None:
    with pytest.raises(FinetuneError) as caught, user_errors_for_metaflow():
        raise UserError("What is wrong.", "What to do.")
    assert (caught.value.problem, caught.value.advice) == ("What is wrong.", "What to do.")


def test_a_step_request_holds_the_decorator_values_at_the_time_of_its_creation() -> None:
    step = RecordedStep("kubernetes", written=("memory",), memory="9000", namespace="train")
    step_request = build_step_request(cast("StepView", step), REQUEST, Options(zone="b"))
    step.set_values("kubernetes", {"tolerations": [{"key": "ours"}]})
    assert (step_request.step, step_request.backend, step_request.options.zone) == (
        "train",
        "kubernetes",
        "b",
    )
    assert (step_request.user_values["memory"].value, step_request.configured["namespace"]) == (
        "9000",
        "train",
    )
    local = build_step_request(cast("StepView", RecordedStep("local")), REQUEST, Options())
    assert (local.user_values, local.configured) == ({}, {})
