"""Behavior of the decorator in each process that loads a flow."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from metaflow import FlowSpec, kubernetes, step
from metaflow.user_decorators.mutable_step import MutableStep

from decorators import _metaflow
from decorators.gpu_profile import current_plan, gpu_profile
from decorators.packed_plan import PLAN_VARIABLE, pack
from estimator.plan import Plan
from tests.decorators.flows.plans import make_plan


def _refuse(parameters: dict[str, Any], backend: str) -> Plan:
    raise AssertionError("a plan was made where none may be")


def _decorators(monkeypatch: pytest.MonkeyPatch, command: str) -> dict[str, dict[str, Any]]:
    """Return the decorators of a step by name, after the mutator has run under a command."""

    class OneFlow(FlowSpec):  # type: ignore[misc]
        @gpu_profile(plan=_refuse)
        @kubernetes(cpu=3, image="registry/image:1")
        @step
        def start(self) -> None:
            pass

    monkeypatch.setattr(_metaflow, "command", lambda: command)
    function = OneFlow.start
    mutator = function.config_decorators[0]
    mutator.mutate(MutableStep(OneFlow, function, inserted_by=["gpu_profile"]))
    return {decorator.name: decorator.attributes for decorator in function.decorators}


def test_a_trampoline_passes_its_plan_to_the_container(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = pack(make_plan({}, "kubernetes"))
    monkeypatch.setenv(PLAN_VARIABLE, text)
    decorators_made = _decorators(monkeypatch, "trampoline")
    assert decorators_made["environment"]["vars"] == {**_metaflow.datastore_variables(), PLAN_VARIABLE: text}
    assert "resources" not in decorators_made


@pytest.mark.parametrize("command", ["task", "other", "trampoline"])
def test_nothing_is_requested_without_a_plan_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.delenv(PLAN_VARIABLE, raising=False)
    decorators_made = _decorators(monkeypatch, command)
    assert set(decorators_made) == {"kubernetes", "card"}
    assert (decorators_made["kubernetes"]["cpu"], decorators_made["card"]["id"]) == (3, "finetune")


def test_a_packed_plan_is_read_back_and_is_shorter_than_its_json(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan({"nodes": 4}, "kubernetes")
    monkeypatch.setenv(PLAN_VARIABLE, pack(plan))
    assert current_plan() == plan
    assert len(pack(plan)) < len(plan.to_json())
    monkeypatch.delenv(PLAN_VARIABLE)
    assert current_plan() is None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            {"request": "all"},
            '"train", "encode", "evaluate", "generate", "score", "compare", "inference", "data", "none"',
        ),
        *(({"interval": value}, f"interval={value!r}") for value in (0, "abc", None, "nan", "inf")),
        ({"plan": 3}, "plan=3"),
        ({"rightsize": "maybe"}, "must be true or false"),
        ({"plan": make_plan, "model": "llama-8b"}, "either plan= or model="),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(_metaflow.FinetuneError) as error:
        gpu_profile(**arguments).external_init()
    assert expected in error.value.message


def test_a_profiled_step_imports_neither_planner_nor_settings_nor_their_dependencies() -> None:
    script = """
import sys
import decorators.gpu_profile
from decorators.card.step import draw
from decorators.profiler import Profile
profile = Profile(plan=None, step="start")
profile.start()
profile.stop()
draw(profile.state())
print(*(name for name in ("estimator.planning", "launchers.settings", "launchers.run", "numpy", "pydantic")
        if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "", "each costs every step a tenth of a second of CPU and more"
