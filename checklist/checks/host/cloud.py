"""Location of a host from the environment, its Kubernetes node's labels, or the cloud's metadata service."""

from __future__ import annotations

import http.client
import os
import ssl
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from estimator.hardware.cluster.nodes import INSTANCE_TYPE, ZONE
from estimator.untrusted import parse_json

_ZONES = ("NODE_ZONE", "TOPOLOGY_ZONE", "AVAILABILITY_ZONE")  # may be set by a pod's downward API
_METADATA = "http://169.254.169.254"
_LIMIT_S = 1.0  # a blocked service never responds
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # mounted into every pod by Kubernetes
_LABELS_NETWORK = (  # network units, largest first: EKS, GKE
    tuple(f"topology.k8s.aws/network-node-layer-{layer}" for layer in (1, 2, 3)),
    tuple(f"cloud.google.com/gce-topology-{unit}" for unit in ("block", "subblock", "host")),
)
_LABEL_HOST = "cloud.google.com/gce-topology-host"


@dataclass(frozen=True, kw_only=True, slots=True)
class CloudPlace:
    """Location of a host; None: unknown."""

    zone: str | None = None
    instance: str | None = None
    instance_type: str | None = None
    placement_group: str | None = None
    network_nodes: tuple[str, ...] = ()
    physical_host: str | None = None
    """Physical host of the virtual machine."""


def place() -> CloudPlace:
    """Determine the location: the environment overrides labels, which override the metadata service."""
    labels = node_labels()
    zone = next((os.environ[name] for name in _ZONES if os.environ.get(name)), labels.get(ZONE))
    kind = os.environ.get("NODE_INSTANCE_TYPE") or labels.get(INSTANCE_TYPE)
    disabled = os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"  # the AWS SDKs' switch
    service = None if (zone and kind) or disabled else _Service()
    network = next((names for names in _LABELS_NETWORK if names[0] in labels), ())
    return CloudPlace(
        zone=zone or (service.get("placement/availability-zone") if service else None),
        instance=service.get("instance-id") if service else None,
        instance_type=kind or (service.get("instance-type") if service else None),
        placement_group=service.get("placement/group-name") if service else None,
        network_nodes=tuple(labels[name] for name in network if name in labels),
        physical_host=labels.get(_LABEL_HOST) or (service.get("placement/host-id") if service else None),
    )


def node_labels() -> dict[str, str]:
    """Read the labels of this pod's node (NODE_NAME, from the downward API); empty if unavailable.

    The pod's service account must be allowed to get nodes.
    """
    name, host = os.environ.get("NODE_NAME"), os.environ.get("KUBERNETES_SERVICE_HOST")
    if not name or not host:
        return {}
    try:
        token = (_ACCOUNT / "token").read_text().strip()
        trusted = ssl.create_default_context(cafile=str(_ACCOUNT / "ca.crt"))
        port = int(os.environ.get("KUBERNETES_SERVICE_PORT", "443"))
        connection = http.client.HTTPSConnection(host, port, timeout=_LIMIT_S, context=trusted)
    except (OSError, ValueError):  # no service account, or not a pod at all
        return {}
    path = f"/api/v1/nodes/{urllib.parse.quote(name, safe='')}"
    text = _answer(
        connection, "GET", path, {"Authorization": f"Bearer {token}", "Accept": "application/json"}
    )
    return _labels(text) if text else {}


def _labels(text: str) -> dict[str, str]:
    try:
        labels: Any = parse_json(text)["metadata"]["labels"]
        return {str(name): str(value) for name, value in labels.items()}
    except (ValueError, KeyError, TypeError, AttributeError):  # a node without labels, or an unknown response
        return {}


class _Service:
    """Read EC2's metadata with a session token (IMDSv2); stop after the first request without a response."""

    def __init__(self) -> None:
        # The AWS SDKs use the same variable
        address = urllib.parse.urlsplit(os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or _METADATA)
        self._host, self._port = address.hostname or "", address.port or 80
        self._token = self._request(
            "PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
        )

    def get(self, path: str) -> str | None:
        if self._token is None:
            return None
        return self._request("GET", f"/latest/meta-data/{path}", {"X-aws-ec2-metadata-token": self._token})

    def _request(self, method: str, path: str, headers: dict[str, str]) -> str | None:
        return _answer(
            http.client.HTTPConnection(self._host, self._port, timeout=_LIMIT_S), method, path, headers
        )


def _answer(
    connection: http.client.HTTPConnection, method: str, path: str, headers: dict[str, str]
) -> str | None:
    """Return the body of a successful response; None otherwise, including after the time limit."""
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        text = response.read().decode()
    except (OSError, http.client.HTTPException, UnicodeDecodeError):
        return None
    finally:
        connection.close()
    return text if response.status == http.client.OK else None
