"""Facts about an image read from a registry without a login, and unknown ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any, ClassVar

import pytest

from decorators.backends.findings import Findings
from decorators.backends.kubernetes import images
from estimator.hardware.cluster.api import Clock
from tests.http_server import serving

# Where the registry sends whoever asks for an image, without TLS; ELSEWHERE is another server
_REALMS = {
    "elsewhere": "http://ELSEWHERE/token",
    "looks-like-here": "http://127.0.0.1:1@ELSEWHERE/token",
    "another-scheme": "ftp://ELSEWHERE/token",
    "broken": "http://[ELSEWHERE/token",
    "no-realm": "",
}

_INDEX = [{"platform": {"architecture": arch}} for arch in ("amd64", "arm64", "unknown")]
_CONTENTS: dict[str, dict[str, Any]] = {
    "both": {"manifest": {"manifests": _INDEX}},
    "arm": {"manifest": {"config": {"digest": "sha256:c"}}, "blob": {"architecture": "arm64"}},
    "odd": {"manifest": {"config": []}},
}


class _Registry(BaseHTTPRequestHandler):
    """Image "open" is public, "token" needs an anonymous token, "closed" is refused."""

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path.startswith("/token"):
            self._token()
            return
        name = self.path.split("/")[2]
        host = self.headers["Host"]
        realm = _REALMS.get(name, f"http://{host}/token").replace("ELSEWHERE", _OtherRegistry.address)
        challenge = f'Bearer realm="{realm}",service="registry",scope="repository:{name}:pull"'
        if name in ("token", "closed", *_REALMS) and "Authorization" not in self.headers:
            self._answer(401, WWW_Authenticate=challenge)
        elif name in ("open", "token", *_CONTENTS):
            found = self.path.endswith(("/1", "/blobs/sha256:c"))
            kind = "blob" if "/blobs/" in self.path else "manifest"
            content = json.dumps(_CONTENTS.get(name, {}).get(kind, {})).encode()
            self._answer(200 if found else 404, content)
        else:
            self._answer(404)

    def _token(self) -> None:
        self._answer(403 if "closed" in self.path else 200, json.dumps({"token": "t"}).encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


class _OtherRegistry(_Registry):
    address = ""
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        super().do_GET()


@pytest.fixture
def registry() -> Iterator[str]:
    with serving(_Registry) as url:
        yield url.removeprefix("http://")


def _state(image: str | None, gpus: bool = False) -> tuple[str, str]:
    findings = Findings(where="here")
    images.check(image, findings, Clock(), gpus=gpus)
    return findings.rows[0].state, findings.rows[0].detail


@pytest.mark.parametrize(
    ("image", "state"),
    [
        ("open:1", "ok"),
        ("open:2", "no"),
        ("none:1", "no"),
        ("token:1", "ok"),
        ("closed:1", "unknown"),
        ("token:2", "unknown"),  # not there, or not for strangers
    ],
)
def test_the_response_of_a_registry_decides_the_state_of_an_image(
    registry: str, image: str, state: str
) -> None:
    assert _state(f"{registry}/{image}")[0] == state


@pytest.mark.parametrize("image", _REALMS)
def test_registry_tokens_are_requested_without_tls_only_from_localhost(
    registry: str, monkeypatch: pytest.MonkeyPatch, image: str
) -> None:
    with serving(_OtherRegistry, "127.0.0.2") as url:
        monkeypatch.setattr(_OtherRegistry, "address", url.removeprefix("http://"))
        state, image_state = _state(f"{registry}/{image}:1")
    assert _OtherRegistry.asked == []
    assert state == "unknown"
    assert "requires a login" in image_state


@pytest.mark.parametrize(
    ("image", "architectures"),
    [("both", {"amd64", "arm64"}), ("arm", {"arm64"}), ("odd", None), ("open", None), ("none", None)],
)
def test_the_processor_architectures_of_an_image_are_read(
    registry: str, image: str, architectures: set[str] | None
) -> None:
    assert images.look_up(f"{registry}/{image}:1", Clock())[1] == architectures


def test_a_silent_registry_gives_no_verdict() -> None:
    state, image_state = _state("127.0.0.1:9/finetune:1")
    assert state == "unknown"
    assert "does not respond" in image_state


def test_the_default_python_image_of_metaflow_is_refused_for_gpus() -> None:
    assert "no PyTorch" in _state("python:3.11", gpus=True)[1]
    assert _state(None)[0] == "unknown"


@pytest.mark.parametrize(
    ("image", "parts"),
    [
        ("python:3.11", ("registry-1.docker.io", "library/python", "3.11")),
        ("pytorch/pytorch", ("registry-1.docker.io", "pytorch/pytorch", "latest")),
        ("ghcr.io/a/b/c:x", ("ghcr.io", "a/b/c", "x")),
        ("localhost:5000/a@sha256:12", ("localhost:5000", "a", "sha256:12")),
        ("1.dkr.ecr.us-east-1.amazonaws.com/t:2", ("1.dkr.ecr.us-east-1.amazonaws.com", "t", "2")),
    ],
)
def test_an_image_name_is_parsed_like_docker(image: str, parts: tuple[str, str, str]) -> None:
    assert images.parts(image) == parts
