"""A simulated Metaflow metadata service, sufficient for the client of Metaflow 2.19.39.

The real one needs PostgreSQL. This one keeps everything in memory, and its ids start where the test says:
a service that has been in use for a while hands out long ones, a fresh one short ones.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.lab.pods import Hub

FIRST_ID = 517001
VERSION = "2.5.0"  # from this one on it has all that the client can use
_KINDS = ("flows", "runs", "steps", "tasks")
_CREATE = re.compile(r"(?P<parent>.*)/(?P<kind>run|step|task)")
_ATTEMPT = re.compile(r"(?P<task>.*/tasks/[^/]+)/attempt/(?P<attempt>\d+)/artifacts")
_ARTIFACT = re.compile(r"(?P<task>.*)/artifacts/(?P<name>[^/]+)(?:/attempt/(?P<attempt>\d+))?")
Record = dict[str, Any]


class Refused(Exception):  # noqa: N818
    """An error response with its HTTP status."""


class MetadataService:
    """Registered objects by path, ``flows/F/runs/R/steps/S/tasks/T``."""

    def __init__(self, first_id: int = FIRST_ID) -> None:
        self._ids = itertools.count(first_id)
        self._record_ids = itertools.count(1)
        self._lock = threading.Lock()
        self.objects: dict[str, Record] = {}
        self.metadata: dict[str, list[Record]] = {}
        self.artifacts: dict[str, list[Record]] = {}
        self.heartbeats: dict[str, float] = {}

    def get(self, path: str, query: dict[str, list[str]]) -> Any:
        """Return the response to a GET."""
        with self._lock:
            if path in self.objects:
                return self._shown(path)
            parent, _, last = path.rpartition("/")
            if last == "metadata":
                return self.metadata.get(parent, [])
            if last == "filtered_tasks":
                return self._filtered(parent, query)
            if match := _ATTEMPT.fullmatch(path):
                return self._artifacts_of(match["task"], int(match["attempt"]))
            if last == "artifacts":
                tasks = [task for task in self.artifacts if task == parent or task.startswith(f"{parent}/")]
                return [artifact for task in tasks for artifact in self._artifacts_of(task)]
            if match := _ARTIFACT.fullmatch(path):
                attempt = int(match["attempt"]) if match["attempt"] else None
                for artifact in self._artifacts_of(match["task"], attempt):
                    if artifact["name"] == match["name"]:
                        return artifact
            elif last in _KINDS and (not parent or parent in self.objects):
                return [self._shown(child) for child in self._children(path)]
        raise Refused(404)

    def post(self, path: str, body: Any) -> Any:
        """Carry out a POST and return its response."""
        with self._lock:
            parent, _, last = path.rpartition("/")
            if last == "heartbeat":
                self.heartbeats[parent] = time.time()
                return json.dumps({"wait_time_in_seconds": 10})  # a string that holds JSON, as the real one
            if last in ("metadata", "artifact"):
                rows = self.metadata if last == "metadata" else self.artifacts
                new = [{"id": next(self._record_ids), **record} for record in body]
                rows.setdefault(parent, []).extend(new)
                return {last: len(new)}
            if match := _CREATE.fullmatch(path):
                return self._create(match["parent"], match["kind"], body)
            if path.startswith("flows/") and path.count("/") == 1:
                return self._add(path, body)
        raise Refused(404)

    def patch(self, path: str, body: Record) -> Any:
        """Change a run's tags."""
        run = path.removesuffix("/tag/mutate")
        with self._lock:
            if run == path or run not in self.objects:
                raise Refused(404)
            record = self.objects[run]
            tags = (set(record["tags"]) | set(body["tags_to_add"])) - set(body["tags_to_remove"])
            record["tags"] = sorted(tags)
            return {"tags": record["tags"]}

    def _create(self, parent: str, kind: str, body: Record) -> Record:
        if kind == "step":
            return self._add(parent, body)  # .../steps/NAME/step
        if parent not in self.objects:
            raise Refused(404)
        field = "run_number" if kind == "run" else "task_id"
        name = body.get(field) or next(self._ids)
        return self._add(f"{parent}/{kind}s/{name}", {**body, field: name})

    def _add(self, path: str, body: Record) -> Record:
        if path in self.objects:
            raise Refused(409)
        self.objects[path] = {"flow_id": path.split("/")[1], "ts_epoch": int(time.time() * 1000), **body}
        return self._shown(path)

    def _shown(self, path: str) -> Record:
        """Return the object; steps and tasks have the tags of their run."""
        record, parts = self.objects[path], path.split("/")
        if len(parts) > 4:
            run = self.objects["/".join(parts[:4])]
            return {**record, "tags": run["tags"], "system_tags": run["system_tags"]}
        return dict(record)

    def _children(self, path: str) -> list[str]:
        depth = path.count("/") + 1
        return [key for key in self.objects if key.startswith(f"{path}/") and key.count("/") == depth]

    def _artifacts_of(self, task: str, attempt: int | None = None) -> list[Record]:
        """Return the artifacts of an attempt, or of the last one that has any (None)."""
        values = self.artifacts.get(task, [])
        if attempt is None:
            attempt = max((artifact["attempt_id"] for artifact in values), default=0)
        return [artifact for artifact in values if artifact["attempt_id"] == attempt]

    def _filtered(self, step: str, query: dict[str, list[str]]) -> list[str]:
        """Return path specs of tasks of a step with metadata of that name and value."""
        name, pattern = query.get("metadata_field_name", [None])[0], query.get("pattern", [".*"])[0]
        filtered = []
        for path in self._children(f"{step}/tasks"):
            for record in self.metadata.get(path, [{"field_name": None, "value": ""}]):
                if name in (None, record["field_name"]) and re.search(pattern, str(record["value"])):
                    filtered.append("/".join(path.split("/")[1::2]))
                    break
        return filtered


def _handler(service: MetadataService) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self, status: int, value: Any) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("METADATA_SERVICE_VERSION", VERSION)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _do(self, method: str) -> None:
            address = urlsplit(self.path)
            path = unquote(address.path).strip("/")
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
            try:
                if path == "ping":
                    self._answer(200, "pong")
                elif method == "GET":
                    self._answer(200, service.get(path, parse_qs(address.query)))
                else:
                    self._answer(200, (service.post if method == "POST" else service.patch)(path, body))
            except Refused as refused:
                self._answer(refused.args[0], {"message": f"{method} {path}"})

        def do_GET(self) -> None:
            self._do("GET")

        def do_POST(self) -> None:
            self._do("POST")

        def do_PATCH(self) -> None:
            self._do("PATCH")

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections broken by killed clients."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def answer(hub: Hub, handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve HTTP in the hub; yields the address."""
    with hub.inside():
        server = _Server((hub.address, 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://{hub.address}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def serve(hub: Hub, service: MetadataService | None = None) -> Iterator[str]:
    """Serve the service in the hub; yields its address, METAFLOW_SERVICE_URL."""
    with answer(hub, _handler(service or MetadataService())) as url:
        yield url
