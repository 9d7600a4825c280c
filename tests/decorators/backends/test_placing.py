"""A step's decorators are filled in at the launch, its container's variables in the process that waits."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, cast

import pytest

from decorators._metaflow import Backend, Given, StepView
from decorators.backends import pending, placing
from decorators.backends.batch import preflight as preflight_batch
from decorators.backends.findings import Findings
from decorators.backends.kubernetes import preflight as preflight_kubernetes
from decorators.backends.kubernetes.api import ClusterApi
from decorators.backends.kubernetes.request import ClusterFacts, Toleration
from decorators.backends.options import Options
from decorators.backends.overrides import for_data
from estimator.errors import UserError
from estimator.plan import MIB, Request
from tests.decorators.backends.plans import planned

REQUEST = planned("llama-70b", "full", "H100", 4).request
QUIET = Options(preflight=False, pending_timeout=7)


class _Step:
    """What a mutator sees of a step, kept in a dict."""

    def __init__(
        self, backend: Backend, *, parallel: bool = True, written: tuple[str, ...] = (), **values: Any
    ) -> None:
        self.name = "train"
        self._given = {name: Given(value=values[name], by="@kubernetes in the flow") for name in written}
        self._backend = backend
        self.set: dict[str, dict[str, Any]] = {backend: values, **({"parallel": {}} if parallel else {})}

    def backend(self) -> Backend:
        return self._backend

    def values(self, decorator: str) -> dict[str, Any]:
        return self.set.get(decorator, {})

    def given(self, _: str) -> dict[str, Given]:
        return self._given

    def has(self, decorator: str) -> bool:
        return decorator in self.set

    def set_values(self, decorator: str, values: dict[str, Any]) -> None:
        self.set.setdefault(decorator, {}).update(values)

    def add_environment(self, variables: dict[str, str]) -> None:
        own = self.values("environment").get("vars") or {}
        self.set_values("environment", {"vars": {**own, **variables}})

    @property
    def environment(self) -> dict[str, str]:
        """Without what is Metaflow's."""
        own = self.values("environment").get("vars") or {}
        return {name: value for name, value in own.items() if not name.startswith("METAFLOW_")}


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
    assert _place("kubernetes").environment == {"FI_PROVIDER": "efa"}
    waiting = _Step("kubernetes")
    os.environ.pop(pending.TIMEOUT_VARIABLE)  # so that nothing of Metaflow's is changed for other tests
    placing.carry_on(cast("StepView", waiting))
    assert waiting.environment == {"FI_PROVIDER": "efa"}


def test_a_step_on_one_node_has_no_variables_of_a_network_whatever_the_plan() -> None:
    """A single container on Batch has the host's interfaces: gloo would not find its own."""
    alone = _Step("kubernetes", parallel=False)
    placing.place(cast("StepView", alone), REQUEST, QUIET, {})
    assert alone.environment == {}
    os.environ.pop(pending.TIMEOUT_VARIABLE)
    placing.carry_on(cast("StepView", alone))
    assert alone.environment == {}


def test_a_variable_that_the_user_has_set_stands_at_the_launch_and_in_the_process_that_waits() -> None:
    own = {"vars": {"FI_PROVIDER": "tcp", "HF_HOME": "/cache"}}
    step = _Step("kubernetes")
    step.set_values("environment", own)
    placing.place(cast("StepView", step), REQUEST, QUIET, {})
    assert step.environment == own["vars"]
    waiting = _Step("kubernetes")
    waiting.set_values("environment", own)
    os.environ.pop(pending.TIMEOUT_VARIABLE)
    placing.carry_on(cast("StepView", waiting))
    assert waiting.environment == own["vars"]
    unset = _Step("kubernetes")
    placing.add_variables(cast("StepView", unset), {"FI_PROVIDER": "efa"})
    assert unset.environment == {"FI_PROVIDER": "efa"}


def test_room_that_a_node_lacks_is_noted_in_the_plan_but_not_what_the_user_wrote() -> None:
    plan = planned("llama-8b", "lora", "L40S", 1)  # a machine whose room the table says is less than planned
    lead = cast("StepView", _Step("kubernetes"))
    [note] = placing.with_room(plan, QUIET, {}, lead=lead).overrides
    assert note.name == "memory_mib"
    own = {"memory": Given(value="60000", by="--with kubernetes:memory=")}
    assert placing.with_room(plan, QUIET, own, lead=lead).overrides == ()
    batch = cast("StepView", _Step("batch"))
    assert placing.with_room(plan, QUIET, {}, lead=batch) is plan


def test_a_step_of_another_size_is_looked_at_with_what_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, Request]] = []

    def look_beside(name: str, request: Request, **_: Any) -> Findings:
        seen.append((name, request))
        return Findings(where="For step train")

    monkeypatch.setattr(preflight_kubernetes, "look_beside", look_beside)
    monkeypatch.setattr(placing, "look", lambda *_: ClusterFacts())
    plan = planned("llama-70b", "full", "H100", 4)
    own = {"disk": Given(value="2000000", by="--with kubernetes:disk=")}
    step = cast("StepView", _Step("kubernetes"))
    placing.place(step, for_data(plan).request, Options(), own, main=plan.request)
    [(name, request)] = seen
    assert (name, request.nodes, request.gpus_per_node) == ("train", 1, 0)
    assert request.disk_mib * MIB == pytest.approx(2000000e6, rel=1e-6)
    placing.place(step, plan.request, Options(), {}, main=plan.request)
    assert len(seen) == 1


def test_a_step_is_looked_at_the_same_before_and_after_it_is_placed() -> None:
    """Else the cluster would be asked again for each step of a run."""
    own = {"key": "team", "operator": "Exists"}
    step = _Step("kubernetes", tolerations=[own])
    before = placing._step_of(cast("StepView", step), REQUEST)
    assert before.tolerations == (Toleration(key="team", effect="", value=None),)
    placing.place(cast("StepView", step), REQUEST, QUIET, {})
    assert len(step.set["kubernetes"]["tolerations"]) == 2
    assert placing._step_of(cast("StepView", step), REQUEST).tolerations == before.tolerations


def test_tolerations_that_the_user_has_written_are_all_that_is_looked_at() -> None:
    """They replace those of the table, so that a node with one of its taints would never take the pod."""
    own = {"key": "nvidia.com/gpu", "value": "mine", "effect": "NoSchedule"}
    step = cast("StepView", _Step("kubernetes", written=("tolerations",), tolerations=[own]))
    seen = placing._step_of(step, REQUEST)
    assert seen.own_tolerations
    assert seen.tolerations == (Toleration(key="nvidia.com/gpu", effect="NoSchedule", value="mine"),)
    placing.place(step, REQUEST, QUIET, step.given("kubernetes"))
    assert step.values("kubernetes")["tolerations"] == [own]


def test_a_local_run_asks_no_cluster_and_waits_for_none() -> None:
    step = _place("local", Options())
    assert set(step.set) == {"local", "parallel", "resources"}
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
