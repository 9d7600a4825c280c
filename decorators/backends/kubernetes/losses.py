"""Distinguish disruptions (the cluster took a job's pods away) from failures, by observing the pods.

While a process waits for a step, :func:`observe` records the pods, because a deleted pod cannot be queried
later. After the job failed, :func:`lost` decides::

    DisruptionTarget, or a reason of the kubelet     disrupted, as reported by the API server or the node
    the gang reported that a node was lost           disrupted, unless that node's pod ended by itself
    the gang reported any other cause                failed
    a pod was deleted before any pod failed          disrupted; later deletions are made by the JobSet
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime

from decorators._metaflow import WaitedJob
from decorators.backends import oom_kills, tables
from decorators.backends.interface import GangEnd, Loss
from decorators.backends.kubernetes.waiting import exists, pods_of
from estimator.errors import UserError
from estimator.hardware.cluster.api import ApiRefusedError, ClusterApi, Json, UnreachableError

OBSERVE_EVERY_S = 2.0
ENDING_S = 10.0  # extra seconds after the pods' grace period to observe that they have ended
ENDED = ("Succeeded", "Failed")
# Evictions because of files that the pod itself wrote: three messages of kubelet's eviction manager
_OWN_DISK = re.compile(
    r"ephemeral local storage usage exceeds|exceeded its local ephemeral|Usage of EmptyDir"
)


@dataclass(kw_only=True, slots=True)
class ObservedPod:
    """Last observed state of a pod, and the polls at which it had ended or was gone (0: not yet)."""

    pod: Json
    ended_at_poll: int = 0
    gone_at_poll: int = 0

    @property
    def name(self) -> str:
        return str(self.pod["metadata"]["name"])

    def is_on(self, host: str) -> bool:
        """Whether ``host``, a plain or cluster DNS host name, is the host name of this pod."""
        return host.partition(".")[0] == (self.pod["spec"].get("hostname") or self.name[:63])

    @property
    def phase(self) -> str:
        return str((self.pod.get("status") or {}).get("phase") or "")

    @property
    def cause(self) -> str:
        """Cause of a disruption as reported by the API server or the node; empty if there is none."""
        status = self.pod.get("status") or {}
        for condition in status.get("conditions") or []:
            if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
                return ": ".join(str(condition[key]) for key in ("reason", "message") if condition.get(key))
        reason, message = str(status.get("reason") or ""), str(status.get("message") or "")
        if self.phase != "Failed" or reason not in tables.disruptions() or _OWN_DISK.search(message):
            return ""
        return f"{reason}: {message or tables.disruptions()[reason]}".rstrip(".")

    @property
    def deleted_at(self) -> float | None:
        """Time of the deletion request in seconds since the epoch; None if none was observed."""
        metadata = self.pod["metadata"]
        if not metadata.get("deletionTimestamp"):
            return None
        return _seconds(metadata["deletionTimestamp"]) - float(
            metadata.get("deletionGracePeriodSeconds") or 0
        )

    @property
    def finished_at(self) -> float | None:
        """Time when the container ended; None if it runs or the time is unknown."""
        stamps = [end["finishedAt"] for end in oom_kills.container_ends(self.pod) if end.get("finishedAt")]
        return _seconds(stamps[0]) if stamps else None

    @property
    def is_deleted(self) -> bool:
        """Whether the pod was deleted while it ran."""
        if self.deleted_at is None:
            return bool(self.gone_at_poll) and self.phase not in ENDED
        return self.finished_at is None or self.finished_at >= self.deleted_at

    @property
    def has_failed(self) -> bool:
        """Whether the pod failed by itself."""
        return self.phase == "Failed" and not self.cause and not self.is_deleted

    def was_deleted_before(self, failed: ObservedPod) -> bool:
        """Whether this pod was deleted before the other one failed."""
        if self.deleted_at is not None and failed.finished_at is not None:
            return self.deleted_at <= failed.finished_at
        return self.gone_at_poll < failed.ended_at_poll if self.gone_at_poll else False


@dataclass(slots=True)
class Pods:
    """Observed pods of one job, over the time that a process waits for it."""

    pods: dict[str, ObservedPod] = field(default_factory=dict)
    polls: int = 0
    ending_since: float | None = None  # monotonic time when the job's failure was noticed
    _polled_at: float = 0.0  # monotonic

    def is_time(self) -> bool:
        """Whether it is time for the next observation."""
        return time.monotonic() - self._polled_at >= OBSERVE_EVERY_S

    def note(self, pods: Iterable[Json]) -> None:
        """Record the current pods."""
        self.polls += 1
        self._polled_at = time.monotonic()
        current = {str(pod["metadata"]["name"]): pod for pod in pods}
        for name, pod in current.items():
            observed = self.pods.setdefault(name, ObservedPod(pod=pod))
            observed.pod = pod
            if observed.phase in ENDED and not observed.ended_at_poll:
                observed.ended_at_poll = self.polls
        for name, observed in self.pods.items():
            if name not in current and not observed.gone_at_poll:
                observed.gone_at_poll = self.polls


def judge(pods: Iterable[ObservedPod], gang_end: GangEnd | None) -> Loss | None:
    """Return what the cluster took away; None if the job failed by itself."""
    pods = list(pods)
    if oom_kills.in_pods(pod.pod for pod in pods):
        return None
    if disrupted := [pod for pod in pods if pod.cause]:
        return Loss(lines=tuple(_line(pod, pod.cause) for pod in disrupted))
    failed = [pod for pod in pods if pod.has_failed]
    deleted = [pod for pod in pods if pod.is_deleted]
    if gang_end is not None and gang_end.is_loss:
        pods_of_node = [pod for pod in pods if pod.is_on(gang_end.host)]
        if any(pod in failed for pod in pods_of_node):
            return None
        kind = "deleted" if gang_end.kind == "left" else "lost"
        lost_pods = (
            [pod for pod in pods_of_node if pod in deleted] if gang_end.kind == "left" else pods_of_node
        )
        lines = tuple(_line(pod, kind) for pod in lost_pods or deleted)
        return Loss(lines=lines or (f"node {gang_end.host}: {kind}",))
    if gang_end is not None:
        return None
    first = [pod for pod in deleted if all(pod.was_deleted_before(other) for other in failed)]
    return Loss(lines=tuple(_line(pod, "deleted") for pod in first)) if first else None


_pods: dict[str, Pods] = {}  # by the job's name


def observe(job: WaitedJob) -> None:
    """Record the job's current pods; does nothing while the API is unavailable."""
    if job.backend != "kubernetes":
        return
    pods = _pods.setdefault(job.name, Pods())
    if pods.is_time():
        _note(job, pods)


