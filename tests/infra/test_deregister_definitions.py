"""infra/aws/deregister_definitions.py against moto: used definitions are kept."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import moto
import pytest
from moto.moto_api import state_manager

FILE = Path(__file__).parents[2] / "infra" / "aws" / "deregister_definitions.py"
CONTAINER = {"image": "train:1", "vcpus": 1, "memory": 512}
TRUST = json.dumps({"Version": "2012-10-17", "Statement": []})

pytestmark = pytest.mark.slow


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The script as a module, with moto as AWS."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    spec = importlib.util.spec_from_file_location("deregister_definitions", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with moto.mock_aws():
        state_manager.set_transition("batch::job", {"progression": "manual", "times": 1000})  # jobs wait
        spec.loader.exec_module(module)
        yield module
        state_manager.unset_transition("batch::job")


def test_only_unused_metaflow_job_definitions_are_deregistered(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = boto3.client("batch")
    arns = {
        name: batch.register_job_definition(
            jobDefinitionName=name, type="container", containerProperties=CONTAINER
        )["jobDefinitionArn"]
        for name in ("metaflow_old", "metaflow_running", "metaflow_deployed", "finetune-nightly-check")
    }
    _submit(batch, arns["metaflow_running"])
    role = boto3.client("iam").create_role(RoleName="states", AssumeRolePolicyDocument=TRUST)["Role"]["Arn"]
    state = {"Type": "Task", "Parameters": {"JobDefinition": arns["metaflow_deployed"]}, "End": True}
    boto3.client("stepfunctions").create_state_machine(
        name="deployed", roleArn=role, definition=json.dumps({"StartAt": "train", "States": {"train": state}})
    )

    for arguments, remaining in ((["--dry-run"], set(arns)), ([], set(arns) - {"metaflow_old"})):
        monkeypatch.setattr(sys, "argv", ["deregister_definitions.py", *arguments])
        script.main()
        assert capsys.readouterr().out.splitlines()[0] == arns["metaflow_old"]
        active = batch.describe_job_definitions(status="ACTIVE")["jobDefinitions"]
        assert {item["jobDefinitionName"] for item in active} == remaining


def _submit(batch: Any, definition: str) -> None:
    """Submit a job that stays in a queue."""
    role = boto3.client("iam").create_role(RoleName="batch", AssumeRolePolicyDocument=TRUST)["Role"]["Arn"]
    environment = batch.create_compute_environment(
        computeEnvironmentName="machines", type="UNMANAGED", state="ENABLED", serviceRole=role
    )["computeEnvironmentArn"]
    batch.create_job_queue(
        jobQueueName="queue",
        state="ENABLED",
        priority=1,
        computeEnvironmentOrder=[{"order": 1, "computeEnvironment": environment}],
    )
    batch.submit_job(jobName="waiting", jobQueue="queue", jobDefinition=definition)
