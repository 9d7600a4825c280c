"""Job queues, containers and jobs as in AWS Batch."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from tests.lab.batch_model import Invalid
from tests.lab.pods import Pod

REGION = "us-east-1"
OUT_OF_MEMORY = "OutOfMemoryError: Container killed due to memory usage"  # ECS's words
Record = dict[str, Any]


def arn(kind: str, name: str) -> str:
    return f"arn:aws:batch:{REGION}:123456789012:{kind}/{name}"


def now() -> int:
    """Return the time in milliseconds."""
    return int(time.time() * 1000)


@dataclass(kw_only=True)
class Queue:
    """A job queue, its compute environment, and the machines in it."""

    name: str
    vcpus: int = 96
    memory_mib: int = 1_152_000
    gpus: int = 8
    instance_types: tuple[str, ...] = ("p4d.24xlarge",)
    kind: str = "EC2"
    max_vcpus: int = 256
    enabled: bool = True

    def describe(self) -> Record:
        return {
            "jobQueueName": self.name,
            "jobQueueArn": arn("job-queue", self.name),
            "state": "ENABLED" if self.enabled else "DISABLED",
            "status": "VALID",
            "priority": 1,
            "computeEnvironmentOrder": [
                {"order": 1, "computeEnvironment": arn("compute-environment", self.name)}
            ],
        }

    def describe_environment(self) -> Record:
        return {
            "computeEnvironmentName": self.name,
            "computeEnvironmentArn": arn("compute-environment", self.name),
            "type": "MANAGED",
            "state": "ENABLED",
            "status": "VALID",
            "computeResources": {
                "type": self.kind,
                "minvCpus": 0,
                "desiredvCpus": 0,
                "maxvCpus": self.max_vcpus,
                "instanceTypes": list(self.instance_types),
                "subnets": ["subnet-1"],
                "securityGroupIds": ["sg-1"],
            },
        }

    def lacks(self, nodes: list[Container]) -> str | None:
        """Return the reason why these nodes can never start, as worded by Batch, or None."""
        too_big = any(
            node.number("VCPU") > self.vcpus
            or node.number("MEMORY") > self.memory_mib
            or node.number("GPU") > self.gpus
            for node in nodes
        )
        if too_big or sum(node.number("VCPU") for node in nodes) > self.max_vcpus:
            return (
                "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT - The job resource requirement (vCPU/memory/GPU) "
                "is higher than that can be met by the CE(s) attached to the job queue."
            )
        return None


@dataclass(frozen=True, kw_only=True)
class Container:
    """The container of one node: properties of the definition with the submitted overrides."""

    properties: Record
    override: Record

    @property
    def command(self) -> tuple[str, ...]:
        return tuple(self.override.get("command") or self.properties["command"])

    @property
    def environment(self) -> dict[str, str]:
        both = [*self.properties.get("environment", []), *self.override.get("environment", [])]
        return {variable["name"]: variable["value"] for variable in both}

    def number(self, kind: str) -> float:
        """Return the request of VCPU, MEMORY (MiB) or GPU."""
        both = [
            *self.properties.get("resourceRequirements", []),
            *self.override.get("resourceRequirements", []),
        ]
        return next(
            (float(dependency["value"]) for dependency in reversed(both) if dependency["type"] == kind), 0.0
        )

    def sizes(self) -> tuple[int | None, dict[str, int | None]]:
        """Return the bytes of /dev/shm and of each tmpfs."""
        linux = self.properties.get("linuxParameters", {})
        shared = linux.get("sharedMemorySize")
        tmpfs = {each["containerPath"]: each["size"] * 2**20 for each in linux.get("tmpfs", [])}
        return (shared * 2**20 if shared else None), dict(tmpfs)


@dataclass(kw_only=True)
class Job:
    """One submitted job. ``nodes`` has one container per node."""

    id: str
    request: Record
    definition: Record
    nodes: list[Container]
    status: str = "SUBMITTED"
    reason: str | None = None
    created: int = field(default_factory=now)
    started: int | None = None
    stopped: int | None = None
    pods: list[Pod] = field(default_factory=list)
    stop: str | None = None  # the reason given to TerminateJob
    lost: dict[int, str] = field(default_factory=dict)  # by node, why its machine is gone

    @property
    def multinode(self) -> bool:
        return "nodeProperties" in self.definition

    def lose_machine(self, node: int) -> None:
        """End the container without a message, as when a spot machine is reclaimed."""
        self.lost[node] = f"Host EC2 (instance i-{self.id[:8]}{node}) terminated."
        self.pods[node].kill()

    def describe(self, node: int | None = None) -> Record:
        """Return the job as DescribeJobs; ``node``: of one node of a multi-node job, with id ``ID#node``."""
        record: Record = {
            "jobId": self.id if node is None else f"{self.id}#{node}",
            "jobName": self.request["jobName"],
            "jobQueue": arn("job-queue", self.request["jobQueue"]),
            "jobDefinition": self.request["jobDefinition"],
            "parameters": self.request.get("parameters", {}),
            "tags": self.request.get("tags", {}),
            "status": self.status,
            "createdAt": self.created,
            "statusReason": self.lost.get(node or 0, self.reason),
            "startedAt": self.started or 0,  # the model says that it is always there
            "stoppedAt": self.stopped,
            "attempts": [],
        }
        if self.multinode and node is None:
            record["nodeProperties"] = self.definition["nodeProperties"]
        else:
            record["container"] = {"command": list(self.nodes[node or 0].command), **self._ended(node or 0)}
        if self.stopped is not None:
            record["attempts"] = [{"container": self._ended(node or 0), "statusReason": self.reason}]
        if node is not None:
            record["nodeDetails"] = {"nodeIndex": node, "isMainNode": node == 0}
        return {name: value for name, value in record.items() if value is not None}

    def _ended(self, node: int) -> Record:
        record: Record = {}
        ended = self.pods[node].poll() if node < len(self.pods) else None
        if ended is not None:
            record["exitCode"] = ended.code
            if ended.reason == "OOMKilled":
                record["reason"] = OUT_OF_MEMORY
        return record


def nodes_of(definition: Record, body: Record) -> list[Container]:
    """Return the container of each node; raises Invalid if request and definition do not match."""
    if "nodeProperties" not in definition:
        if "nodeOverrides" in body:
            raise Invalid("nodeOverrides should not be provided for a container job")
        override = body.get("containerOverrides", {})
        return [Container(properties=definition["containerProperties"], override=override)]
    if "containerOverrides" in body:
        raise Invalid("containerOverrides should not be provided for a multi-node parallel job")
    properties = definition["nodeProperties"]
    ranges = {each["targetNodes"]: each["container"] for each in properties["nodeRangeProperties"]}
    nodes: list[Container | None] = [None] * properties["numNodes"]
    overrides = {
        each["targetNodes"]: each["containerOverrides"]
        for each in body.get("nodeOverrides", {}).get("nodePropertyOverrides", [])
    }
    if unknown := set(overrides) - set(ranges):
        raise Invalid(f"targetNodes {', '.join(sorted(unknown))} are not in the job definition")
    for target, container in ranges.items():
        first, _, last = target.partition(":")
        for number in range(int(first), int(last or len(nodes) - 1) + 1):
            nodes[number] = Container(properties=container, override=overrides.get(target, {}))
    if None in nodes:
        raise Invalid("the node ranges don't cover all nodes")
    return [node for node in nodes if node is not None]
