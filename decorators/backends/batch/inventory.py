"""Machines that the compute environments of a run's queues can start, for planning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from decorators.backends.batch import aws
from decorators.backends.interface import Destination
from estimator import hardware
from estimator.errors import UserError
from estimator.hardware import Instance
from estimator.hardware.cluster import Aside, Cluster, ClusterNodes


def read(destination: Destination) -> Cluster:
    """Ask AWS. Raises UserError where it cannot be asked, or has no queue that is known here.

    Which machines a queue's GPUs may be: where queues are named by GPU, each gives its own GPU only.
    """
    client = aws.clients()("batch")
    nodes: list[ClusterNodes] = []
    aside: list[Aside] = []
    queues = _queues(destination, client)
    for queue, gpus in queues.items():
        for environment in _environments(client, queue):
            refused = _refusal(environment)
            if refused is not None:
                aside.append(Aside(reason=refused, names=(environment["computeEnvironmentName"],)))
                continue
            nodes += [item for item in _machines(environment) if gpus is None or item.gpu.name in gpus]
    names = f"queue{'s' if len(queues) > 1 else ''} {', '.join(queues)}"
    return Cluster(
        context=", ".join(queues), nodes=tuple(nodes), aside=tuple(aside), name=f"AWS Batch {names}"
    )


def _queues(destination: Destination, client: Any) -> dict[str, frozenset[str] | None]:
    """The queues that the run may go to, and the GPUs that each is for; None: any."""
    options, configured = destination.options, destination.configured.get("queue")
    own = destination.given.get("queue")
    if own is not None or options.queue:
        return {str(own.value if own is not None else options.queue): None}
    by_queue: dict[str, set[str]] = {}
    for gpu, queue in options.queues:
        by_queue.setdefault(queue, set()).add(hardware.gpu(gpu).name)
    if by_queue:
        found: dict[str, frozenset[str] | None] = {queue: frozenset(gpus) for queue, gpus in by_queue.items()}
        others = frozenset(gpu.name for gpu in hardware.gpus()) - {
            g for gpus in by_queue.values() for g in gpus
        }
        return {**found, configured: others} if configured and configured not in found else found
    if configured:
        return {str(configured): None}
    usable = [queue for queue in _told(lambda: aws.queues(client)) if not aws.unusable(queue)]
    if not usable:  # Metaflow would take the first
        raise UserError(
            "No AWS Batch queue is named, and the region has none that is enabled.",
            "--queue NAME, or METAFLOW_BATCH_JOB_QUEUE=NAME",
        )
    return {str(usable[0]["jobQueueName"]): None}


def _environments(client: Any, queue: str) -> list[dict[str, Any]]:
    queues = _told(lambda: aws.queues(client, queue))
    if not queues:
        raise UserError(
            f"There is no AWS Batch queue {queue} in {client.meta.region_name}.",
            "aws batch describe-job-queues lists those that there are.",
        )
    return _told(lambda: aws.environments(client, queues[0]))


def _told(question: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    try:
        return aws.ask(question)
    except aws.NotToldError as error:
        raise UserError(f"AWS doesn't tell: {error}") from None


def _refusal(environment: Mapping[str, Any]) -> str | None:
    """Return the reason why a compute environment cannot be planned with; None if it can."""
    if reason := aws.unusable(environment):
        return reason
    kind = (environment.get("computeResources") or {}).get("type", "")
    if environment.get("type") == "UNMANAGED":
        return "UNMANAGED: its machines are not told"
    return f"{kind} has no GPUs" if kind.startswith("FARGATE") else None


def _machines(environment: Mapping[str, Any]) -> Iterator[ClusterNodes]:
    """The machines with GPUs that it may start, as many as its vCPUs allow; on Spot one, as Batch has it."""
    resources = environment.get("computeResources") or {}
    patterns, most = aws.allowed(resources), resources.get("maxvCpus")
    spot = resources.get("type") == "SPOT"
    for item in hardware.instances():
        vcpu = item.vcpu
        if item.cloud != "aws" or not item.gpu_count or not vcpu or item.ram_bytes is None:
            continue
        count = 1 if spot else None if most is None else int(most) // vcpu
        if any(aws.matches(item.name, pattern) for pattern in patterns) and (most is None or most >= vcpu):
            yield _machine(item, count, spot, environment["computeEnvironmentName"])


def _machine(item: Instance, count: int | None, spot: bool, environment: str) -> ClusterNodes:
    return ClusterNodes(
        instance=item,
        gpu=hardware.gpu(item.gpu),
        count=0,
        cpu=item.vcpu or 0,
        memory_bytes=item.ram_bytes or 0,  # of which a plan asks for a part only
        ephemeral_bytes=None,
        efa=1 if "EFA" in item.fabric else 0,
        spot=spot,
        zones=(),
        taints=(),
        names=(),
        may_come=count,
        added_by=f"compute environment {environment}",
    )
