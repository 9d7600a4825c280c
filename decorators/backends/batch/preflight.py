"""Preflight for AWS Batch: check before submission whether a queue could ever run a request."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from decorators.backends import tables
from decorators.backends.batch import aws
from decorators.backends.batch.workarounds import refuse_local_metadata
from decorators.backends.findings import Findings
from decorators.backends.interface import ClusterFacts, MinimumRequest, StepRequest
from decorators.backends.kubernetes import images
from decorators.backends.tables import Quota
from estimator import hardware
from estimator.aws_errors import failure_of
from estimator.formatting import format_bytes, format_count
from estimator.hardware.cluster.api import Clock
from estimator.plan import MIB, Request

INFRA = "infra/aws creates queues by GPU type, and environments for multi-node jobs"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSettings:
    """Settings of the job that Metaflow will submit, except its size."""

    queue: str | None = None
    image: str | None = None
    iam_role: str | None = None

    @classmethod
    def of(cls, step_request: StepRequest) -> JobSettings:
        """Read the settings from the step's ``@batch``; the queue defaults to the GPU's queue."""
        values = step_request.configured
        queue = (
            values.get("queue")
            if "queue" in step_request.user_values
            else step_request.options.queue_for(step_request.request.gpu_type)
        )
        return cls(
            queue=queue or values.get("queue"), image=values.get("image"), iam_role=values.get("iam_role")
        )


@dataclass(kw_only=True, slots=True)
class _Preflight:
    """State of one preflight: the request, the AWS clients, and the findings so far."""

    client: Callable[[str], Any]
    request: Request
    minimum: MinimumRequest
    findings: Findings
    clock: Clock


def check_queue(step_request: StepRequest) -> ClusterFacts:
    """Raise UserError if the queue can never run the request. Returns no facts, because Batch reports none.

    Each process checks a queue once, for the run's largest step.
    """
    facts = refuse_local_metadata(step_request)
    if step_request.may_query and not step_request.size_only:
        _check_once(step_request.request, JobSettings.of(step_request), step_request.minimum)
    return facts


def check_access(step_request: StepRequest) -> ClusterFacts:
    """Raise UserError if AWS Batch cannot be used, for a step without a plan. Returns no facts."""
    facts = refuse_local_metadata(step_request)
    if step_request.may_query:
        _check_access_once()
    return facts


@lru_cache(maxsize=1)
def _check_access_once() -> None:
    client = aws.clients()("batch")
    with suppress(aws.RefusedError):  # a login that may only submit jobs
        aws.query(lambda: aws.queues(client))


@lru_cache(maxsize=4)
def _check_once(request: Request, job: JobSettings, minimum: MinimumRequest | None) -> None:
    inspect(request, job=job, minimum=minimum).report_and_check()


def inspect(
    request: Request, *, job: JobSettings, minimum: MinimumRequest | None = None, clock: Clock | None = None
) -> Findings:
    """Return all findings. Raises UserError if AWS cannot be reached or no queue is named."""
    preflight = _Preflight(
        client=aws.clients(),
        request=request,
        minimum=minimum or MinimumRequest(cpu=request.cpu, memory_bytes=request.memory_mib * MIB),
        findings=Findings(where=f"AWS Batch queue {job.queue or '(none named)'}"),
        clock=clock or Clock(),
    )
    queue = _queue(preflight, job.queue) if job.queue else _any_queue(preflight)
    if queue is not None:
        environments = _environments(preflight, queue)
        usable = [item for item in environments if _environment(preflight, item)]
        if environments and not usable:
            _report_unusable(preflight)
        for item in usable:
            _optional_check(preflight, "region", partial(_offered, preflight, item))
            _optional_check(preflight, "quota", partial(_quota, preflight, item))
    if not job.iam_role:
        preflight.findings.unknown(
            "role", "the jobs have no IAM role, so they cannot read S3", "METAFLOW_ECS_S3_ACCESS_IAM_ROLE=ARN"
        )
    images.check(job.image, preflight.findings, preflight.clock, gpus=bool(request.gpus_per_node))
    return preflight.findings


def _required_query(
    preflight: _Preflight, query: Callable[[], list[dict[str, Any]]]
) -> list[dict[str, Any]] | None:
    """Run a query that all further checks depend on. Raises UserError if AWS does not respond."""
    try:
        return aws.query(query)
    except aws.RefusedError as error:
        preflight.findings.unknown("queue", f"access denied: {error}")
        return None


def _optional_check(preflight: _Preflight, check: str, query: Callable[[], None]) -> None:
    """Run an optional check; if it gets no result, its finding is unknown."""
    from botocore.exceptions import BotoCoreError, ClientError

    if preflight.clock.left() <= 0:
        preflight.findings.unknown(check, "skipped: time limit reached")
        return
    try:
        query()
    except (BotoCoreError, ClientError, KeyError) as error:
        preflight.findings.unknown(check, f"no response: {failure_of(error).code}")


def _any_queue(preflight: _Preflight) -> dict[str, Any] | None:
    """Return the queue that Metaflow uses if none is named."""
    queues = _required_query(preflight, lambda: aws.queues(preflight.client("batch")))
    if queues is None:
        return None
    queue = next((queue for queue in queues if not aws.unusable(queue)), None)
    fix = "--queue NAME, resources.queues by GPU type in the settings, or METAFLOW_BATCH_JOB_QUEUE=NAME"
    if queue is None:
        preflight.findings.no("queue", "none is named, and the region has no enabled queue", fix)
        return None
    preflight.findings.unknown("queue", f"none is named: Metaflow uses {queue['jobQueueName']}", fix)
    return queue


def _queue(preflight: _Preflight, name: str) -> dict[str, Any] | None:
    client = preflight.client("batch")
    queues = _required_query(preflight, lambda: aws.queues(client, name))
    if queues is None:
        return None
    if not queues:
        every = _required_query(preflight, lambda: aws.queues(client)) or []
        names = ", ".join(item["jobQueueName"] for item in every[:5])
        region = client.meta.region_name
        preflight.findings.no(
            "queue", f"not found in {region}", f"--queue {' or '.join(names.split(', '))}" if names else INFRA
        )
        return None
    queue = queues[0]
    if reason := aws.unusable(queue):
        preflight.findings.no(
            "queue",
            f"state: {reason}",
            f"aws batch update-job-queue --job-queue {queue['jobQueueName']} --state ENABLED",
        )
        return None
    preflight.findings.ok("queue", f"ENABLED, {queue['status']}")
    return queue


def _environments(preflight: _Preflight, queue: Mapping[str, Any]) -> list[dict[str, Any]]:
    if not queue.get("computeEnvironmentOrder"):
        preflight.findings.no("compute environment", "the queue has none", INFRA)
    return _required_query(preflight, lambda: aws.environments(preflight.client("batch"), queue)) or []


def _environment(preflight: _Preflight, item: Mapping[str, Any]) -> bool:
    """Add the finding of one compute environment; return whether it could run the request."""
    name, refusal = item["computeEnvironmentName"], _refusal(preflight, item)
    if refusal is None:
        fitting = _fitting(item.get("computeResources") or {}, preflight.request, preflight.minimum)
        machines = ", ".join(fitting[:3]) if fitting else "machine types missing from the instance table"
        preflight.findings.ok("compute environment", f"{name}: {machines}")
        return True
    # Not an error as long as another environment can
    preflight.findings.unknown("compute environment", f"{name}: {refusal}")
    return False


def _refusal(preflight: _Preflight, item: Mapping[str, Any]) -> str | None:
    """Return why this compute environment can never run the request; None if it can."""
    request, minimum = preflight.request, preflight.minimum
    if reason := aws.unusable(item):
        return reason
    if item.get("type") == "UNMANAGED":
        return "UNMANAGED: no jobs of several nodes" if request.nodes > 1 else None
    resources = item.get("computeResources") or {}
    kind = resources.get("type", "EC2")
    if kind.startswith("FARGATE") and (request.gpus_per_node or request.nodes > 1):
        return f"{kind} has no GPUs and runs no jobs of several nodes"
    if kind == "SPOT" and request.nodes > 1:
        return "SPOT runs no jobs of several nodes"
    if request.spot and kind != "SPOT":
        return f"{kind}: not on spot"
    if kind.startswith("FARGATE"):
        return None
    if not _fitting(resources, request, minimum) and not _allows_unlisted(resources, request):
        types = ", ".join(resources.get("instanceTypes") or []) or "no instance types"
        machine = request.gpus if request.gpus_per_node else "machine"
        return f"{types}: no type has {machine}, {minimum.cpu:g} vCPUs, {format_bytes(minimum.memory_bytes)}"
    vcpu_limit = resources.get("maxvCpus")
    required = _vcpus(resources, request, minimum)
    if vcpu_limit is not None and vcpu_limit < required:
        return f"maxvCpus is {vcpu_limit}, {format_count(request.nodes, 'node')} need {required}"
    return None


def _report_unusable(preflight: _Preflight) -> None:
    request = preflight.request
    requested = (
        f"{format_count(request.nodes, 'node')} of {request.gpus}" if request.gpus_per_node else "the step"
    )
    rows = [row.detail for row in preflight.findings.rows if row.check == "compute environment"]
    preflight.findings.no("compute environment", f"none can run {requested} ({'; '.join(rows)})", INFRA)


def _fitting(resources: Mapping[str, Any], request: Request, minimum: MinimumRequest) -> list[str]:
    """Return the machine types of the table that the environment may start and that are large enough."""
    allowed = aws.allowed(resources)
    gpu = hardware.current().gpu(request.gpu_type).name if request.gpu_type else None
    return [
        item.name
        for item in hardware.current().instances
        if item.cloud == "aws"
        and any(aws.matches(item.name, pattern) for pattern in allowed)
        and (not request.gpus_per_node or (item.gpu == gpu and item.gpu_count >= request.gpus_per_node))
        and (item.vcpu or 0) >= minimum.cpu
        and (item.ram_bytes or 0) >= minimum.memory_bytes
    ]


def _allows_unlisted(resources: Mapping[str, Any], request: Request) -> bool:
    """Whether the environment may start machine types that the instance table (GPU machines only) lacks."""
    instances = [item.name for item in hardware.current().instances if item.cloud == "aws"]
    unlisted = [
        name for name in aws.allowed(resources) if not any(aws.matches(item, name) for item in instances)
    ]
    return any(not request.gpus_per_node or re.match(r"[pg]\d", name) for name in unlisted)


def _vcpus(resources: Mapping[str, Any], request: Request, minimum: MinimumRequest) -> int:
    """Return the vCPUs of all machines of the run; whole machines count."""
    sizes = [hardware.current().find_instance(name) for name in _fitting(resources, request, minimum)]
    vcpus = [item.vcpu for item in sizes if item is not None and item.vcpu]
    return request.nodes * (min(vcpus) if vcpus else request.cpu)


def _offered(preflight: _Preflight, item: Mapping[str, Any]) -> None:
    """Check whether the region offers the machine type."""
    resources = item.get("computeResources") or {}
    names = [name for name in _fitting(resources, preflight.request, preflight.minimum) if "." in name]
    if not names:
        return
    client = preflight.client("ec2")
    response = client.describe_instance_type_offerings(Filters=[{"Name": "instance-type", "Values": names}])
    offered = {offering["InstanceType"] for offering in response["InstanceTypeOfferings"]}
    region = client.meta.region_name
    if offered:
        preflight.findings.ok("region", f"{region} has {', '.join(sorted(offered)[:3])}")
    else:
        preflight.findings.no(
            "region",
            f"{region} has no {', '.join(names[:3])}",
            f"aws ec2 describe-instance-type-offerings --filters Name=instance-type,Values={names[0]}",
        )


def _quota(preflight: _Preflight, item: Mapping[str, Any]) -> None:
    """Check the account's limit on running vCPUs of the machine's family."""
    resources = item.get("computeResources") or {}
    names = [name for name in _fitting(resources, preflight.request, preflight.minimum) if "." in name]
    limits = tables.quotas_of(names[0], spot=resources.get("type") == "SPOT") if names else []
    if not limits:
        return
    if not limits[0].code:
        preflight.findings.unknown("quota", f"the limit that applies to {names[0]} on Spot is unknown")
        return
    limit, vcpu_limit = _limit_of(preflight, limits)
    required = _vcpus(resources, preflight.request, preflight.minimum)
    if vcpu_limit < required:
        preflight.findings.no(
            "quota",
            f"the account's limit is {vcpu_limit:g} vCPUs of {limit.family.upper()} machines; "
            f"the run needs {required}",
            "aws service-quotas request-service-quota-increase --service-code ec2 "
            f"--quota-code {limit.code} --desired-value {required}",
        )
    else:
        preflight.findings.ok("quota", f"{vcpu_limit:g} vCPUs of {limit.family.upper()} machines")


def _limit_of(preflight: _Preflight, limits: list[Quota]) -> tuple[Quota, float]:
    """Return the most specific limit of the account and its vCPUs. Raises ClientError."""
    client = preflight.client("service-quotas")
    for limit in limits[:-1]:
        try:
            response = client.get_service_quota(ServiceCode="ec2", QuotaCode=limit.code)
        except client.exceptions.NoSuchResourceException:
            continue  # only some accounts have a separate limit for P5 on Spot
        return limit, response["Quota"]["Value"]
    response = client.get_service_quota(ServiceCode="ec2", QuotaCode=limits[-1].code)
    return limits[-1], response["Quota"]["Value"]
