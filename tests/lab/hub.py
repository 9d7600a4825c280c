"""The part of the Hugging Face Hub API that a push uses, with requests of the real client, on 127.0.0.1."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

USER, TOKEN = "tester", "hf_" + "aTokenOfThisTest" * 2


class Hub(ThreadingHTTPServer):
    """One account, its repositories, and requested failures."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.account: dict[str, Any] = {
            "name": USER,
            "type": "user",
            "orgs": [],
            "auth": {"type": "access_token", "accessToken": {"displayName": "t", "role": "write"}},
        }
        self.repos: dict[str, bool] = {}  # name -> private
        self.blobs: dict[str, bytes] = {}  # of large files, by their SHA-256
        self.files: dict[str, dict[str, bytes]] = {}  # by repository
        self.commits: list[list[str]] = []  # names of files
        self.failing = 0  # so many of the next uploads of a blob are answered with 503
        self.lost = 0  # so many of the next commits too
        self.uploads = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/api/whoami-v2":
            return self._send(200, self.server.account) if self._known() else self._send(401, {})
        return self._send(404, {})

    def do_POST(self) -> None:
        body = self._body()
        hub = self.server
        if not self._known():
            return self._send(401, {"error": "Invalid username or password."})
        if self.path == "/api/validate-yaml":
            return self._send(200, {"warnings": [], "errors": []})
        if self.path == "/api/repos/create":
            values = json.loads(body)
            name = f"{values.get('organization') or USER}/{values['name']}"
            status = 409 if name in hub.repos else 200
            private = values.get("visibility") == "private" or values.get("private") is True
            hub.repos.setdefault(name, private)
            hub.files.setdefault(name, {})
            return self._send(status, {"url": f"{hub.url}/{name}", "id": name})
        if "/preupload/" in self.path:
            repo = self._repo("/preupload/")
            files = [
                {
                    "path": each["path"],
                    "uploadMode": "lfs" if each["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                    "oid": _oid(hub.files[repo].get(each["path"])),
                }
                for each in json.loads(body)["files"]
            ]
            return self._send(200, {"files": files})
        if self.path.endswith("/info/lfs/objects/batch"):
            objects = []
            for each in json.loads(body)["objects"]:
                upload = {"actions": {"upload": {"href": f"{hub.url}/blob/{each['oid']}"}}}
                objects.append({**each, **({} if each["oid"] in hub.blobs else upload)})
            return self._send(200, {"transfer": "basic", "objects": objects})
        if "/commit/" in self.path:
            return self._commit(self._repo("/commit/"), body)
        return self._send(404, {})

    def do_PUT(self) -> None:
        body, hub = self._body(), self.server
        if hub.failing:
            hub.failing -= 1
            return self._send(503, {})
        assert hashlib.sha256(body).hexdigest() == self.path.rpartition("/")[2]
        hub.blobs[self.path.rpartition("/")[2]] = body
        hub.uploads += 1
        return self._send(200, {})

    def _commit(self, repo: str, body: bytes) -> None:
        hub = self.server
        if hub.lost:
            hub.lost -= 1
            return self._send(503, {})
        names = []
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                hub.files[repo][value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                hub.files[repo][value["path"]] = hub.blobs[value["oid"]]
            names += [value["path"]] if "path" in value else []
        hub.commits.append(names)
        url = f"{hub.url}/{repo}/commit/{len(hub.commits):040x}"
        return self._send(200, {"commitUrl": url, "commitOid": f"{len(hub.commits):040x}", "hookOutput": ""})

    def _known(self) -> bool:
        return self.headers.get("authorization") == f"Bearer {TOKEN}"

    def _repo(self, before: str) -> str:
        return self.path.removeprefix("/api/models/").partition(before)[0]

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("transfer-encoding", ""):
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _send(self, status: int, values: Any) -> None:
        data = json.dumps(values).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _oid(content: bytes | None) -> str | None:
    """Return the Git object id of a file."""
    if content is None:
        return None
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()


@contextlib.contextmanager
def running() -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def use(hub: Hub, monkeypatch: pytest.MonkeyPatch, token: str | None = TOKEN) -> None:
    """Point the client of this process to ``hub``; other processes use HF_ENDPOINT."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
