"""After an attempt that ran out of memory, the next one requests the machine of its new plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from decorators import _metaflow, usage
from decorators._metaflow import StepView, before_retry
from decorators.backends import retrying
from decorators.backends.interface import StepRequest
from decorators.backends.options import Options
from decorators.backends.retrying import Retrying
from decorators.packed_plan import PLAN_VARIABLE, pack, unpack
from decorators.sizing import NextAttempt
from decorators.step_launch import minimum_of
from estimator import Job, Plan, Target, plan
from estimator.formatting import MIB, format_bytes
from estimator.models import find
from estimator.plan import Request
from estimator.planning.next_plan import NextPlan, after_out_of_memory
from estimator.rightsizing.usage import Sizes
from launchers.run.replanning import Replanning, plans_key
from launchers.store.bundles import LocalStorage
from tests.estimator.rightsizing.records import usage as used

KubernetesDecorator = pytest.importorskip(
    "metaflow.plugins.kubernetes.kubernetes_decorator"
).KubernetesDecorator

JOB = Job(model=find("llama-8b"), micro_batch_size=1, activation_checkpointing=True, global_batch_size=16)


@pytest.fixture(scope="module")
def launched() -> Plan:
    return plan(JOB, Target(kind="kubernetes", gpu="a100-80gb", cloud="aws"))


@pytest.fixture
def decorator(launched: Plan) -> Any:
    """The Metaflow decorator as left by the launch."""
    result = KubernetesDecorator(attributes={"gpu": "8", "cpu": "86", "memory": "1000"})
    result.external_init()
    result.attributes["node_selector"] = {
        "pool": "mine",
        "node.kubernetes.io/instance-type": launched.request.instance_type,
    }
    result.package_metadata = result.package_sha = result.package_url = "code"
    result.run_time_limit = 60
    return result


@pytest.fixture
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Replanning:
    storage = LocalStorage(tmp_path)
    monkeypatch.setattr(retrying, "datastore", lambda: storage)
    return Replanning(storage=storage, prefix=plans_key("7"))


def install(decorator: Any, launched: Plan) -> None:
    step = StepView(
        SimpleNamespace(_my_step=SimpleNamespace(name="train", decorators=[decorator], config_decorators=[]))
    )
    Retrying(
        step=step,
        step_request=StepRequest(
            backend="kubernetes",
            request=launched.request,
            options=Options(preflight=False),
            configured={"node_selector": {"pool": "mine"}},
        ),
        minimum=minimum_of,
        carry=lambda other: {PLAN_VARIABLE: pack(other)},
    ).install()


def started(decorator: Any, attempt: int) -> Any:
    """Return what Metaflow would start as that attempt."""
    arguments = SimpleNamespace(
        task=SimpleNamespace(run_id="7"), env={}, command_args=[], command_options={}, entrypoint=["python"]
    )
    decorator.runtime_step_cli(arguments, attempt, 2, None)
    return arguments


def other(launched: Plan) -> NextPlan:
    following = after_out_of_memory(launched, JOB, attempt=0)
    assert following.needs_other_machine
    return following


def test_an_attempt_without_a_replanned_plan_requests_the_original_plan(
    decorator: Any, plans: Replanning, launched: Plan
) -> None:
    install(decorator, launched)
    for attempt in (0, 1):
        arguments = started(decorator, attempt)
        assert (arguments.env, arguments.command_options["gpu"]) == ({}, "8")
        assert (
            f"node.kubernetes.io/instance-type={launched.request.instance_type}"
            in (arguments.command_options["node_selector"])
        )


def test_an_attempt_that_needs_another_gpu_requests_its_machine_and_carries_its_plan(
    decorator: Any, plans: Replanning, launched: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    install(decorator, launched)
    following = other(launched)
    plans.store_plan(0, following)
    arguments = started(decorator, 1)
    request = following.plan.request
    options = arguments.command_options
    assert sorted(options["node_selector"]) == [
        f"node.kubernetes.io/instance-type={request.instance_type}",
        "pool=mine",
    ]
    assert options["gpu"] == str(request.gpus_per_node)
    assert int(options["cpu"]) == request.cpu
    assert options["shared_memory"] == request.shared_memory_mib
    assert json.loads(options["tolerations"])[0]["key"] == "nvidia.com/gpu"
    assert unpack(arguments.env[PLAN_VARIABLE]) == following.plan
    size = format_bytes(request.memory_mib * MIB)
    assert f"requests 8x {request.gpu_type} and {size} per node" in capsys.readouterr().err


def test_an_attempt_with_only_another_layout_keeps_its_machine(
    decorator: Any, plans: Replanning, launched: Plan
) -> None:
    install(decorator, launched)
    layout = replace(launched.layout, micro_batch_size=1)
    plans.store_plan(0, NextPlan(plan=replace(launched, layout=layout), change="micro batch"))
    arguments = started(decorator, 1)
    assert (arguments.env, arguments.command_options["gpu"]) == ({}, "8")


def test_an_attempt_after_a_right_sized_one_ran_out_of_memory_requests_more(
    decorator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(tmp_path)
    monkeypatch.setattr(usage, "usage_storage", lambda: storage)
    monkeypatch.setattr(_metaflow, "flow_name", lambda: "SomeFlow")
    monkeypatch.setenv(usage.SIZES_VARIABLE, "{}")
    decorator.attributes |= {"gpu": None, "cpu": "2", "memory": "4000", "node_selector": None}
    request = Request(
        nodes=1, gpus_per_node=0, gpu_type=None, cpu=2, memory_mib=3815, shared_memory_mib=0, disk_mib=10_240
    )
    step = StepView(
        SimpleNamespace(_my_step=SimpleNamespace(name="train", decorators=[decorator], config_decorators=[]))
    )
    step_request = StepRequest(backend="kubernetes", request=request, options=Options(preflight=False))
    before_retry(step, "kubernetes", NextAttempt(step, step_request).prepare)
    assert started(decorator, 1).command_options["memory"] == "4000", "no task has run out of memory"

    lacking = used(3800, run="7", ending="out of memory", requested=Sizes(cpu=2, memory_mib=3815))
    storage.put_bytes(usage.key_of(lacking), lacking.to_json().encode())
    arguments = started(decorator, 1)
    assert int(arguments.command_options["memory"]) >= 1.5 * 3815
    assert int(arguments.command_options["cpu"]) == 2
    carried = json.loads(arguments.env[usage.SIZES_VARIABLE])
    assert carried["train"]["memory_mib"] >= 1.5 * 3815
