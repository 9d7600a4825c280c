"""Requests of a deployed flow: an Argo workflow, compiled with a local S3."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from decorators.packed_plan import unpack
from tests.decorators.conftest import Home
from tests.decorators.test_storage import s3 as s3

pytest.importorskip("kubernetes", reason="needs the kubernetes package to compile for a cluster")
boto3 = pytest.importorskip("boto3", reason="needs boto3 for the S3 of this machine")


CREDENTIALS = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
ROLE = "arn:aws:iam::123456789012:role/any"


def compiled(
    home: Home, address: str, flow: str, *arguments: str, **environment: str
) -> tuple[dict[str, Any], str]:
    """Return the definition of a deployment, and its standard error."""
    _client("s3", address).create_bucket(Bucket="deployed")
    done = home.run(
        flow,
        *arguments,
        METAFLOW_DEFAULT_DATASTORE="s3",
        METAFLOW_DATASTORE_SYSROOT_S3="s3://deployed/root",
        METAFLOW_S3_ENDPOINT_URL=address,
        AWS_ENDPOINT_URL=address,
        **CREDENTIALS,
        **environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout), done.stderr  # nothing but the JSON on standard output


def _argo(home: Home, address: str, *options: str) -> tuple[dict[str, Any], str]:
    arguments = (*options, "argo-workflows", "--name", "nodes", "create", "--only-json")
    return compiled(home, address, "nodes.py", *arguments)


def _make_queue(address: str) -> None:
    iam, ec2, batch = (_client(service, address) for service in ("iam", "ec2", "batch"))
    role = iam.create_role(RoleName="batch", AssumeRolePolicyDocument="{}")["Role"]["Arn"]
    profile = iam.create_instance_profile(InstanceProfileName="batch")["InstanceProfile"]["Arn"]
    subnet = ec2.describe_subnets()["Subnets"][0]
    group = ec2.create_security_group(GroupName="batch", Description="batch", VpcId=subnet["VpcId"])
    environment = batch.create_compute_environment(
        computeEnvironmentName="environment",
        type="MANAGED",
        state="ENABLED",
        serviceRole=role,
        computeResources={
            "type": "EC2",
            "minvCpus": 0,
            "maxvCpus": 256,
            "instanceTypes": ["p4d.24xlarge"],
            "subnets": [subnet["SubnetId"]],
            "securityGroupIds": [group["GroupId"]],
            "instanceRole": profile,
        },
    )
    order = [{"order": 1, "computeEnvironment": environment["computeEnvironmentArn"]}]
    batch.create_job_queue(
        jobQueueName="gpu-queue", state="ENABLED", priority=1, computeEnvironmentOrder=order
    )


def _client(service: str, address: str) -> Any:
    return boto3.client(
        service,
        endpoint_url=address,
        region_name="us-east-1",
        aws_access_key_id="x",
        aws_secret_access_key="x",
    )


def templates(workflow: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {template["name"]: template for template in workflow["spec"]["templates"]}


@pytest.mark.slow
def test_a_deployed_flow_requests_the_planned_resources(home: Home, s3: str) -> None:
    workflow, text = _argo(home, s3)
    assert "Traceback" not in text
    pod_templates = templates(workflow)

    jobset = pod_templates["train"]["resource"]["manifest"]
    assert len(re.findall(r"nvidia.com/gpu: '8'", jobset)) == 2  # the control job's and the workers'
    assert len(re.findall(r"memory: 1048576(\.0)?M", jobset)) >= 2
    assert len(re.findall(r"cpu: '?95(\.0)?'?", jobset)) >= 2  # of 96: daemon pods need some
    assert len(re.findall(r"vpc.amazonaws.com/efa: '4'", jobset)) == 4  # requests and limits
    for arguments in ("FI_PROVIDER", "node.kubernetes.io/instance-type: p4de.24xlarge", "65536Mi"):
        assert arguments in jobset

    start = pod_templates["start"]["container"]
    assert start["resources"]["limits"].get("nvidia.com/gpu") is None
    plan = next(v["value"] for v in start["env"] if v["name"] == "FINETUNE_PLAN")
    assert unpack(plan).request.gpus_per_node == 8
    assert len(plan) < 4000  # AWS Batch takes 8192 characters for all variables together
    assert plan in jobset.replace("\n", "").replace(" ", "")
