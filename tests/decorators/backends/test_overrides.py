"""Requests to the cluster, combined from a plan and values of the user."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from decorators._metaflow import UserValue
from decorators.backends.interface import StepRequest, StepValues
from decorators.backends.options import Options
from decorators.backends.overrides import merge_user_values, request_for, with_user_values
from decorators.backends.placing import values_for
from estimator import Job, Target, plan
from estimator.errors import UserError
from estimator.hardware.cluster.nodes import INSTANCE_TYPE
from estimator.inference.generation import Sampling, plan_generation
from estimator.models import find
from tests.decorators.backends.plans import EFA_VARIABLES
from tests.decorators.flows.plans import make_plan


def _given(**values: Any) -> dict[str, UserValue]:
    return {name: UserValue(value=value, by=f"--with kubernetes:{name}=") for name, value in values.items()}


def _plan(parameters: dict[str, Any], **user_values: Any) -> Any:
    return with_user_values(
        lambda p: make_plan(p, "kubernetes"), parameters, _given(**user_values), "kubernetes"
    )


def _values(
    plan: Any, user_values: dict[str, UserValue], backend: Any, selector: dict[str, str] | None = None
) -> StepValues:
    configured = {"node_selector": selector} if selector else {}
    return values_for(
        StepRequest(backend=backend, request=plan.request, user_values=user_values, configured=configured)
    )


def test_kubernetes_requests_use_its_units_and_are_no_less_than_the_plan() -> None:
    values = _values(_plan({}), {}, "kubernetes")
    # 1,000,000 MiB are 1,048,576 MB; shared memory stays in MiB. Daemon pods keep a core.
    assert values.resources == {
        "cpu": 95,
        "memory": 1_048_576,
        "disk": 209_716,
        "shared_memory": 65536,
        "gpu": 8,
    }
    assert values.compute["node_selector"] == {INSTANCE_TYPE: "p4de.24xlarge"}


def test_batch_requests_are_in_mib_and_its_queue_is_unchanged() -> None:
    plan = with_user_values(lambda p: make_plan(p, "batch"), {}, {}, "batch")
    values = _values(plan, {}, "batch")
    assert values.resources == {
        "cpu": 96,
        "memory": 1_000_000,
        "disk": 200_000,
        "shared_memory": 65536,
        "gpu": 8,
    }
    assert values.compute == {}


def test_a_smaller_memory_set_by_the_user_overrides_the_plan_in_both_decorators() -> None:
    user_values = _given(memory="5000")
    plan = _plan({}, memory="5000")
    values = _values(plan, user_values, "kubernetes")
    assert values.resources["memory"] == values.compute["memory"] == 5000
    assert plan.request.memory_mib == 4768
    assert [(o.name, o.planned, o.used) for o in plan.overrides] == [("memory_mib", "1000000", "4768")]


@pytest.mark.parametrize("gpus", [1, 2])
def test_gpus_set_by_the_user_enter_the_plan_if_the_flow_has_a_gpus_parameter(gpus: int) -> None:
    plan = _plan({"gpus": None}, gpu=gpus)
    assert plan.request.gpus_per_node == plan.layout.processes_per_node == gpus
    assert plan.overrides[0].given_by == "--with kubernetes:gpu="


def test_gpus_set_by_the_user_change_only_the_request_if_the_flow_has_no_gpus_parameter() -> None:
    plan = _plan({}, gpu=2)
    assert (plan.request.gpus_per_node, plan.layout.processes_per_node) == (2, 8)
    assert [(o.planned, o.used) for o in plan.overrides] == [("8", "2")]


def test_contradicting_numbers_of_gpus_are_refused() -> None:
    with pytest.raises(UserError, match="contradict each other"):
        _plan({"gpus": 4}, gpu=2)


def test_a_users_node_selector_replaces_the_planned_machine_and_is_noted() -> None:
    selector = {"pool": "big"}
    plan = _plan({}, node_selector=selector)
    values = _values(plan, _given(node_selector=selector), "kubernetes", selector)
    assert "node_selector" not in values.compute
    assert plan.request.instance_type is None
    assert plan.overrides[0].used == "any node that matches pool=big"


@pytest.mark.parametrize(
    ("backend", "name", "used"),
    [("kubernetes", "gpu", 2), ("kubernetes", "cpu", 8), ("batch", "gpu", 8), ("batch", "cpu", 8)],
)
def test_two_values_of_the_user_are_merged_like_metaflow(backend: Any, name: str, used: int) -> None:
    merged = merge_user_values(_given(**{name: 2}), _given(**{name: 8}), backend)
    assert merged[name].value == used


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tolerations", [{"key": "mine", "operator": "Exists"}]),
        ("extended_resources", {"vpc.amazonaws.com/efa": "1"}),
    ],
)
def test_a_cluster_specific_value_of_the_user_is_kept_and_noted(name: str, value: Any) -> None:
    plan = _plan({"nodes": 2}, **{name: value})
    values = _values(plan, _given(**{name: value}), "kubernetes")
    assert name not in values.compute  # what is not set stays as the user wrote it
    assert [(o.name, o.given_by) for o in plan.overrides] == [(name, f"--with kubernetes:{name}=")]


def test_a_label_of_the_user_is_an_override_only_if_the_package_sets_it_too() -> None:
    options = Options(queue="team")
    ours = {"kueue.x-k8s.io/queue-name": "mine"}
    for labels, noted in (({"cost": "7"}, []), ({"cost": "7", **ours}, ["labels"])):
        user_values = _given(labels=labels)
        plan = with_user_values(lambda p: make_plan(p, "kubernetes"), {}, user_values, "kubernetes", options)
        assert [o.name for o in plan.overrides] == noted
        step_request = StepRequest(
            backend="kubernetes",
            request=plan.request,
            options=options,
            user_values=user_values,
            configured={"labels": labels},
        )
        assert values_for(step_request).compute["labels"] == {"kueue.x-k8s.io/queue-name": "team", **labels}


def test_an_efa_setting_of_the_user_disables_the_fabric_variables() -> None:
    mine = _given(extended_resources={"example.com/nic": "1"})
    assert _values(_plan({"nodes": 2}), mine, "kubernetes").environment == {}
    assert _values(_plan({"nodes": 2}), {}, "kubernetes").environment == EFA_VARIABLES


def test_a_data_step_requests_no_gpus_queue_or_machine_type() -> None:
    options = Options(queues=(("A100-80GB", "gpus"),))
    request = request_for(_plan({"nodes": 2}), "data")
    values = values_for(StepRequest(backend="kubernetes", request=request, options=options))
    assert set(values.compute) == {"cpu", "memory", "disk"}
    assert values.resources["gpu"] is None


def test_each_step_requests_its_own_resources() -> None:
    job = Job(model=find("llama-70b"), global_batch_size=64)
    made_plan = plan(job, Target(kind="kubernetes", instance_type="p5.48xlarge", nodes=2))
    train, prepare, evaluate = (request_for(made_plan, role) for role in ("train", "data", "evaluate"))
    assert (train.nodes, train.gpus_per_node) == (2, 8)
    # The weights' files and the data, where training has checkpoints too
    weights_mib = 2 * job.model.parameters / 2**20
    assert weights_mib < prepare.disk_mib < weights_mib + 11 * 1024 < train.disk_mib / 3
    assert (prepare.nodes, prepare.gpus_per_node, prepare.instance_type) == (1, 0, None)
    assert (evaluate.nodes, evaluate.gpus_per_node, evaluate.gpu_type) == (1, 2, "H100 SXM")
    step_request = StepRequest(backend="kubernetes", request=evaluate)
    assert "extended_resources" not in values_for(step_request).compute  # no EFA on one node
    small = replace(job, model=find("llama-8b"))
    one = plan(small, Target(kind="kubernetes", instance_type="p5.48xlarge"))
    assert request_for(one, "evaluate").gpus_per_node == 1
    assert 1 <= request_for(one, "evaluate").cpu <= int(192 * 0.9 / 8), "at most the GPU's share"


def test_the_stages_of_rejection_sampling_request_their_planned_resources() -> None:
    model = find("llama-8b")
    made_plan = plan(Job(model=model), Target(kind="kubernetes", instance_type="p5.48xlarge"))
    assert request_for(made_plan, "generate") == request_for(made_plan, "evaluate"), (
        "nothing is planned of it"
    )
    sampling = Sampling(
        prompts=5000, held_out=9, answers=4, prompt_tokens=256, new_tokens=256, by_function=True
    )
    made_plan = replace(made_plan, generation=plan_generation(made_plan, model, sampling))
    labeled = replace(made_plan, request=replace(made_plan.request, node_labels=(("good", "yes"),)))
    generate, score, compare = (request_for(labeled, role) for role in ("generate", "score", "compare"))
    assert (generate.nodes, generate.gpus_per_node, generate.gpu_type) == (1, 1, "H100 SXM")
    assert (generate.instance_type, compare) == ("p5.48xlarge", generate)
    assert (score.gpus_per_node, score.gpu_type, score.instance_type) == (0, None, None)
    assert generate.node_labels == score.node_labels == (("good", "yes"),)
    values = values_for(StepRequest(backend="batch", request=generate))
    assert values.resources["gpu"] == 1


def test_an_evaluation_runs_where_the_user_sends_training() -> None:
    made_plan = plan(Job(model=find("llama-8b"), method="lora"), Target(kind="kubernetes"))
    user_values = _given(node_selector={"pool": "big"})
    sent = with_user_values(lambda _: made_plan, {}, user_values, "kubernetes")
    sent = replace(sent, request=replace(sent.request, node_labels=(("good", "yes"),)))
    evaluate = request_for(sent, "evaluate")
    assert (evaluate.instance_type, evaluate.node_labels) == (None, (("good", "yes"),))
