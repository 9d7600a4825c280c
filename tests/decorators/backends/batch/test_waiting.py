"""Reasons why a Batch job has not started: its own reason first, then faults of its queue."""

from __future__ import annotations

from typing import Any

import boto3
import pytest
from botocore.stub import Stubber

from decorators._metaflow import WaitedJob
from decorators.backends.batch import waiting

ARN = "arn:aws:batch:us-east-1:1:compute-environment/gpus"


@pytest.fixture
def client() -> Any:
    return boto3.client("batch", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x")


def _job(client: Any, **info: str) -> WaitedJob:
    return WaitedJob(
        backend="batch", kind="batch job", name="id-1", client=client, info={"jobQueue": "q", **info}
    )


@pytest.mark.parametrize("status", ["RUNNING", "SUCCEEDED", "FAILED"])
def test_a_running_or_finished_job_is_not_waiting(client: Any, status: str) -> None:
    assert not waiting.wait_state(_job(client, status=status)).pending


def test_the_reason_given_by_batch_is_shown_and_a_misconfiguration_is_permanent(client: Any) -> None:
    text = "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT - no instance type fits"
    state = waiting.wait_state(_job(client, status="RUNNABLE", statusReason=text))
    assert state.reason == f"RUNNABLE: {text}"
    assert state.permanent_failure is not None
    capacity = waiting.wait_state(_job(client, status="RUNNABLE", statusReason="CAPACITY:no p5"))
    assert capacity.permanent_failure is None


@pytest.mark.parametrize(
    ("state", "status", "expected"),
    [
        ("ENABLED", "INVALID", "gpus is ENABLED, INVALID: no such role"),
        ("DISABLED", "VALID", "gpus is DISABLED"),
        ("ENABLED", "VALID", "no free machine that is large enough"),
    ],
)
def test_compute_environments_are_queried_if_the_job_has_no_reason(
    client: Any, state: str, status: str, expected: str
) -> None:
    queue = {
        "jobQueueName": "q",
        "jobQueueArn": "arn:q",
        "state": "ENABLED",
        "status": "VALID",
        "priority": 1,
        "computeEnvironmentOrder": [{"order": 1, "computeEnvironment": ARN}],
    }
    environment = {
        "computeEnvironmentName": "gpus",
        "computeEnvironmentArn": ARN,
        "state": state,
        "status": status,
        "statusReason": "no such role",
    }
    with Stubber(client) as stub:
        stub.add_response("describe_job_queues", {"jobQueues": [queue]}, {"jobQueues": ["q"]})
        stub.add_response(
            "describe_compute_environments",
            {"computeEnvironments": [environment]},
            {"computeEnvironments": [ARN]},
        )
        wait = waiting.wait_state(_job(client, status="RUNNABLE"))
    assert wait.pending
    assert expected in wait.reason


def test_a_queue_that_cannot_be_read_gives_no_reason(client: Any) -> None:
    with Stubber(client) as stub:
        stub.add_client_error("describe_job_queues", "AccessDeniedException")
        assert waiting.wait_state(_job(client, status="RUNNABLE")).reason == ""


def test_an_abandoned_job_is_terminated(client: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with Stubber(client) as stub:
        reason = "the process that waited for it has given up"
        stub.add_response("terminate_job", {}, {"jobId": "id-1", "reason": reason})
        waiting.terminate_job(_job(client))
        stub.assert_no_pending_responses()
        stub.add_client_error("terminate_job", "AccessDeniedException")
        waiting.terminate_job(_job(client))
    assert "batch job id-1 cannot be terminated" in capsys.readouterr().err
