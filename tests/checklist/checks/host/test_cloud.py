"""Zone, machine type and network of a host from the environment, Kubernetes and EC2 metadata, over HTTP."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from checklist.checks.host import cloud

EC2 = {
    "/latest/meta-data/placement/availability-zone": "us-east-1c",
    "/latest/meta-data/instance-id": "i-0123456789",
    "/latest/meta-data/instance-type": "p5.48xlarge",
    "/latest/meta-data/placement/group-name": "training",
    "/latest/meta-data/placement/host-id": "h-0123456789",
}
LABELS = {
    "cloud.google.com/gce-topology-host": "a1b2",
    "topology.kubernetes.io/zone": "us-east-1d",
    "node.kubernetes.io/instance-type": "p5e.48xlarge",
    "topology.k8s.aws/network-node-layer-1": "nn-1",
    "topology.k8s.aws/network-node-layer-2": "nn-2",
    "topology.k8s.aws/network-node-layer-3": "nn-3",
}


@contextmanager
def served(handler: type[BaseHTTPRequestHandler], context: ssl.SSLContext | None = None) -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


class Quiet(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def reply(self, status: int, text: str = "") -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())


class Metadata(Quiet):
    """IMDSv2 server: responds only with a session token."""

    def do_PUT(self) -> None:
        has_token = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
        self.reply(200 if self.path == "/latest/api/token" and has_token else 400, "a-token")

    def do_GET(self) -> None:
        if self.headers.get("X-aws-ec2-metadata-token") != "a-token":
            self.reply(401)
        else:
            self.reply(200 if self.path in EC2 else 404, EC2.get(self.path, ""))


class Kubernetes(Quiet):
    def do_GET(self) -> None:
        if self.headers.get("Authorization") != "Bearer secret":
            self.reply(403)
        elif self.path == "/api/v1/nodes/node-7":
            self.reply(200, json.dumps({"metadata": {"name": "node-7", "labels": LABELS}}))
        else:
            self.reply(404)


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NODE_ZONE", "TOPOLOGY_ZONE", "AVAILABILITY_ZONE", "NODE_INSTANCE_TYPE", "NODE_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED", raising=False)


def test_ec2_metadata_is_requested_with_a_session_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with served(Metadata) as port:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{port}/")
        assert cloud.place() == cloud.CloudPlace(
            zone="us-east-1c",
            instance="i-0123456789",
            instance_type="p5.48xlarge",
            placement_group="training",
            physical_host="h-0123456789",
        )
        monkeypatch.setenv("NODE_ZONE", "us-east-1a")
        assert cloud.place().zone == "us-east-1a"


def test_a_silent_metadata_service_is_abandoned_at_its_limit_and_the_zone_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        begin = time.monotonic()
        assert cloud.place() == cloud.CloudPlace()
        assert time.monotonic() - begin < 5 * cloud._LIMIT_S, "asked once, not once for each field"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_zone_machine_type_and_network_are_read_from_node_labels_if_permitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, certificate = tmp_path / "key", tmp_path / "ca.crt"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=api"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command, *names], check=True, capture_output=True, timeout=60)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    (tmp_path / "token").write_text("secret\n")
    monkeypatch.setattr(cloud, "_ACCOUNT", tmp_path)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with served(Kubernetes, context) as port:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(port))
        monkeypatch.setenv("NODE_NAME", "node-7")
        assert cloud.place() == cloud.CloudPlace(
            zone="us-east-1d",
            instance_type="p5e.48xlarge",
            network_nodes=("nn-1", "nn-2", "nn-3"),
            physical_host="a1b2",
        )
        (tmp_path / "token").write_text("not allowed")
        assert cloud.place() == cloud.CloudPlace()


def test_no_kubernetes_api_server_is_queried_outside_a_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("NODE_NAME", "node-7")
    monkeypatch.setattr(cloud, "_ACCOUNT", tmp_path)
    assert cloud.node_labels() == {}