def lost(job: WaitedJob, read_gang_end: Callable[[], GangEnd | None]) -> Loss | None:
    """Return what the cluster took away from a failed job; None if nothing, or if someone deleted it.

    Waits until the job's pods have ended.
    """
    while not has_ended(job, gang_end := read_gang_end()):
        time.sleep(1)
    pods = _pods.setdefault(job.name, Pods())
    if not _note(job, pods, require_job=True):
        return None
    return judge(pods.pods.values(), gang_end)


def has_ended(job: WaitedJob, gang_end: GangEnd | None) -> bool:
    """Whether all pods of a failed job have ended, except on a lost node.

    Pods may still be storing a checkpoint or the cause of the gang's end.
    """
    pods = _pods.setdefault(job.name, Pods())
    _note(job, pods)
    pods.ending_since = pods.ending_since or time.monotonic()
    graces = [pod.pod["spec"].get("terminationGracePeriodSeconds") or 0 for pod in pods.pods.values()]
    if time.monotonic() - pods.ending_since > max(graces, default=0) + ENDING_S:
        return True
    remaining = [pod for pod in pods.pods.values() if not pod.gone_at_poll and pod.phase not in ENDED]
    return all(
        gang_end is not None and gang_end.kind == "node" and pod.is_on(gang_end.host) for pod in remaining
    )


def _note(job: WaitedJob, pods: Pods, *, require_job: bool = False) -> bool:
    """Record the job's pods; return whether the API responded and, if required, the job still exists."""
    try:
        with ClusterApi() as api:
            if require_job and not exists(api, job):
                return False
            pods.note(pods_of(api, job))
    except (ApiRefusedError, UnreachableError, UserError):
        return False
    return True


def _line(pod: ObservedPod, cause: str) -> str:
    return f"pod {pod.name} on {pod.pod['spec'].get('nodeName') or 'no node'}: {cause}"


def _seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()
