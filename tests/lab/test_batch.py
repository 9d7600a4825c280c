"""What the Batch stand-in takes, refuses, runs and tells; through boto3, as Metaflow uses it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.lab import batch, pods
from tests.lab.batch import BatchService
from tests.lab.batch_jobs import REGION, Queue
from tests.lab.pods import Hub

pytestmark = pytest.mark.skipif(pods.missing() is not None, reason=str(pods.missing()))
ROLE = "arn:aws:iam::123456789012:role/flows"


class Client:
    """boto3's, in the hub."""

    def __init__(self, hub: Hub, service: BatchService, url: str) -> None:
        self.service, self._hub = service, hub
        config = Config(proxies={}, retries={"total_max_attempts": 1})
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
        self._client = boto3.client("batch", endpoint_url=url, region_name=REGION, config=config, **keys)

    def __getattr__(self, name: str) -> Any:
        def call(**arguments: Any) -> Any:
            with self._hub.inside():
                return getattr(self._client, name)(**arguments)

        return call

    def define(self, nodes: int = 1, **more: Any) -> str:
        asked = [{"type": "VCPU", "value": "1"}, {"type": "MEMORY", "value": "512"}]
        container = {
            "image": "i",
            "jobRoleArn": ROLE,
            "command": ["true"],
            "resourceRequirements": asked,
            **more,
        }
        if nodes == 1:
            body: dict[str, Any] = {"type": "container", "containerProperties": container}
        else:
            ranges = [{"targetNodes": each, "container": container} for each in ("0:0", f"1:{nodes - 1}")]
            properties = {"numNodes": nodes, "mainNode": 0, "nodeRangeProperties": ranges}
            body = {"type": "multinode", "nodeProperties": properties}
        return str(self.register_job_definition(jobDefinitionName="d", **body)["jobDefinitionArn"])

    def submit(self, definition: str, **more: Any) -> str:
        return str(self.submit_job(jobName="j", jobQueue="q", jobDefinition=definition, **more)["jobId"])

    def until(self, job: str, *states: str) -> dict[str, Any]:
        deadline = time.monotonic() + 60
        while True:
            (found,) = self.describe_jobs(jobs=[job])["jobs"]
            if found["status"] in states:
                return dict(found)
            assert time.monotonic() < deadline, found
            time.sleep(0.1)

    def ended(self, job: str) -> dict[str, Any]:
        return self.until(job, "SUCCEEDED", "FAILED")

    def logs(self, job: str) -> list[str]:
        return [pod.log.read_text() for pod in self.service.jobs[job].pods]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with Hub(tmp_path_factory.mktemp("hub")) as hub:
        service = BatchService(hub, [Queue(name="q"), Queue(name="off", enabled=False)], {"FROM_ROLE": "1"})
        with batch.serve(service, hub) as url:
            yield Client(hub, service, url)


def run(line: str, **more: Any) -> dict[str, Any]:
    return {"command": ["bash", "-c", line], **more}


def nodes(main: str, others: str) -> dict[str, Any]:
    overrides = [
        {"targetNodes": "0:0", "containerOverrides": run(main)},
        {"targetNodes": "1:1", "containerOverrides": run(others)},
    ]
    return {"nodePropertyOverrides": overrides}


def test_a_job_runs_its_command_with_its_variables_and_its_role(client: Client) -> None:
    definition = client.define(environment=[{"name": "A", "value": "1"}, {"name": "B", "value": "1"}])
    line = "echo $A $B $FROM_ROLE $AWS_BATCH_JOB_ID $AWS_BATCH_JQ_NAME ${AWS_BATCH_JOB_NUM_NODES-one}; exit 3"
    job = client.submit(definition, containerOverrides=run(line, environment=[{"name": "B", "value": "2"}]))
    found = client.ended(job)
    assert client.logs(job) == [f"1 2 1 {job} q one\n"]
    assert (found["status"], found["container"]["exitCode"]) == ("FAILED", 3)
    assert found["attempts"][-1]["container"]["exitCode"] == 3
    assert found["createdAt"] <= found["startedAt"] <= found["stoppedAt"]


