"""A node for the API server of the tests: accepts scheduled pods and runs them.

What kubelet does and Metaflow or this project's code can see: environment from fields, secrets and config
maps, limits, empty directories, deadlines, images that aren't there, evictions, exit codes and the end of
the log as the termination message.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tests.lab.agent import Agent
from tests.lab.api import Api, Json
from tests.lab.pod_spec import NotStartable, pod_spec
from tests.lab.pods import Hub, Pod

_BACK_OFF_S = 2.0  # kubelet's is 10 s and doubles
_MESSAGE_BYTES = 2048  # of a log as termination message, as kubelet's
_ENDED = ("Succeeded", "Failed")


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine as described by kubelet, the cloud controller and GPU feature discovery."""

    name: str
    instance_type: str
    zone: str = "us-east-1a"
    cpu: str = "64"
    memory: str = "256Gi"
    extended: Mapping[str, str] = field(default_factory=dict)  # "nvidia.com/gpu": "8"
    labels: Mapping[str, str] = field(default_factory=dict)  # beside those that every machine has
    taints: tuple[Mapping[str, str], ...] = ()

    def manifest(self) -> Json:
        labels = {
            "kubernetes.io/hostname": self.name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": "amd64",
            "node.kubernetes.io/instance-type": self.instance_type,
            "topology.kubernetes.io/region": self.zone[:-1],
            "topology.kubernetes.io/zone": self.zone,
            **self.labels,
        }
        return {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self.name, "labels": labels},
            "spec": {"providerID": f"aws:///{self.zone}/i-{self.name}"},
        }

    def status(self, address: str) -> Json:
        room = {"cpu": self.cpu, "memory": self.memory, "ephemeral-storage": "8Ti", "pods": "110"}
        capacity = {**room, **self.extended}
        return {
            "capacity": capacity,
            "allocatable": capacity,
            "addresses": [{"type": "InternalIP", "address": address}],
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
        }


@dataclass
class _Running:
    """A pod accepted by this node."""

    pod: Pod | None = None  # None: its container waits
    began: float = 0.0
    started_at: str = ""
    updated_at: float = 0.0  # when it was last tried to start it
    reported: Json = field(default_factory=dict)
    told_at: float = 0.0  # that it has to go


