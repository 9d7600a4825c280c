"""Values that a flow without a plan writes into the decorators of its steps."""

from __future__ import annotations

from typing import Any, cast

import pytest

from decorators._metaflow import StepView
from decorators.backends import pending, placing
from decorators.backends.options import Options
from decorators.launch import build_step_request
from estimator.plan import Request
from tests.decorators.backends.steps import RecordedStep

P5 = Request(
    nodes=4,
    gpus_per_node=8,
    gpu_type="H100 SXM",
    cpu=32,
    memory_mib=73_728,
    shared_memory_mib=8192,
    disk_mib=10_240,
    instance_type="p5.48xlarge",
)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (placing.ENVIRONMENT_VARIABLE, pending.TIMEOUT_VARIABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def _written(backend: Any, **written: Any) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    step = RecordedStep(backend, written=tuple(written), **written)
    view = cast("StepView", step)
    placing.fill_in(view, build_step_request(view, P5, Options()))
    return step.set, step.environment


def test_a_batch_job_requests_gpus_shared_memory_and_the_fabric() -> None:
    written, extra = _written("batch")
    assert (written["resources"]["gpu"], written["resources"]["shared_memory"]) == (8, 8192)
    assert written["batch"]["efa"] == 32
    assert extra["FI_PROVIDER"] == "efa"


def test_values_set_by_the_user_are_kept() -> None:
    written, _ = _written("batch", gpu="4", memory="9000", queue="mine", efa="0")
    assert (written["resources"]["gpu"], written["resources"]["memory"]) == (4, 9000)
    assert written["resources"]["shared_memory"] == 8192
    assert (written["batch"]["queue"], written["batch"]["efa"]) == ("mine", "0")
