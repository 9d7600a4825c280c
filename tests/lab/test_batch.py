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


def test_a_job_that_needs_too_much_memory_ends_with_amazons_words(client: Client) -> None:
    line = "python -c 'x = [bytearray(2**20) for _ in range(900)]'"
    found = client.ended(client.submit(client.define(), containerOverrides=run(line)))
    assert found["container"]["exitCode"] == 137
    assert found["container"]["reason"] == "OutOfMemoryError: Container killed due to memory usage"


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
        ({"jobQueue": "off"}, "off is DISABLED"),
        ({"jobDefinition": "none"}, "none not found"),
        ({"containerOverrides": run("x" * 8200)}, "at most 8192"),
        ({"containerOverrides": run("x", environment=[{"name": "AWS_BATCH_X", "value": "1"}])}, "reserved"),
        ({"nodeOverrides": nodes("x", "y")}, "for a container job"),
    ],
)
def test_what_batch_refuses_is_refused(client: Client, request_: dict[str, Any], said: str) -> None:
    usual = {"jobName": "j", "jobQueue": "q", "jobDefinition": client.define()}
    with pytest.raises(ClientError, match=said):
        client.submit_job(**usual | request_)