class Kubelet(Agent):
    """One node. ``images``: images that can be pulled, each with its ENV variables."""

    def __init__(
        self, node: Node, api: Api, hub: Hub, images: Mapping[str, Mapping[str, str]], log: Path
    ) -> None:
        super().__init__(f"kubelet {node.name}", log)
        self.node, self.images = node, images
        self._api, self._hub = api, hub
        self._taken: dict[str, _Running] = {}
        self._path = f"/api/v1/nodes/{node.name}"

    def __enter__(self) -> Kubelet:
        register(self._api, self.node, self._hub.address)
        super().__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._kill_all()

    def pods(self) -> list[Pod]:
        """The pods that are running here."""
        pods_taken = list(self._taken.values())
        return [one.pod for one in pods_taken if one.pod is not None and one.pod.poll() is None]

    def reconcile(self) -> None:
        pods_by_uid = {
            pod["metadata"]["uid"]: pod
            for pod in self._api.items("/api/v1/pods", fieldSelector=f"spec.nodeName={self.node.name}")
        }
        for uid in [uid for uid in self._taken if uid not in pods_by_uid]:
            self._kill(self._taken.pop(uid))  # deleted without grace: it has simply vanished
        for uid, pod in pods_by_uid.items():
            if pod["metadata"].get("deletionTimestamp"):
                self._terminate(pod, self._taken.setdefault(uid, _Running()))
            elif pod["status"].get("phase") in _ENDED:
                self._kill(self._taken.setdefault(uid, _Running()))
            else:
                self._update_pod(pod, self._taken.setdefault(uid, _Running()))

    # -- faults ----------------------------------------------------------------------------------------

    def evict(self, name: str) -> None:
        """End a pod like a node that runs out of memory."""
        for pod in self._api.items("/api/v1/pods", fieldSelector=f"metadata.name={name}"):
            status = {
                "phase": "Failed",
                "reason": "Evicted",
                "message": "The node was low on resource: memory.",
                "containerStatuses": None,
            }
            self._api.patch(f"{_path(pod)}/status", {"status": status})

    def kill_for_memory(self, name: str) -> None:
        """Kill a container like the kernel does above its memory limit."""
        for pod in self._api.items("/api/v1/pods", fieldSelector=f"metadata.name={name}"):
            terminated = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": _now()}
            status = {"phase": "Failed", **_container(pod, {"terminated": terminated}, ready=False)}
            self._api.patch(f"{_path(pod)}/status", {"status": status}, "strategic-merge")

    def lose(self) -> None:
        """Lose the machine: it sends nothing any more, not even the end of a connection."""
        self.stop()
        for running in self.pods():
            for pid in running.pids()[:1]:
                down = ["nsenter", f"--net=/proc/{pid}/ns/net", "ip", "link", "set", "eth0", "down"]
                subprocess.run(down, check=True, capture_output=True)
        self._kill_all()

    def forget(self) -> None:
        """Do what cloud controller and pod garbage collector do minutes after :meth:`lose`."""
        self._api.delete(self._path)
        for pod in self._api.items("/api/v1/pods", fieldSelector=f"spec.nodeName={self.node.name}"):
            self._api.delete(_path(pod), gracePeriodSeconds=0)

    # -- one pod ---------------------------------------------------------------------------------------

    def _update_pod(self, pod: Json, running_pod: _Running) -> None:
        if running_pod.pod is None:
            if time.monotonic() - running_pod.updated_at < _BACK_OFF_S:
                return
            running_pod.updated_at = time.monotonic()
            try:
                self._start(pod, running_pod)
            except NotStartable as reason:
                self._wait(pod, running_pod, reason)
                return
        self._report(pod, running_pod, self._status(pod, running_pod))

    def _start(self, pod: Json, running_pod: _Running) -> None:
        image = pod["spec"]["containers"][0]["image"]
        if image not in self.images:
            if running_pod.reported:
                raise NotStartable("ImagePullBackOff", f'Back-off pulling image "{image}"')
            raise NotStartable("ErrImagePull", f'failed to resolve reference "{image}": not found')
        pod["status"]["hostIP"] = self._hub.address
        host, _, port = self._api.url.removeprefix("https://").partition(":")
        service = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
        spec = pod_spec(pod, self._api, {**self.images[image], **service})
        running_pod.pod = self._hub.start(spec)
        running_pod.began, running_pod.started_at = time.monotonic(), _now()
        self.write_log(f"started {spec.name} in {running_pod.pod.folder}")

    def _status(self, pod: Json, running_pod: _Running) -> Json:
        assert running_pod.pod is not None
        limit = pod["spec"].get("activeDeadlineSeconds")
        ended = running_pod.pod.poll()
        if ended is None and limit is not None and time.monotonic() - running_pod.began > limit:
            self._kill(running_pod)
            text = "Pod was active on the node longer than the specified deadline"
            return {"phase": "Failed", "reason": "DeadlineExceeded", "message": text}
        common = {
            "podIP": running_pod.pod.ip,
            "podIPs": [{"ip": running_pod.pod.ip}],
            "hostIP": self._hub.address,
        }
        common["startTime"] = running_pod.started_at
        if ended is None:
            state: Json = {"running": {"startedAt": running_pod.started_at}}
            return {**common, "phase": "Running", **_container(pod, state, ready=True)}
        terminated: Json = {"exitCode": ended.code, "reason": ended.reason}
        terminated |= {"startedAt": running_pod.started_at, "finishedAt": _now()}
        if ended.code and "FallbackToLogsOnError" in str(pod["spec"]["containers"][0]):
            terminated["message"] = running_pod.pod.log.read_bytes()[-_MESSAGE_BYTES:].decode(
                errors="replace"
            )
        phase = "Failed" if ended.code else "Succeeded"
        return {**common, "phase": phase, **_container(pod, {"terminated": terminated}, ready=False)}

    def _wait(self, pod: Json, running_pod: _Running, reason: NotStartable) -> None:
        waiting = {"waiting": {"reason": reason.reason, "message": reason.message}}
        status = {"phase": "Pending", "hostIP": self._hub.address, **_container(pod, waiting, ready=False)}
        if status != running_pod.reported:
            self._event(pod, "Failed", reason.message)
        self._report(pod, running_pod, status)

    def _report(self, pod: Json, running_pod: _Running, status: Json) -> None:
        if status != running_pod.reported:
            self._api.patch(f"{_path(pod)}/status", {"status": status}, "strategic-merge")
            running_pod.reported = status

    def _event(self, pod: Json, reason: str, message: str) -> None:
        names = {key: pod["metadata"][key] for key in ("name", "namespace", "uid")}
        self._api.create(
            f"/api/v1/namespaces/{names['namespace']}/events",
            {
                "metadata": {"generateName": f"{names['name']}."},
                "involvedObject": {"kind": "Pod", "apiVersion": "v1", **names},
                "reason": reason,
                "message": message,
                "type": "Warning",
                "source": {"component": "kubelet", "host": self.node.name},
                "firstTimestamp": _now(),
                "lastTimestamp": _now(),
            },
        )

    def _terminate(self, pod: Json, running_pod: _Running) -> None:
        """End a deleted pod: hook, grace period, kill. A shell as process 1 ignores SIGTERM."""
        if running_pod.pod is not None and running_pod.pod.poll() is None:
            grace_s = pod["metadata"].get("deletionGracePeriodSeconds") or 0
            if grace_s and not running_pod.told_at:
                running_pod.told_at = time.monotonic()
                hook = pod["spec"]["containers"][0].get("lifecycle", {}).get("preStop", {})
                running_pod.pod.run(hook.get("exec", {}).get("command", ()))
            if time.monotonic() - running_pod.told_at < grace_s:
                return
            self._kill(running_pod)
        if running_pod.pod is not None:
            self._report(pod, running_pod, self._status(pod, running_pod))
        self._api.delete(_path(pod), gracePeriodSeconds=0)

    def _kill(self, running_pod: _Running) -> None:
        if running_pod.pod is not None and running_pod.pod.poll() is None:
            running_pod.pod.kill()

    def _kill_all(self) -> None:
        for running_pod in self._taken.values():
            self._kill(running_pod)


def register(api: Api, node: Node, address: str) -> None:
    """Create the object of a node, as if it were ready."""
    path = f"/api/v1/nodes/{node.name}"
    api.create("/api/v1/nodes", node.manifest())
    api.patch(f"{path}/status", {"status": node.status(address)})
    api.patch(path, {"spec": {"taints": list(node.taints)}})  # and not not-ready, which admission has added


def _path(pod: Json) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def _container(pod: Json, state: Json, *, ready: bool) -> Json:
    container: dict[str, Any] = pod["spec"]["containers"][0]
    described = {key: container[key] for key in ("name", "image")}
    conditions = [{"type": kind, "status": str(ready)} for kind in ("Ready", "ContainersReady")]
    status = {**described, "imageID": described["image"], "ready": ready, "restartCount": 0, "state": state}
    return {"containerStatuses": [status], "conditions": conditions}


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
