"""An AWS account in moto with job queues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest
from moto import mock_aws


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_BATCH"):
        monkeypatch.delenv(name, raising=False)
    with mock_aws():
        yield


@pytest.fixture
def queue(account: None) -> Callable[..., str]:
    """Create a queue with one compute environment."""

    def make(
        name: str = "gpus", state: str = "ENABLED", environment: str = "ENABLED", **resources: Any
    ) -> str:
        ec2, iam, batch = (boto3.client(service) for service in ("ec2", "iam", "batch"))
        role = iam.create_role(RoleName=name, AssumeRolePolicyDocument="{}")["Role"]["Arn"]
        profile = iam.create_instance_profile(InstanceProfileName=name)["InstanceProfile"]["Arn"]
        subnet = ec2.describe_subnets()["Subnets"][0]
        group = ec2.create_security_group(GroupName=name, Description=name, VpcId=subnet["VpcId"])
        environment_created = batch.create_compute_environment(
            computeEnvironmentName=f"{name}-environment",
            type="MANAGED",
            state=environment,
            serviceRole=role,
            computeResources={
                "type": "EC2",
                "minvCpus": 0,
                "maxvCpus": 1024,
                "instanceTypes": ["p5.48xlarge"],
                "subnets": [subnet["SubnetId"]],
                "securityGroupIds": [group["GroupId"]],
                "instanceRole": profile,
                **resources,
            },
        )
        order = [{"order": 1, "computeEnvironment": environment_created["computeEnvironmentArn"]}]
        batch.create_job_queue(jobQueueName=name, state=state, priority=1, computeEnvironmentOrder=order)
        return name

    return make