def test_the_nodes_of_a_job_know_each_other_and_end_with_the_main_one(client: Client) -> None:
    main = "echo $AWS_BATCH_JOB_NODE_INDEX/$AWS_BATCH_JOB_NUM_NODES "
    main += "${AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS-me}; python -c 'import socket; "
    main += 's = socket.create_server(("", 9)); s.settimeout(60); s.accept()\''
    other = "echo $AWS_BATCH_JOB_ID; until echo > /dev/tcp/$AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS/9; "
    other += "do sleep 0.1; done 2> /dev/null; sleep 600"
    job = client.submit(client.define(nodes=2), nodeOverrides=nodes(main, other))
    found = client.ended(job)
    assert found["status"] == "SUCCEEDED"
    assert "container" not in found
    assert client.logs(job)[0] == "0/2 me\n"
    assert client.logs(job)[1].startswith(f"{job}#1\n")
    (child,) = client.describe_jobs(jobs=[f"{job}#1"])["jobs"]
    assert child["container"]["exitCode"] == 137
    assert child["nodeDetails"]["nodeIndex"] == 1


def test_a_job_that_needs_too_much_memory_ends_with_amazons_words(client: Client) -> None:
    line = "python -c 'x = [bytearray(2**20) for _ in range(900)]'"
    found = client.ended(client.submit(client.define(), containerOverrides=run(line)))
    assert found["container"]["exitCode"] == 137
    assert found["container"]["reason"] == "OutOfMemoryError: Container killed due to memory usage"


def test_a_terminated_job_ends_with_the_reason_given_and_one_that_takes_too_long_too(client: Client) -> None:
    definition = client.define()
    job = client.submit(definition, containerOverrides=run("sleep 600"))
    client.until(job, "RUNNING")
    listed = client.list_jobs(jobQueue="q", jobStatus="RUNNING")["jobSummaryList"]
    assert job in [each["jobId"] for each in listed]
    client.terminate_job(jobId=job, reason="enough")
    found = client.ended(job)
    assert (found["status"], found["statusReason"]) == ("FAILED", "enough")
    slow = client.submit(
        definition, containerOverrides=run("sleep 600"), timeout={"attemptDurationSeconds": 1}
    )
    assert client.ended(slow)["statusReason"] == "Job attempt duration exceeded timeout"


def test_what_never_fits_waits_with_the_reason_until_it_is_terminated(client: Client) -> None:
    asked = [{"type": "GPU", "value": "16"}]
    job = client.submit(client.define(), containerOverrides=run("true", resourceRequirements=asked))
    found = client.until(job, "RUNNABLE")
    time.sleep(0.3)
    found = client.until(job, "RUNNABLE")
    assert found["statusReason"].startswith("MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT")
    client.terminate_job(jobId=job, reason="enough")
    assert client.ended(job)["status"] == "FAILED"


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"jobQueue": "none"}, "none does not exist"),
        ({"jobQueue": "off"}, "off is DISABLED"),
        ({"jobDefinition": "none"}, "none not found"),
        ({"containerOverrides": run("x" * 8200)}, "at most 8192"),
        ({"containerOverrides": run("x", environment=[{"name": "AWS_BATCH_X", "value": "1"}])}, "reserved"),
        ({"containerOverrides": run("x", resourceRequirements=[{"type": "RAM", "value": "1"}])}, "RAM"),
        ({"nodeOverrides": nodes("x", "y")}, "for a container job"),
    ],
)
def test_what_batch_refuses_is_refused(client: Client, request_: dict[str, Any], said: str) -> None:
    usual = {"jobName": "j", "jobQueue": "q", "jobDefinition": client.define()}
    with pytest.raises(ClientError, match=said):
        client.submit_job(**usual | request_)


def test_a_fault_is_answered_instead(client: Client) -> None:
    client.service.fault = lambda _: (403, "ExpiredTokenException", "The security token is expired")
    try:
        with pytest.raises(ClientError, match="ExpiredTokenException"):
            client.describe_job_queues()
    finally:
        client.service.fault = lambda _: None
    (queue,) = client.describe_job_queues(jobQueues=["q"])["jobQueues"]
    (environment,) = client.describe_compute_environments(
        computeEnvironments=[queue["computeEnvironmentOrder"][0]["computeEnvironment"]]
    )["computeEnvironments"]
    assert environment["computeResources"]["type"] == "EC2"
