"""Decorators of a step are filled in at launch, container variables in the waiting process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from decorators._metaflow import Backend, StepView, UserValue
from decorators.backends import pending, placing
from decorators.backends.batch import aws
from decorators.backends.findings import Findings
from decorators.backends.interface import ClusterFacts, StepRequest
from decorators.backends.kubernetes import preflight
from decorators.backends.kubernetes.backend import KUBERNETES
from decorators.backends.kubernetes.nodes import PodSettings
from decorators.backends.options import Options
from decorators.backends.overrides import request_for
from decorators.backends.registry import BACKENDS
from decorators.launch import build_step_request
from estimator.errors import UserError
from estimator.hardware.cluster.api import ClusterApi
from estimator.hardware.cluster.taints import Toleration
from estimator.plan import MIB, Request
from tests.decorators.backends.plans import EFA_VARIABLES, planned
from tests.decorators.backends.steps import RecordedStep

REQUEST = planned("llama-70b", "full", "H100", 4).request
QUIET = Options(preflight=False, pending_timeout=7)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (placing.ENVIRONMENT_VARIABLE, pending.TIMEOUT_VARIABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(pending, "_installed", False)


def _step_request(step: RecordedStep, options: Options = QUIET, request: Request = REQUEST) -> StepRequest:
    return build_step_request(cast("StepView", step), request, options)


def _place(backend: Backend, options: Options = QUIET, **values: Any) -> RecordedStep:
    step = RecordedStep(backend, **values)
    placing.place(cast("StepView", step), _step_request(step, options))
    return step


def test_placing_a_step_on_kubernetes_sets_every_value_and_the_pending_timeout() -> None:
    step = _place("kubernetes", node_selector={"team": "ml"})
    assert step.set["kubernetes"]["node_selector"]["team"] == "ml"
    assert step.set["kubernetes"]["extended_resources"] == {"vpc.amazonaws.com/efa": "32"}
    assert step.set["resources"]["gpu"] == 8
    assert os.environ[pending.TIMEOUT_VARIABLE] == "7"


def test_decisions_of_the_launch_reach_the_process_that_waits_for_the_job() -> None:
    assert _place("kubernetes").environment == EFA_VARIABLES
    waiting = RecordedStep("kubernetes")
    os.environ.pop(pending.TIMEOUT_VARIABLE)  # so that nothing of Metaflow's is changed for other tests
    placing.apply_launch(cast("StepView", waiting))
    assert waiting.environment == EFA_VARIABLES


def test_a_single_node_step_has_no_network_variables_for_any_plan() -> None:
    """A single container on Batch has the interfaces of the host; gloo would not find its own."""
    alone = RecordedStep("kubernetes", parallel=False)
    placing.place(cast("StepView", alone), _step_request(alone))
    assert alone.environment == {}
    os.environ.pop(pending.TIMEOUT_VARIABLE)
    placing.apply_launch(cast("StepView", alone))
    assert alone.environment == {}


def test_a_variable_set_by_the_user_is_kept_at_launch_and_in_the_waiting_process() -> None:
    variables = {"vars": {"FI_PROVIDER": "tcp", "NCCL_NET_PLUGIN": "none", "HF_HOME": "/cache"}}
    step = RecordedStep("kubernetes")
    step.set_values("environment", variables)
    placing.place(cast("StepView", step), _step_request(step))
    assert step.environment == variables["vars"]
    waiting = RecordedStep("kubernetes")
    waiting.set_values("environment", variables)
    os.environ.pop(pending.TIMEOUT_VARIABLE)
    placing.apply_launch(cast("StepView", waiting))
    assert waiting.environment == variables["vars"]
    unset = RecordedStep("kubernetes")
    placing.add_variables(cast("StepView", unset), {"FI_PROVIDER": "efa"})
    assert unset.environment == {"FI_PROVIDER": "efa"}


def test_sizes_lowered_to_fit_a_node_are_noted_in_the_plan_except_those_of_the_user() -> None:
    plan = planned("llama-8b", "lora", "L40S", 1)
    plan = replace(plan, request=replace(plan.request, memory_mib=60_000))  # g6e.xlarge has 32 GiB
    step_request = _step_request(RecordedStep("kubernetes"), request=plan.request)
    [note] = placing.note_lowered_sizes(plan, step_request).overrides
    assert note.name == "memory_mib"
    user_values = {"memory": UserValue(value="60000", by="--with kubernetes:memory=")}
    assert placing.note_lowered_sizes(plan, replace(step_request, user_values=user_values)).overrides == ()
    assert (
        placing.note_lowered_sizes(plan, _step_request(RecordedStep("batch"), request=plan.request)) is plan
    )


def test_a_step_of_another_size_is_inspected_with_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    inspected: list[tuple[str, Request]] = []

    def inspect_size(name: str, request: Request, **_: Any) -> Findings:
        inspected.append((name, request))
        return Findings(where="For step train")

    monkeypatch.setattr(preflight, "inspect_size", inspect_size)
    monkeypatch.setattr(preflight, "_check_once", lambda *_: ClusterFacts())
    plan = planned("llama-70b", "full", "H100", 4)
    step = cast("StepView", RecordedStep("kubernetes", written=("disk",), disk="2000000"))
    largest = build_step_request(cast("StepView", RecordedStep("kubernetes")), plan.request, Options())
    placing.place(step, build_step_request(step, request_for(plan, "data"), Options()), largest)
    [(name, request)] = inspected
    assert (name, request.nodes, request.gpus_per_node) == ("train", 1, 0)
    assert request.disk_mib * MIB == pytest.approx(2000000e6, rel=1e-6)
    placing.place(step, largest, largest)
    assert len(inspected) == 1


def test_pod_settings_of_a_step_are_equal_before_and_after_placing() -> None:
    """Otherwise the cluster would be queried again for each step of a run."""
    toleration = {"key": "team", "operator": "Exists"}
    step = RecordedStep("kubernetes", tolerations=[toleration])
    before = PodSettings.of(_step_request(step))
    assert before.tolerations == (Toleration(key="team", effect="", value=None),)
    placing.place(cast("StepView", step), _step_request(step))
    assert len(step.set["kubernetes"]["tolerations"]) == 2
    assert PodSettings.of(_step_request(step)) == before


def test_only_the_tolerations_of_the_user_are_inspected_if_they_are_set() -> None:
    """They replace those of the table; a node with a taint of the table would not accept the pod."""
    user_tolerations = {"key": "nvidia.com/gpu", "value": "mine", "effect": "NoSchedule"}
    step = RecordedStep("kubernetes", written=("tolerations",), tolerations=[user_tolerations])
    pods = PodSettings.of(_step_request(step))
    assert not pods.tolerate_gpu_taints
    assert pods.tolerations == (Toleration(key="nvidia.com/gpu", effect="NoSchedule", value="mine"),)
    placing.place(cast("StepView", step), _step_request(step))
    assert step.values("kubernetes")["tolerations"] == [user_tolerations]


def test_the_preflight_checks_a_data_step_if_only_that_step_runs_on_the_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preflights: list[StepRequest] = []
    asking = replace(
        KUBERNETES, preflight=lambda step_request: preflights.append(step_request) or ClusterFacts()
    )
    monkeypatch.setitem(BACKENDS, "kubernetes", asking)
    step, training = (
        RecordedStep("kubernetes", namespace="train"),
        _step_request(RecordedStep("local"), Options()),
    )
    data = request_for(planned("llama-70b", "full", "H100", 4), "data")
    step_request = _step_request(step, Options(), data)
    placing.place(cast("StepView", step), step_request, training)
    assert preflights == [step_request]


def test_a_local_run_queries_no_cluster_and_has_no_wait() -> None:
    step = _place("local", Options())
    assert set(step.set) == {"local", "parallel", "resources"}
    assert pending.TIMEOUT_VARIABLE not in os.environ


@pytest.mark.parametrize(
    ("module", "needs", "expected_line"),
    [("kubernetes", ClusterApi, "kubernetes library"), ("boto3", aws.clients, "needs boto3")],
)
def test_a_missing_library_is_reported_in_one_line_with_its_installation(
    module: str, needs: Callable[[], Any], expected_line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=expected_line) as caught:
        needs()
    assert caught.value.advice.startswith("pip install 'metaflow-finetune[")
