"""Has the cluster taken a job's pods away, or have they failed? Judged by what was seen of them.

While the process that waits for a step does so, :func:`look` notes the pods, as one that was deleted leaves
nothing to be asked for. :func:`lost` is the judgement, once the job has failed::

    DisruptionTarget, a reason of the kubelet's      taken away: the API server or the node says so
    the gang's last words: a node was lost           taken away, unless that node's pod has ended by itself
    the gang's last words: anything else             failed
    a pod deleted before any has failed              taken away; those that follow are the JobSet's doing
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime

from decorators._metaflow import WaitedJob
from decorators.backends import oom_kills, tables
from decorators.backends.interface import LastWords, Loss
from decorators.backends.kubernetes.waiting import exists, pods_of
from estimator.errors import UserError
from estimator.hardware.cluster.api import ApiRefusedError, ClusterApi, Json, UnreachableError

LOOK_EVERY_S = 2.0
ENDING_S = 10.0  # that pods have to be seen as ended, beyond their grace
ENDED = ("Succeeded", "Failed")
# Evicted for what the pod itself has written: kubelet's eviction manager, its three messages
_OWN_DISK = re.compile(
    r"ephemeral local storage usage exceeds|exceeded its local ephemeral|Usage of EmptyDir"
)


@dataclass(kw_only=True, slots=True)
class Seen:
    """A pod as it was last seen, and at which look it had ended or was gone (0: neither)."""

    pod: Json
    ended: int = 0
    gone: int = 0

    @property
    def name(self) -> str:
        return str(self.pod["metadata"]["name"])

    def is_on(self, host: str) -> bool:
        """Whether a process that calls its host so runs in it: by its name alone, or in the cluster's DNS."""
        return host.partition(".")[0] == (self.pod["spec"].get("hostname") or self.name[:63])

    @property
    def phase(self) -> str:
        return str((self.pod.get("status") or {}).get("phase") or "")

    @property
    def cause(self) -> str:
        """Reason by the API server or the node; empty if there is none."""
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
        """Time of the deletion request in seconds since the epoch; None if there was none or it was not
        seen.
        """
        metadata = self.pod["metadata"]
        if not metadata.get("deletionTimestamp"):
            return None
        return _seconds(metadata["deletionTimestamp"]) - float(
            metadata.get("deletionGracePeriodSeconds") or 0
        )

    @property
    def finished_at(self) -> float | None:
        """Time of the container's end; None if it is running or unknown."""
        stamps = [end["finishedAt"] for end in oom_kills.endings(self.pod) if end.get("finishedAt")]
        return _seconds(stamps[0]) if stamps else None

    @property
    def is_deleted(self) -> bool:
        """Whether it was deleted while it ran."""
        if self.deleted_at is None:
            return bool(self.gone) and self.phase not in ENDED
        return self.finished_at is None or self.finished_at >= self.deleted_at

    @property
    def has_failed(self) -> bool:
        """Whether it has failed by itself."""
        return self.phase == "Failed" and not self.cause and not self.is_deleted

    def came_before(self, failed: Seen) -> bool:
        """Whether this deletion came before that failure."""
        if self.deleted_at is not None and failed.finished_at is not None:
            return self.deleted_at <= failed.finished_at
        return self.gone < failed.ended if self.gone else False


@dataclass(slots=True)
class Pods:
    """The pods of one job, over the time that it is waited for."""

    seen: dict[str, Seen] = field(default_factory=dict)
    looks: int = 0
    ending_since: float | None = None  # monotonic: when it was known that the job has failed
    _looked_at: float = 0.0  # monotonic

    def is_time(self) -> bool:
        """Whether to look again."""
        return time.monotonic() - self._looked_at >= LOOK_EVERY_S

    def note(self, pods: Iterable[Json]) -> None:
        """Take in what there is now."""
        self.looks += 1
        self._looked_at = time.monotonic()
        there = {str(pod["metadata"]["name"]): pod for pod in pods}
        for name, pod in there.items():
            known = self.seen.setdefault(name, Seen(pod=pod))
            known.pod = pod
            if known.phase in ENDED and not known.ended:
                known.ended = self.looks
        for name, known in self.seen.items():
            if name not in there and not known.gone:
                known.gone = self.looks


def judge(seen: Iterable[Seen], words: LastWords | None) -> Loss | None:
    """Return the loss; None if the job failed by itself."""
    pods = list(seen)
    if oom_kills.in_pods(each.pod for each in pods):
        return None
    if told := [each for each in pods if each.cause]:
        return Loss(lines=tuple(_line(each, each.cause) for each in told))
    failed = [each for each in pods if each.has_failed]
    deleted = [each for each in pods if each.is_deleted]
    if words is not None and words.is_loss:
        of_node = [each for each in pods if each.is_on(words.host)]
        if any(each in failed for each in of_node):
            return None
        how = "deleted" if words.kind == "left" else "lost"
        found = [each for each in of_node if each in deleted] if words.kind == "left" else of_node
        lines = tuple(_line(each, how) for each in found or deleted)
        return Loss(lines=lines or (f"node {words.host}: {how}",))
    if words is not None:
        return None
    first = [each for each in deleted if all(each.came_before(other) for other in failed)]
    return Loss(lines=tuple(_line(each, "deleted") for each in first)) if first else None


_pods: dict[str, Pods] = {}  # by the job's name


def look(job: WaitedJob) -> None:
    """Note the job's pods as they are; while the API doesn't answer nothing is noted."""
    if job.backend != "kubernetes":
        return
    pods = _pods.setdefault(job.name, Pods())
    if pods.is_time():
        _note(job, pods)


def lost(job: WaitedJob, last_words: Callable[[], LastWords | None]) -> Loss | None:
    """Return what the cluster took away from a failed job; None if nothing, or if someone deleted it.

    Waits until its pods have ended.
    """
    while not has_ended(job, words := last_words()):
        time.sleep(1)
    pods = _pods.setdefault(job.name, Pods())
    if not _note(job, pods, of_existing=True):
        return None
    return judge(pods.seen.values(), words)


def has_ended(job: WaitedJob, words: LastWords | None) -> bool:
    """Whether no pod of a job that has failed runs any more, a lost node's left out.

    Its pods may still be storing a checkpoint, or about to say how the gang has ended.
    """
    pods = _pods.setdefault(job.name, Pods())
    _note(job, pods)
    pods.ending_since = pods.ending_since or time.monotonic()
    graces = [each.pod["spec"].get("terminationGracePeriodSeconds") or 0 for each in pods.seen.values()]
    if time.monotonic() - pods.ending_since > max(graces, default=0) + ENDING_S:
        return True
    left = [each for each in pods.seen.values() if not each.gone and each.phase not in ENDED]
    return all(words is not None and words.kind == "node" and each.is_on(words.host) for each in left)


def _note(job: WaitedJob, pods: Pods, *, of_existing: bool = False) -> bool:
    """Whether the API server has answered, and with ``of_existing`` has the job still."""
    try:
        with ClusterApi() as api:
            if of_existing and not exists(api, job):
                return False
            pods.note(pods_of(api, job))
    except (ApiRefusedError, UnreachableError, UserError):
        return False
    return True


def _line(seen: Seen, cause: str) -> str:
    return f"pod {seen.name} on {seen.pod['spec'].get('nodeName') or 'no node'}: {cause}"


def _seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()
