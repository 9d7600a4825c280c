"""Asking a Kubernetes API server for its nodes. All that a cluster can refuse is one clear line here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from estimator.errors import UserError
from estimator.hardware.cluster_api import access, plain

TIMEOUT_S = 10
PAGE = 500  # nodes in one answer, as kubectl asks for
RULE = 'apiGroups: [""], resources: ["nodes"], verbs: ["list"], in a ClusterRole'
# Taints that Kubernetes sets by itself for what is told by conditions already
LIFECYCLE = "node.kubernetes.io/"


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """What one node says of itself. Resources in cores, bytes and pieces, by their names."""

    name: str
    labels: Mapping[str, str]
    allocatable: Mapping[str, float]
    capacity: Mapping[str, float]
    ready: bool
    unschedulable: bool
    taints: tuple[str, ...]
    provider_id: str


def fetch(context: str | None = None) -> tuple[str, list[Node]]:
    """The context's name and the cluster's nodes; UserError where they can't be had, within about 10 s."""
    try:
        import kubernetes  # noqa: F401 - heavy, and not everybody's
        from urllib3.exceptions import HTTPError
    except ImportError:
        raise UserError(
            "--from-cluster needs the kubernetes library, which is not installed.",
            "pip install 'metaflow-finetune[kubernetes]'",
        ) from None
    from kubernetes import client

    name, configuration = access(context)
    configuration.retries = False
    found: list[Node] = []
    token: str | None = None
    with client.ApiClient(configuration) as connection:
        api = client.CoreV1Api(connection)
        while True:
            try:
                answer = api.list_node(
                    limit=PAGE, _continue=token, _request_timeout=TIMEOUT_S, _preload_content=False
                )
                page = json.loads(answer.data)
                if page.get("kind") != "NodeList":
                    raise ValueError("no NodeList")
            except client.ApiException as error:
                raise _refused(name, configuration.host, error) from None
            except HTTPError as error:
                raise UserError(
                    f"The Kubernetes API of context {name!r} ({configuration.host}) can't be reached: "
                    f"{plain(error)}.",
                    "Is the cluster up, and the VPN? `kubectl cluster-info` shows the same.",
                ) from None
            except (ValueError, AttributeError):
                raise UserError(
                    f"{configuration.host} (context {name!r}) doesn't answer as a Kubernetes API does.",
                    "Look at `server:` in the kubeconfig.",
                ) from None
            found += [node_of(item) for item in page.get("items") or []]
            token = page.get("metadata", {}).get("continue")
            if not token:
                return name, found


def _refused(name: str, host: str, error: Any) -> UserError:
    if error.status == 401:
        return UserError(
            f"The Kubernetes API of context {name!r} doesn't know who asks (401).",
            "The login may be over: log in again, and try `kubectl get nodes`.",
        )
    if error.status == 403:
        try:
            said = json.loads(error.body)["message"]
        except (ValueError, KeyError, TypeError):
            said = "forbidden"
        return UserError(
            f"Listing the nodes of context {name!r} is not allowed: {said}.", f"It needs {RULE}."
        )
    if not error.status:  # no answer at all: a certificate that nobody vouches for
        return UserError(
            f"The Kubernetes API of context {name!r} ({host}) can't be reached: {plain(error.reason)}.",
            "Look at `server:` and `certificate-authority-data:` in the kubeconfig.",
        )
    return UserError(
        f"The Kubernetes API of context {name!r} ({host}) answers with status {error.status}.",
        "Try `kubectl get nodes`.",
    )


def node_of(item: Any) -> Node:
    """A node as the API server tells it."""
    metadata, spec, status = item["metadata"], item.get("spec") or {}, item.get("status") or {}
    taints = [taint for taint in spec.get("taints") or [] if not taint["key"].startswith(LIFECYCLE)]
    return Node(
        name=metadata["name"],
        labels=metadata.get("labels") or {},
        allocatable=_resources(status.get("allocatable")),
        capacity=_resources(status.get("capacity")),
        ready=any(
            condition["type"] == "Ready" and condition["status"] == "True"
            for condition in status.get("conditions") or []
        ),
        unschedulable=bool(spec.get("unschedulable")),
        taints=tuple(_taint(taint) for taint in taints),
        provider_id=spec.get("providerID") or "",
    )


def _taint(taint: Mapping[str, str]) -> str:
    value = f"={taint['value']}" if taint.get("value") else ""
    return f"{taint['key']}{value}:{taint['effect']}"


def _resources(table: Mapping[str, str] | None) -> dict[str, float]:
    from kubernetes.utils import parse_quantity

    return {name: float(parse_quantity(value)) for name, value in (table or {}).items()}
