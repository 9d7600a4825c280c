"""The preflight of AWS Batch against Batch and EC2 of moto: missing capabilities of a queue are named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber

from decorators.backends.batch import aws, preflight
from decorators.backends.batch.preflight import JobSettings, inspect
from decorators.backends.findings import Findings
from decorators.backends.interface import MinimumRequest, StepRequest
from estimator.errors import UserError
from estimator.plan import GIB, Request
from tests.decorators.backends.plans import planned

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("account")]

ONE = Request(nodes=1, gpus_per_node=0, gpu_type=None, cpu=1, memory_mib=1, shared_memory_mib=0, disk_mib=1)
FOUR = planned("llama-70b", "full", "H100", 4, kind="batch").request  # 4 x p5.48xlarge
LEAST = MinimumRequest(cpu=8, memory_bytes=500 * GIB)
IMAGE = "127.0.0.1:9/finetune:1"
ROLE = "arn:aws:iam::123456789012:role/any"


def _inspect(queue: str | None, request: Request = FOUR) -> Findings:
    return inspect(request, job=JobSettings(queue=queue, image=IMAGE, iam_role=ROLE), minimum=LEAST)


def _found(findings: Findings, check: str) -> list[str]:
    return [f"{row.state}: {row.detail}" for row in findings.rows if row.check == check]


def test_a_queue_that_can_run_the_job_is_accepted(queue: Callable[..., str]) -> None:
    findings = _inspect(queue())
    assert findings.impossible == []
    assert _found(findings, "queue") == ["ok: ENABLED, VALID"]
    assert _found(findings, "compute environment") == ["ok: gpus-environment: p5.48xlarge"]
    assert _found(findings, "region") == ["ok: us-east-1 has p5.48xlarge"]
    findings.report_and_check()


def test_an_unknown_queue_is_refused_with_the_existing_ones(queue: Callable[..., str]) -> None:
    queue("research")
    findings = _inspect("reserch")
    assert _found(findings, "queue") == ["no: not found in us-east-1"]
    with pytest.raises(UserError, match="AWS Batch queue reserch cannot run this") as caught:
        findings.report_and_check()
    assert caught.value.advice == "--queue research"


def test_the_queue_that_metaflow_selects_by_default_is_named(queue: Callable[..., str]) -> None:
    assert _found(_inspect(None), "queue")[0].startswith(
        "no: none is named, and the region has no enabled queue"
    )
    queue("research")
    assert _found(_inspect(None), "queue") == ["unknown: none is named: Metaflow uses research"]


def test_a_disabled_queue_gets_the_command_that_enables_it(queue: Callable[..., str]) -> None:
    findings = _inspect(queue(state="DISABLED"))
    assert _found(findings, "queue") == ["no: state: DISABLED, VALID"]
    assert findings.impossible[0].fix == "aws batch update-job-queue --job-queue gpus --state ENABLED"


@pytest.mark.parametrize(
    ("resources", "why"),
    [
        ({"instanceTypes": ["p4d.24xlarge"]}, "p4d.24xlarge: no type has 8x H100 SXM, 8 vCPUs, 500.0 GiB"),
        ({"instanceTypes": ["p5.4xlarge"]}, "p5.4xlarge: no type has 8x H100 SXM"),
        ({"maxvCpus": 512}, "maxvCpus is 512, 4 nodes need 768"),
        ({"type": "SPOT"}, "SPOT runs no jobs of several nodes"),
        ({"instanceTypes": ["optimal", "m5.large"]}, "optimal, m5.large: no type has 8x H100 SXM"),
    ],
)
def test_an_unsuitable_compute_environment_is_refused_with_the_missing_capability(
    queue: Callable[..., str], resources: dict[str, Any], why: str
) -> None:
    findings = _inspect(queue(**resources))
    [last] = [row.detail for row in findings.impossible]
    assert last.startswith("none can run 4 nodes of 8x H100 SXM")
    assert why in last


def test_a_disabled_compute_environment_is_refused(queue: Callable[..., str]) -> None:
    assert "DISABLED" in _inspect(queue(environment="DISABLED")).impossible[0].detail


def test_a_spot_run_needs_a_compute_environment_of_spot_machines(queue: Callable[..., str]) -> None:
    one = dataclasses.replace(FOUR, nodes=1, spot=True)
    assert _inspect(queue("spot", type="SPOT"), one).impossible == []
    assert "EC2: not on spot" in _inspect(queue("on-demand"), one).impossible[0].detail


@pytest.mark.parametrize(
    ("kind", "untold"), [("p9.96xlarge", True), ("m5.large", False), ("p5.48xlarge", False)]
)
def test_only_unlisted_gpu_machine_types_may_be_sufficient(kind: str, untold: bool) -> None:
    assert preflight._allows_unlisted({"instanceTypes": [kind]}, FOUR) == untold


def test_a_region_without_the_machine_is_refused(
    queue: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-south-1")
    findings = _inspect(queue())
    assert _found(findings, "region") == ["no: eu-south-1 has no p5.48xlarge"]


def _answering(service: str, method: str, answer: Any, **error: str) -> Callable[[], Callable[[str], Any]]:
    """Return clients with this response or error for one method; botocore validates its shape."""

    def clients() -> Callable[[str], Any]:
        def client(name: str) -> Any:
            stubbed = boto3.client(name)
            if name == service:
                stub = Stubber(stubbed)
                if error:
                    stub.add_client_error(method, service_error_code=error["code"], service_message="no")
                else:
                    stub.add_response(method, answer)
                stub.activate()
            return stubbed

        return client

    return clients


@pytest.mark.parametrize(("vcpu_limit", "state"), [(96.0, "no"), (768.0, "ok")])
def test_the_vcpu_limit_of_the_account_is_checked(
    queue: Callable[..., str], monkeypatch: pytest.MonkeyPatch, vcpu_limit: float, state: str
) -> None:
    answer = {"Quota": {"Value": vcpu_limit, "QuotaCode": "L-417A185B"}}
    monkeypatch.setattr(aws, "clients", _answering("service-quotas", "get_service_quota", answer))
    findings = _inspect(queue())
    assert findings.state("quota") == state
    if state == "no":
        assert "--quota-code L-417A185B --desired-value 768" in findings.impossible[0].fix


@pytest.mark.parametrize(("p5_limit", "code"), [(True, "L-C4BD4855"), (False, "L-7212CCBC")])
def test_the_separate_spot_limit_of_p5_machines_is_checked(
    queue: Callable[..., str], monkeypatch: pytest.MonkeyPatch, p5_limit: bool, code: str
) -> None:
    def client(service: str) -> Any:
        stubbed = boto3.client(service)
        if service == "service-quotas":
            stub, quota_request = Stubber(stubbed), {"ServiceCode": "ec2", "QuotaCode": "L-C4BD4855"}
            if not p5_limit:
                stub.add_client_error(
                    "get_service_quota", "NoSuchResourceException", expected_params=quota_request
                )
            stub.add_response(
                "get_service_quota",
                {"Quota": {"Value": 96.0, "QuotaCode": code}},
                {"ServiceCode": "ec2", "QuotaCode": code},
            )
            stub.activate()
        return stubbed

    monkeypatch.setattr(aws, "clients", lambda: client)
    findings = _inspect(queue(type="SPOT"), dataclasses.replace(FOUR, nodes=1))
    assert findings.state("quota") == "no"
    assert f"--quota-code {code} --desired-value 192" in findings.impossible[0].fix


def test_a_limit_without_permission_to_read_it_is_unknown(
    queue: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    denied = _answering("service-quotas", "get_service_quota", None, code="AccessDeniedException")
    monkeypatch.setattr(aws, "clients", denied)
    findings = _inspect(queue())
    assert _found(findings, "quota") == ["unknown: no response: AccessDeniedException"]
    assert findings.impossible == []


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("ExpiredTokenException", "The AWS credentials have expired."),
        ("UnrecognizedClientException", "AWS does not accept the credentials"),
    ],
)
def test_invalid_credentials_are_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, code: str, expected: str
) -> None:
    monkeypatch.setattr(aws, "clients", _answering("batch", "describe_job_queues", None, code=code))
    with pytest.raises(UserError, match=expected):
        _inspect("gpus")
    with pytest.raises(UserError, match=expected):
        preflight.check_access(StepRequest(backend="batch", request=ONE))


def test_a_missing_region_and_an_unreachable_service_are_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_BATCH", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="AWS Batch cannot be reached"):
        _inspect("gpus")
    monkeypatch.delenv("AWS_ENDPOINT_URL_BATCH")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    with pytest.raises(UserError, match="AWS cannot be queried: You must specify a region"):
        _inspect("gpus")
