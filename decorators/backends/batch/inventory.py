"""Inventory for planning: machines that the compute environments of a run's queues can start."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from decorators.backends.batch import aws
from decorators.backends.interface import Destination
from estimator import hardware
from estimator.errors import UserError
from estimator.hardware import Instance
from estimator.hardware.cluster import Cluster, ClusterNodes, SkippedNodes


def read(destination: Destination) -> Cluster:
    """Read the inventory from AWS. Raises UserError if AWS cannot be reached or no usable queue is known.

    If queues are configured per GPU type, each queue contributes only machines with its GPU.
    """
    client = aws.clients()("batch")
    nodes: list[ClusterNodes] = []
    skipped: list[SkippedNodes] = []
    queues = _queues(destination, client)
    for queue, gpus in queues.items():
        for environment in _environments(client, queue):
            refused = _refusal(environment)
            if refused is not None:
                skipped.append(SkippedNodes(reason=refused, names=(environment["computeEnvironmentName"],)))
                continue
            nodes += [item for item in _machines(environment) if gpus is None or item.gpu.name in gpus]
    names = f"queue{'s' if len(queues) > 1 else ''} {', '.join(queues)}"
    return Cluster(
        context=", ".join(queues),
        nodes=tuple(nodes),
        skipped=tuple(skipped),
        name=f"AWS Batch {names}",
        spot_queues=() if any(item.spot for item in nodes) else _spot_queues(client, queues),
    )


def _spot_queues(client: Any, used: Collection[str]) -> tuple[str, ...]:
    """Return other enabled queues with a compute environment of type SPOT; empty if they cannot be listed."""
    try:
        queues = [queue for queue in _query(lambda: aws.queues(client)) if not aws.unusable(queue)]
        environments = _query(lambda: list(client.describe_compute_environments()["computeEnvironments"]))
    except UserError:
        return ()
    spot = {
        environment["computeEnvironmentArn"]
        for environment in environments
        if (environment.get("computeResources") or {}).get("type") == "SPOT" and not aws.unusable(environment)
    }
    return tuple(
        queue["jobQueueName"]
        for queue in queues
        if queue["jobQueueName"] not in used
        and any(item["computeEnvironment"] in spot for item in queue.get("computeEnvironmentOrder") or [])
    )


def _queues(destination: Destination, client: Any) -> dict[str, frozenset[str] | None]:
    """Return the queues that the run may use, each with its GPU names; None means any GPU."""
    options, configured = destination.options, destination.configured.get("queue")
    user_queue = destination.user_values.get("queue")
    if user_queue is not None or options.queue:
        return {str(user_queue.value if user_queue is not None else options.queue): None}
    by_queue: dict[str, set[str]] = {}
    for gpu, queue in options.queues:
        by_queue.setdefault(queue, set()).add(hardware.gpu(gpu).name)
    if by_queue:
        gpus_by_queue: dict[str, frozenset[str] | None] = {
            queue: frozenset(gpus) for queue, gpus in by_queue.items()
        }
        other_gpus = frozenset(gpu.name for gpu in hardware.gpus()) - {
            g for gpus in by_queue.values() for g in gpus
        }
        return (
            {**gpus_by_queue, configured: other_gpus}
            if configured and configured not in gpus_by_queue
            else gpus_by_queue
        )
    if configured:
        return {str(configured): None}
    enabled = [queue for queue in _query(lambda: aws.queues(client)) if not aws.unusable(queue)]
    if not enabled:  # otherwise Metaflow uses the first one
        raise UserError(
            "No AWS Batch queue is named, and the region has no enabled queue.",
            "Name a queue: --queue NAME, or METAFLOW_BATCH_JOB_QUEUE=NAME",
        )
    return {str(enabled[0]["jobQueueName"]): None}


def _environments(client: Any, queue: str) -> list[dict[str, Any]]:
    queues = _query(lambda: aws.queues(client, queue))
    if not queues:
        raise UserError(
            f"There is no AWS Batch queue {queue} in {client.meta.region_name}.",
            "List the queues: aws batch describe-job-queues",
        )
    return _query(lambda: aws.environments(client, queues[0]))


def _query(question: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    try:
        return aws.query(question)
    except aws.RefusedError as error:
        raise UserError(f"AWS denied the query: {error}") from None


def _refusal(environment: Mapping[str, Any]) -> str | None:
    """Return why planning cannot use a compute environment; None if it can."""
    if reason := aws.unusable(environment):
        return reason
    kind = (environment.get("computeResources") or {}).get("type", "")
    if environment.get("type") == "UNMANAGED":
        return "UNMANAGED: its machines are unknown"
    return f"{kind} has no GPUs" if kind.startswith("FARGATE") else None


def _machines(environment: Mapping[str, Any]) -> Iterator[ClusterNodes]:
    """Yield the GPU machines that an environment may start, with counts from its vCPU limit.

    On Spot the count is 1, because Batch runs no multi-node jobs there.
    """
    resources = environment.get("computeResources") or {}
    patterns, vcpu_limit = aws.allowed(resources), resources.get("maxvCpus")
    spot = resources.get("type") == "SPOT"
    for item in hardware.instances():
        vcpu = item.vcpu
        if item.cloud != "aws" or not item.gpu_count or not vcpu or item.ram_bytes is None:
            continue
        count = 1 if spot else None if vcpu_limit is None else int(vcpu_limit) // vcpu
        if any(aws.matches(item.name, pattern) for pattern in patterns) and (
            vcpu_limit is None or vcpu_limit >= vcpu
        ):
            yield _machine(item, count, spot, environment["computeEnvironmentName"])


def _machine(item: Instance, count: int | None, spot: bool, environment: str) -> ClusterNodes:
    return ClusterNodes(
        instance=item,
        gpu=hardware.gpu(item.gpu),
        count=0,
        cpu=item.vcpu or 0,
        memory_bytes=item.ram_bytes or 0,  # a plan requests only part of it
        ephemeral_bytes=None,
        efa=1 if "EFA" in item.fabric else 0,
        spot=spot,
        zones=(),
        taints=(),
        names=(),
        max_new_nodes=count,
        added_by=f"compute environment {environment}",
    )
