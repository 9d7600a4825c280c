"""A step's decorators are filled in at the launch, its container's variables in the process that waits."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, cast

import pytest

from decorators._metaflow import Backend, Given, StepView
from decorators.backends import pending, placing, preflight_batch
from decorators.backends.cluster_api import ClusterApi
from decorators.backends.options import Options
from estimator.errors import UserError
from tests.decorators.backends.plans import planned

REQUEST = planned("llama-70b", "full", "H100", 4).request
QUIET = Options(preflight=False, pending_timeout=7)


class _Step:
    """What a mutator sees of a step, kept in a dict."""

    def __init__(self, backend: Backend, **values: Any) -> None:
        self.name = "train"
        self._backend = backend
        self.set: dict[str, dict[str, Any]] = {backend: values}

    def backend(self) -> Backend:
        return self._backend

    def values(self, decorator: str) -> dict[str, Any]:
        return self.set.get(decorator, {})

    def given(self, _: str) -> dict[str, Given]:
        return {}

    def has(self, decorator: str) -> bool:
        return decorator in self.set

    def set_values(self, decorator: str, values: dict[str, Any]) -> None:
        self.set.setdefault(decorator, {}).update(values)

    def add_environment(self, variables: dict[str, str]) -> None:
        self.set_values("environment", variables)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (placing.ENVIRONMENT_VARIABLE, pending.TIMEOUT_VARIABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(pending, "_installed", False)


def _place(backend: Backend, options: Options = QUIET, **values: Any) -> _Step:
    step = _Step(backend, **values)
    placing.place(cast("StepView", step), REQUEST, options, {})
    return step


def test_kubernetes_gets_every_value_and_the_wait_its_limit() -> None:
    step = _place("kubernetes", node_selector={"team": "ml"})
    assert step.set["kubernetes"]["node_selector"]["team"] == "ml"
    assert step.set["kubernetes"]["extended_resources"] == {"vpc.amazonaws.com/efa": "32"}
    assert step.set["resources"]["gpu"] == 8
    assert os.environ[pending.TIMEOUT_VARIABLE] == "7"


def test_what_was_decided_at_the_launch_reaches_the_process_that_waits() -> None:
    assert _place("kubernetes").set["environment"] == {"FI_PROVIDER": "efa"}
    waiting = _Step("kubernetes")
    os.environ.pop(pending.TIMEOUT_VARIABLE)  # so that nothing of Metaflow's is changed for other tests
    placing.carry_on(cast("StepView", waiting))
    assert waiting.set["environment"] == {"FI_PROVIDER": "efa"}


def test_a_local_run_asks_no_cluster_and_waits_for_none() -> None:
    step = _place("local", Options())
    assert set(step.set) == {"local", "resources"}
    assert pending.TIMEOUT_VARIABLE not in os.environ


@pytest.mark.parametrize(
    ("module", "needs", "words"),
    [
        ("kubernetes", ClusterApi, "kubernetes library"),
        ("boto3", preflight_batch._clients, "needs boto3"),
    ],
)
def test_a_library_that_is_missing_is_one_line_with_its_command(
    module: str, needs: Callable[[], Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=words) as caught:
        needs()
    assert caught.value.advice.startswith("pip install 'metaflow-finetune[")
