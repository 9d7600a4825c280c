"""Local servers that receive outputs: a webhook, and a Kubernetes API with nodes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from checklist.outputs.taint import KEY
from tests.http_server import serving

SECRET = "T0SECRET/B0SECRET/token"
OTHERS_TAINT = {"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"}


class Api:
    """An API server of nodes that merges patches and checks the resource version like Kubernetes."""

    def __init__(self, count: int) -> None:
        self.nodes: dict[str, dict[str, Any]] = {}
        for number in range(count):
            metadata = {
                "name": f"host-{number}",
                "resourceVersion": "1",
                "labels": {"zone": "a"},
                "annotations": {},
            }
            self.nodes[f"host-{number}"] = {"metadata": metadata, "spec": {"taints": [OTHERS_TAINT]}}
        self.patches: list[tuple[str, str]] = []
        self.refuse: dict[str, int] = {}
        self.writers: dict[str, int] = {}  # how often somebody else changes a node right before we do
        self.page = 3

    def listed(self, query: dict[str, list[str]]) -> dict[str, Any]:
        start = int(query.get("continue", ["0"])[0])
        metadata = {"continue": str(start + self.page)} if start + self.page < len(self.nodes) else {}
        items = list(self.nodes.values())[start : start + self.page]
        return {"kind": "NodeList", "metadata": metadata, "items": items}

    def patch(self, name: str, body: dict[str, Any], kind: str) -> tuple[int, dict[str, Any]]:
        node = self.nodes.get(name)
        if node is None:
            return 404, {"message": "not found"}
        if self.writers.get(name):
            self.writers[name] -= 1
            node["metadata"]["resourceVersion"] = str(int(node["metadata"]["resourceVersion"]) + 1)
            node["metadata"]["annotations"]["seen"] = str(self.writers[name])
        version = body["metadata"].pop("resourceVersion", None)
        if version is not None and version != node["metadata"]["resourceVersion"]:
            return 409, {"message": "conflict"}
        self.patches.append((name, kind))
        _merge(node, body)
        node["metadata"]["resourceVersion"] = str(int(node["metadata"]["resourceVersion"]) + 1)
        return 200, node

    def taints(self, name: str) -> list[dict[str, str]]:
        return self.nodes[name]["spec"].get("taints") or []

    def marked(self) -> list[str]:
        return [name for name in self.nodes if any(taint["key"] == KEY for taint in self.taints(name))]


def _merge(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Merge as in RFC 7386, which equals a strategic merge for the fields used here."""
    for key, value in new.items():
        if value is None:
            old.pop(key, None)
        elif isinstance(value, dict):
            _merge(old.setdefault(key, {}), value)
        else:
            old[key] = value


@contextmanager
def nodes_api(served: Api) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def _answer(self, code: int, value: dict[str, Any]) -> None:
            body = json.dumps(value).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            address = urlsplit(self.path)
            code = served.refuse.get("GET", 200)
            if code != 200:
                self._answer(code, {"message": "no"})
            elif address.path == "/api/v1/nodes":
                self._answer(200, served.listed(parse_qs(address.query)))
            else:
                folder, name = address.path.rsplit("/", 1)
                assert folder == "/api/v1/nodes"
                node = served.nodes.get(name)
                self._answer(404 if node is None else 200, node or {"message": "not found"})

        def do_POST(self) -> None:
            assert self.path == "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            verb = content["spec"]["resourceAttributes"]["verb"]
            refused = {"list": "GET", "patch": "PATCH"}[verb] in served.refuse
            self._answer(201, {**content, "status": {"allowed": not refused}})

        def do_PATCH(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if "PATCH" in served.refuse:
                self._answer(served.refuse["PATCH"], {"message": "no"})
            else:
                self._answer(*served.patch(self.path.rsplit("/", 1)[1], body, self.headers["Content-Type"]))

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    with serving(Handler) as url:
        yield url


def kubeconfig(home: Path, url: str) -> Path:
    """Write a kubeconfig whose only context, "c", is that server."""
    file = home / "kubeconfig"
    named = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    values = {
        "kind": "Config",
        "current-context": "c",
        "contexts": [named],
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    file.write_text(json.dumps(values))
    return file


@contextmanager
def busy_hook(*answers: tuple[int, Callable[[], str | None]]) -> Iterator[tuple[str, list[float]]]:
    """Serve a webhook with these responses and their Retry-After in turn; the last one repeats."""
    called: list[float] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            called.append(time.monotonic())
            status, retry_after = answers[min(len(called), len(answers)) - 1]
            self.send_response(status)
            reported = retry_after()
            if reported is not None:
                self.send_header("Retry-After", reported)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    with serving(Handler) as url:
        yield f"{url}/services/{SECRET}", called


@contextmanager
def hook(status: int = 200, delay_s: float = 0, drip: bool = False) -> Iterator[tuple[str, list[Any]]]:
    """Serve a webhook; yields its address and the messages received."""
    received: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            time.sleep(delay_s)
            if drip:
                for letter in b"HTTP/1.1 200 OK":
                    self.wfile.write(bytes([letter]))
                    self.wfile.flush()
                    time.sleep(0.2)
            self.send_response(status)
            self.send_header("Location", "http://elsewhere.invalid/")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    with serving(Handler) as url:
        yield f"{url}/services/{SECRET}", received
