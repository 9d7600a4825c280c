"""Conversion of a pod of the API server into a pod to run, as kubelet does before a container starts."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any

from tests.lab.api import Api, ApiError, Json
from tests.lab.pods import PodSpec

MAX_HOST_NAME = 64  # Linux's; kubelet starts no pod whose name as a host would be longer
_INDEXED = re.compile(r"metadata\.(labels|annotations)\['(.+)'\]")
_UNITS = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
_UNITS["Ti"] = 2**40


class NotStartable(Exception):  # noqa: N818 - it is no error of the agent's
    """The reason why a container waits: ``reason`` and ``message`` as in the status of the pod."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason, self.message = reason, message


def quantity(text: str | int) -> float:
    """Parse a Kubernetes quantity: 64Gi, 1600000.0M, 500m."""
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(text))
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a quantity")
    return float(match[1]) * _UNITS[match[2]]


def pod_spec(pod: Json, api: Api, base_variables: Mapping[str, str]) -> PodSpec:
    """Convert a pod; raises NotStartable if kubelet would let it wait. ``base_variables``: defaults."""
    spec, container = pod["spec"], pod["spec"]["containers"][0]
    names = _names(pod)
    limit = container.get("resources", {}).get("limits", {}).get("memory")
    shared, other_volumes = _volumes(spec, container)
    return PodSpec(
        name=pod["metadata"]["name"],
        hostname=names[0],
        aliases=tuple(names[1:]),
        command=(*container.get("command", ()), *container.get("args", ())),
        environment={**base_variables, **_environment(pod, container, api)},
        memory_bytes=int(quantity(limit)) if limit is not None else None,
        shm_bytes=shared,
        empty_dirs=other_volumes,
    )


def _names(pod: Json) -> list[str]:
    """Return the host name and the DNS names that a headless service gives the pod."""
    spec, metadata = pod["spec"], pod["metadata"]
    short = spec.get("hostname") or metadata["name"][:63]
    if not spec.get("subdomain"):
        return [short]
    domain = f"{spec['subdomain']}.{metadata['namespace']}.svc.cluster.local"
    full = f"{short}.{domain}"
    if not spec.get("setHostnameAsFQDN"):
        return [short, full]
    if len(full) > MAX_HOST_NAME:
        raise NotStartable(
            "ContainerCreating",
            f'failed to construct FQDN from pod hostname and cluster domain, FQDN "{full}" is too long '
            f"({MAX_HOST_NAME} characters is the max, {len(full)} characters requested)",
        )
    return [full, short]


def _environment(pod: Json, container: Json, api: Api) -> dict[str, str]:
    variables: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        for kind in ("secretRef", "configMapRef"):
            if kind in source:
                variables |= _keys(api, pod["metadata"]["namespace"], kind, source[kind]["name"])
    for variable in container.get("env", ()):
        origin = variable.get("valueFrom")
        if origin is None:
            variables[variable["name"]] = variable.get("value", "")
        elif "fieldRef" in origin:
            variables[variable["name"]] = _field(pod, origin["fieldRef"]["fieldPath"])
        else:
            (kind,) = origin
            keys = _keys(api, pod["metadata"]["namespace"], kind, origin[kind]["name"])
            variables[variable["name"]] = keys[origin[kind]["key"]]
    return variables


def _keys(api: Api, namespace: str, kind: str, name: str) -> dict[str, str]:
    secret = kind.startswith("secret")
    path = f"/api/v1/namespaces/{namespace}/{'secrets' if secret else 'configmaps'}/{name}"
    try:
        data = api.get(path).get("data", {})
    except ApiError as error:
        if error.status != 404:
            raise
        source_key = "secret" if secret else "configmap"
        raise NotStartable("CreateContainerConfigError", f'{source_key} "{name}" not found') from None
    return {key: base64.b64decode(value).decode() if secret else value for key, value in data.items()}


def _field(pod: Json, path: str) -> str:
    if match := _INDEXED.fullmatch(path):
        return str(pod["metadata"].get(match[1], {}).get(match[2], ""))
    field_value: Any = pod
    for part in path.split("."):
        field_value = field_value[part]
    return str(field_value)


def _volumes(spec: Json, container: Json) -> tuple[int | None, dict[str, int | None]]:
    """Return the bytes of /dev/shm, and the other empty directories."""
    volumes = {volume["name"]: volume for volume in spec.get("volumes", ())}
    shared, other_volumes = None, dict[str, "int | None"]()
    for mount in container.get("volumeMounts", ()):
        empty = volumes[mount["name"]].get("emptyDir")
        if empty is None:
            continue  # a service account's token: these pods ask nothing of the API server
        size = int(quantity(empty["sizeLimit"])) if "sizeLimit" in empty else None
        if mount["mountPath"] == "/dev/shm":
            shared = size
        else:
            other_volumes[mount["mountPath"]] = size if empty.get("medium") == "Memory" else None
    return shared, other_volumes
