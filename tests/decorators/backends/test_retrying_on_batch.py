"""After an attempt that ran out of memory on Batch, the next one uses the queue of the next GPU (moto)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from metaflow.plugins.aws.batch.batch_decorator import BatchDecorator

from decorators._metaflow import StepView
from decorators.backends import retrying
from decorators.backends.batch import preflight as queue_preflight
from decorators.backends.interface import StepRequest
from decorators.backends.options import Options
from decorators.backends.retrying import Retrying
from decorators.packed_plan import PLAN_VARIABLE, pack, unpack
from decorators.step_launch import minimum_of
from estimator import Plan, Target, plan
from estimator.planning.next_plan import NextPlan
from launchers.run.replanning import Replanning, plans_key
from launchers.store.bundles import LocalStorage
from tests.decorators.backends.test_retrying import JOB, other, started

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("account")]

GPU = "a100-80gb"


@pytest.fixture(scope="module")
def launched() -> Plan:
    return plan(JOB, Target(kind="batch", gpu=GPU, cloud="aws"))


@pytest.fixture
def following(launched: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NextPlan:
    """The stored plan of the first attempt of run 7, for another GPU."""
    storage = LocalStorage(tmp_path)
    monkeypatch.setattr(retrying, "datastore", lambda: storage)
    queue_preflight._check_once.cache_clear()
    attempt = other(launched)
    Replanning(storage=storage, prefix=plans_key("7")).store_plan(0, attempt)
    return attempt


@pytest.fixture
def decorator(launched: Plan) -> Any:
    """The Metaflow decorator as left by the launch."""
    sizes = {"gpu": "8", "cpu": str(launched.request.cpu), "memory": str(launched.request.memory_mib)}
    role = "arn:aws:iam::123456789012:role/any"
    result = BatchDecorator(attributes={**sizes, "image": "127.0.0.1:9/a:1", "iam_role": role})
    result.external_init()
    result.attributes |= {"queue": "first", "aws_batch_tags": {}}
    result.package_metadata = result.package_sha = result.package_url = "code"
    result.run_time_limit = 60
    return result


def install(decorator: Any, launched: Plan, **options: Any) -> None:
    step = SimpleNamespace(name="train", decorators=[decorator], config_decorators=[])
    Retrying(
        step=StepView(SimpleNamespace(_my_step=step)),
        step_request=StepRequest(
            backend="batch", request=launched.request, options=Options(**options), configured={}
        ),
        minimum=minimum_of,
        carry=lambda plan: {PLAN_VARIABLE: pack(plan)},
    ).install()


def test_the_next_attempt_is_submitted_to_the_queue_of_the_gpu_in_its_plan(
    decorator: Any,
    queue: Callable[..., str],
    launched: Plan,
    following: NextPlan,
    capsys: pytest.CaptureFixture[str],
) -> None:
    request = following.plan.request
    assert request.gpu_type is not None
    queue("first", instanceTypes=[launched.request.instance_type])
    queue("next", instanceTypes=[request.instance_type])
    install(decorator, launched, queues=((GPU, "first"), (request.gpu_type, "next")))
    arguments = started(decorator, 1)
    options = arguments.command_options
    assert (options["queue"], options["gpu"]) == ("next", str(request.gpus_per_node))
    assert (int(options["cpu"]), int(options["memory"])) == (request.cpu, request.memory_mib)
    assert options["shared_memory"] == request.shared_memory_mib
    assert unpack(arguments.env[PLAN_VARIABLE]) == following.plan
    assert f"requests 8x {request.gpu_type} and " in capsys.readouterr().err


def test_without_a_queue_for_its_gpu_the_next_attempt_keeps_the_machine_and_prints_a_note(
    decorator: Any,
    queue: Callable[..., str],
    launched: Plan,
    following: NextPlan,
    capsys: pytest.CaptureFixture[str],
) -> None:
    queue("first", instanceTypes=[launched.request.instance_type])
    install(decorator, launched, queues=((GPU, "first"),))
    arguments = started(decorator, 1)
    assert (arguments.env, arguments.command_options["queue"]) == ({}, "first")
    assert arguments.command_options["memory"] == str(launched.request.memory_mib)
    assert "is not available" in capsys.readouterr().err
