"""Before anything is submitted: could this AWS Batch queue ever run that request?"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
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
from estimator.formatting import format_bytes
from estimator.hardware.cluster.api import Clock
from estimator.plan import MIB, Request

INFRA = "infra/aws makes queues by GPU type, and environments for several nodes"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSettings:
    """Settings of the job that Metaflow will submit, in addition to its size."""

    queue: str | None = None
    image: str | None = None
    iam_role: str | None = None

    @classmethod
    def of(cls, step_request: StepRequest) -> JobSettings:
        """From the values of the step's ``@batch``; the GPU's queue, where the user has named none there."""
        values = step_request.configured
        queue = (
            values.get("queue")
            if "queue" in step_request.given
            else step_request.options.queue_for(step_request.request.gpu_type)
        )
        return cls(
            queue=queue or values.get("queue"), image=values.get("image"), iam_role=values.get("iam_role")
        )


@dataclass(kw_only=True, slots=True)
class _Preflight:
    """State of one check of the queue: what is asked for, the AWS clients, and the rows so far."""

    client: Callable[[str], Any]
    request: Request
    minimum: MinimumRequest
    findings: Findings
    clock: Clock


def check_queue(step_request: StepRequest) -> ClusterFacts:
    """Raise UserError where the queue could never take the request; it tells nothing that would be asked for.

    A queue is asked once by each process, for the run's largest step.
    """
    facts = refuse_local_metadata(step_request)
    if step_request.may_ask and not step_request.beside:
        _check_once(step_request.request, JobSettings.of(step_request), step_request.minimum)
    return facts


@lru_cache(maxsize=4)
def _check_once(request: Request, job: JobSettings, minimum: MinimumRequest | None) -> None:
    inspect(request, job=job, minimum=minimum).settle()


def inspect(
    request: Request, *, job: JobSettings, minimum: MinimumRequest | None = None, clock: Clock | None = None
) -> Findings:
    """All rows of the preflight. Raises UserError where AWS cannot be asked at all, or no queue is named."""
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
        able = [item for item in environments if _environment(preflight, item)]
        if environments and not able:
            _none_able(preflight)
        for item in able:
            _ask(preflight, "region", partial(_offered, preflight, item))
            _ask(preflight, "quota", partial(_quota, preflight, item))
    if not job.iam_role:
        preflight.findings.unknown(
            "role",
            "no IAM role is named for the jobs: they can't read S3",
            "METAFLOW_ECS_S3_ACCESS_IAM_ROLE=ARN",
        )
    images.check(job.image, preflight.findings, preflight.clock, gpus=bool(request.gpus_per_node))
    return preflight.findings


def _call(preflight: _Preflight, ask: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]] | None:
    """One question that everything hangs on; UserError in one line where there is no answer."""
    try:
        return aws.ask(ask)
    except aws.NotToldError as error:
        preflight.findings.unknown("queue", f"not told: {error}")
        return None


def _ask(preflight: _Preflight, check: str, ask: Callable[[], None]) -> None:
    """A question that may go without answer."""
    from botocore.exceptions import BotoCoreError, ClientError

    if preflight.clock.left() <= 0:
        preflight.findings.unknown(check, "not asked: the time for asking is over")
        return
    try:
        ask()
    except (BotoCoreError, ClientError, KeyError) as error:
        preflight.findings.unknown(check, f"not told: {failure_of(error).code}")


def _any_queue(preflight: _Preflight) -> dict[str, Any] | None:
    """The queue that Metaflow takes where none is named."""
    queues = _call(preflight, lambda: aws.queues(preflight.client("batch")))
    if queues is None:
        return None
    queue = next((queue for queue in queues if not aws.unusable(queue)), None)
    fix = "--queue NAME, resources.queues by GPU type in the settings, or METAFLOW_BATCH_JOB_QUEUE=NAME"
    if queue is None:
        preflight.findings.no("queue", "none is named, and the region has none that is enabled", fix)
        return None
    preflight.findings.unknown("queue", f"none is named: Metaflow takes {queue['jobQueueName']}", fix)
    return queue


def _queue(preflight: _Preflight, name: str) -> dict[str, Any] | None:
    client = preflight.client("batch")
    queues = _call(preflight, lambda: aws.queues(client, name))
    if queues is None:
        return None
    if not queues:
        every = _call(preflight, lambda: aws.queues(client)) or []
        names = ", ".join(item["jobQueueName"] for item in every[:5])
        region = client.meta.region_name
        preflight.findings.no(
            "queue",
            f"there is none of that name in {region}",
            f"--queue {' or '.join(names.split(', '))}" if names else INFRA,
        )
        return None
    queue = queues[0]
    if reason := aws.unusable(queue):
        preflight.findings.no(
            "queue",
            f"it is {reason}",
            f"aws batch update-job-queue --job-queue {queue['jobQueueName']} --state ENABLED",
        )
        return None
    preflight.findings.ok("queue", f"ENABLED, {queue['status']}")
    return queue


def _environments(preflight: _Preflight, queue: Mapping[str, Any]) -> list[dict[str, Any]]:
    if not queue.get("computeEnvironmentOrder"):
        preflight.findings.no("compute environment", "the queue has none", INFRA)
    return _call(preflight, lambda: aws.environments(preflight.client("batch"), queue)) or []


def _environment(preflight: _Preflight, item: Mapping[str, Any]) -> bool:
    """Add the row of one compute environment; whether it could take the request."""
    name, why = item["computeEnvironmentName"], _refusal(preflight, item)
    if why is None:
        fitting = _fitting(item.get("computeResources") or {}, preflight.request, preflight.minimum)
        what = ", ".join(fitting[:3]) if fitting else "machines that the instance table lacks"
        preflight.findings.ok("compute environment", f"{name}: {what}")
        return True
    # One of several that can't is no fault yet
    preflight.findings.unknown("compute environment", f"{name}: {why}")
    return False


def _refusal(preflight: _Preflight, item: Mapping[str, Any]) -> str | None:
    """Return the reason why this compute environment can never take the request; None if it can."""
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
    if not _fitting(resources, request, minimum) and not _untold(resources, request):
        has = ", ".join(resources.get("instanceTypes") or []) or "no instance types"
        machine = request.gpus if request.gpus_per_node else "machine"
        return f"{has}: none has {machine}, {minimum.cpu:g} vCPUs, {format_bytes(minimum.memory_bytes)}"
    most = resources.get("maxvCpus")
    needed = _vcpus(resources, request, minimum)
    if most is not None and most < needed:
        return f"maxvCpus is {most}, {request.nodes} node(s) need {needed}"
    return None


def _none_able(preflight: _Preflight) -> None:
    request = preflight.request
    what = f"{request.nodes} node(s) of {request.gpus}" if request.gpus_per_node else "the step"
    rows = [row.found for row in preflight.findings.rows if row.check == "compute environment"]
    preflight.findings.no("compute environment", f"none can take {what} ({'; '.join(rows)})", INFRA)


def _fitting(resources: Mapping[str, Any], request: Request, minimum: MinimumRequest) -> list[str]:
    """Machine types of the instance table that the environment may start, and that are large enough."""
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


def _untold(resources: Mapping[str, Any], request: Request) -> bool:
    """Whether it may start machines of which the table, that is of GPUs, says nothing."""
    known = [item.name for item in hardware.current().instances if item.cloud == "aws"]
    others = [name for name in aws.allowed(resources) if not any(aws.matches(item, name) for item in known)]
    return any(not request.gpus_per_node or re.match(r"[pg]\d", name) for name in others)


def _vcpus(resources: Mapping[str, Any], request: Request, minimum: MinimumRequest) -> int:
    """vCPUs of the machines that the run takes: whole ones count."""
    sizes = [hardware.current().find_instance(name) for name in _fitting(resources, request, minimum)]
    known = [item.vcpu for item in sizes if item is not None and item.vcpu]
    return request.nodes * (min(known) if known else request.cpu)


def _offered(preflight: _Preflight, item: Mapping[str, Any]) -> None:
    """Whether the region has the machine type."""
    resources = item.get("computeResources") or {}
    names = [name for name in _fitting(resources, preflight.request, preflight.minimum) if "." in name]
    if not names:
        return
    client = preflight.client("ec2")
    answer = client.describe_instance_type_offerings(Filters=[{"Name": "instance-type", "Values": names}])
    offered = {offering["InstanceType"] for offering in answer["InstanceTypeOfferings"]}
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
    """The account's limit on running vCPUs of the machine's family."""
    resources = item.get("computeResources") or {}
    names = [name for name in _fitting(resources, preflight.request, preflight.minimum) if "." in name]
    limits = tables.quotas_of(names[0], spot=resources.get("type") == "SPOT") if names else []
    if not limits:
        return
    if not limits[0].code:
        preflight.findings.unknown("quota", f"which limit counts {names[0]} on Spot is not known")
        return
    limit, most = _limit_of(preflight, limits)
    needed = _vcpus(resources, preflight.request, preflight.minimum)
    if most < needed:
        preflight.findings.no(
            "quota",
            f"the account may run {most:g} vCPUs of {limit.family.upper()} machines, {needed} are needed",
            "aws service-quotas request-service-quota-increase --service-code ec2 "
            f"--quota-code {limit.code} --desired-value {needed}",
        )
    else:
        preflight.findings.ok("quota", f"{most:g} vCPUs of {limit.family.upper()} machines")


def _limit_of(preflight: _Preflight, limits: list[Quota]) -> tuple[Quota, float]:
    """The narrowest limit that the account has, and its vCPUs. Raises ClientError."""
    client = preflight.client("service-quotas")
    for limit in limits[:-1]:
        try:
            answer = client.get_service_quota(ServiceCode="ec2", QuotaCode=limit.code)
        except client.exceptions.NoSuchResourceException:
            continue  # P5 on Spot has a limit of its own in some accounts only
        return limit, answer["Quota"]["Value"]
    answer = client.get_service_quota(ServiceCode="ec2", QuotaCode=limits[-1].code)
    return limits[-1], answer["Quota"]["Value"]
