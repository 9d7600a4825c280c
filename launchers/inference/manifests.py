"""Kubernetes objects that serve a model with vLLM: a Deployment and its Service."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from estimator import hardware
from estimator.hardware.cluster.tables import labels_of
from estimator.inference.serving import Serving
from estimator.memory.host import GPU_PROCESS_HOST_BYTES
from estimator.plan import GIB
from launchers.inference import fetch_in_pod
from launchers.inference.servers import TOKEN_VARIABLE, Endpoint, vllm_arguments

IMAGE = "vllm/vllm-openai:v0.32.0"  # of the version in pyproject.toml, extra vllm
GPU_RESOURCE = "nvidia.com/gpu"
MODEL_FOLDER = "/model"
Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A model in an S3 datastore, which the pod fetches before it serves."""

    address: str  # s3://BUCKET/KEY of the bundle
    path: str  # path of the model's folder in the bundle
    endpoint: str | None = None  # URL of an S3-compatible store other than AWS's
    service_account: str | None = None  # service account with read access to the bucket
    secrets: tuple[str, ...] = ()  # Secrets mounted as environment variables, such as an access key


def resource_name(model: str) -> str:
    """Convert a model's name to a valid Kubernetes name (RFC 1123)."""
    return re.sub(r"[^a-z0-9-]+", "-", model.lower()).strip("-")[:50].rstrip("-") or "model"


def manifests(
    endpoint: Endpoint,
    serving: Serving,
    *,
    gpu: str,
    source: str,
    claim: str | None,
    stored: Stored | None = None,
    adapter: Path | None = None,
    adapter_path: str | None = None,
    image: str = IMAGE,
    token: bool,
) -> list[Json]:
    """Build the Deployment and the Service of a server.

    Parameters
    ----------
    source:
        Model for vLLM: a Hugging Face id, or a path below ``MODEL_FOLDER``.
    claim:
        PersistentVolumeClaim that is mounted read-only at ``MODEL_FOLDER``.
    stored:
        A model in an S3 datastore; an init container fetches it to ``MODEL_FOLDER``.
    adapter:
        Folder on this machine of the adapter that vLLM applies to ``source``.
    adapter_path:
        Path of the same adapter in the pod.
    token:
        Whether requests need the token in the Secret NAME-token, key ``token``.
    """
    name = resource_name(endpoint.model)
    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/managed-by": "finetune"}
    health = {"httpGet": {"path": "/health", "port": endpoint.port}}
    memory = GPU_PROCESS_HOST_BYTES * serving.gpus + serving.memory["weights"] * serving.gpus
    volumes: list[Json] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}]
    mounts: list[Json] = [{"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108 - of the container
    if claim is not None:
        volumes.append({"name": "model", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}})
        mounts.append({"name": "model", "mountPath": MODEL_FOLDER, "readOnly": True})
    if stored is not None:
        volumes.append({"name": "model", "emptyDir": {}})
        mounts.append({"name": "model", "mountPath": MODEL_FOLDER, "readOnly": True})
    environment = [_secret("HF_TOKEN", "hf-token", optional=True)]
    if token:
        environment.append(_secret(TOKEN_VARIABLE, f"{name}-token", optional=False))
    container = {
        "name": "vllm",
        "image": image,
        "command": ["vllm"],
        "args": vllm_arguments(source, endpoint, serving, adapter=adapter, adapter_path=adapter_path),
        "env": environment,
        "ports": [{"name": "http", "containerPort": endpoint.port, "protocol": "TCP"}],
        "resources": {
            "requests": {"cpu": str(2 * serving.gpus), "memory": f"{-(-memory // GIB)}Gi"},
            "limits": {GPU_RESOURCE: str(serving.gpus)},
        },
        # Weights are downloaded and kernels compiled before it is healthy
        "startupProbe": {**health, "periodSeconds": 10, "failureThreshold": 180},
        "readinessProbe": {**health, "periodSeconds": 5},
        "livenessProbe": {**health, "periodSeconds": 10, "failureThreshold": 6, "timeoutSeconds": 5},
        "securityContext": {"allowPrivilegeEscalation": False},
        "volumeMounts": mounts,
    }
    pod: Json = {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": 60}
    if stored is not None:
        pod["initContainers"] = [_fetch_container(stored, image)]
        if stored.service_account is not None:
            pod["serviceAccountName"] = stored.service_account
    if selector := _node_selector(gpu):
        pod["nodeSelector"] = selector
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "selector": labels,
            "ports": [{"name": "http", "port": endpoint.port, "targetPort": "http", "protocol": "TCP"}],
        },
    }
    return [deployment, service]


def _fetch_container(stored: Stored, image: str) -> Json:
    """Build the init container that fetches a stored model; vLLM's image has boto3."""
    container: Json = {
        "name": "fetch",
        "image": image,
        "command": ["python3", "-c", inspect.getsource(fetch_in_pod), stored.address, MODEL_FOLDER],
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}},
        "securityContext": {"allowPrivilegeEscalation": False},
        "volumeMounts": [{"name": "model", "mountPath": MODEL_FOLDER}],
    }
    if stored.endpoint is not None:
        container["env"] = [{"name": "AWS_ENDPOINT_URL_S3", "value": stored.endpoint}]
    if stored.secrets:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in stored.secrets]
    return container


def _node_selector(gpu: str) -> dict[str, str]:
    """Return the labels of nodes with that GPU (GPU feature discovery); empty if the table has none."""
    rows = labels_of(hardware.gpu(gpu).name, "gfd")
    return dict(rows[0].labels) if rows else {}


def _secret(variable: str, name: str, *, optional: bool) -> Json:
    reference = {"name": name, "key": "token", "optional": optional}
    return {"name": variable, "valueFrom": {"secretKeyRef": reference}}
