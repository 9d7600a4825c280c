"""The one client of a Kubernetes API: what it sends, what it raises, and that it never waits for long."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import pytest

from estimator.hardware.cluster.api import (
    ApiRefusedError,
    Clock,
    ClusterApi,
    NoKubernetesError,
    UnreachableError,
    UntrustedError,
)
from tests.checklist.servers import kubeconfig
from tests.http_server import serving

PATH = "/apis/example.com/v1/things/one"


class Server:
    """Notes what is sent, and answers what it is told to."""

    requests: ClassVar[list[tuple[str, str, dict[str, str], Any]]] = []
    status, body, delay_s = 200, b'{"kind": "Thing"}', 0.0


@pytest.fixture
def server() -> Server:
    Server.requests.clear()
    return Server()


@pytest.fixture
def api(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterApi]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            sent = json.loads(body) if body else None
            server.requests.append((self.command, self.path, dict(self.headers), sent))
            time.sleep(server.delay_s)
            self.send_response(server.status)
            self.send_header("Content-Length", str(len(server.body)))
            self.end_headers()
            self.wfile.write(server.body)

        do_GET = do_POST = do_PATCH = do_DELETE = answer  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    with serving(Handler) as url:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, url)))
        with ClusterApi() as api:
            yield api


def test_each_call_sends_the_login_and_its_content_type(api: ClusterApi, server: Server) -> None:
    assert api.get(PATH, labelSelector="a=b c") == {"kind": "Thing"}
    api.patch(PATH, {"spec": {"gone": None}})
    api.delete(PATH)
    (get, patch, delete) = server.requests
    assert get[:2] == ("GET", f"{PATH}?labelSelector=a%3Db+c")
    assert all(headers["authorization"] == "Bearer t" for _, _, headers, _ in server.requests)
    assert patch[2]["Content-Type"] == "application/strategic-merge-patch+json"
    assert patch[3] == {"spec": {"gone": None}}
    assert delete[3]["propagationPolicy"] == "Background"


def test_calls_are_logged_by_method_path_and_status_without_the_login(
    api: ClusterApi, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="estimator.hardware.cluster.api")
    api.get(PATH)
    server.status = 403
    with pytest.raises(ApiRefusedError):
        api.delete(PATH)
    lines = [record.getMessage() for record in caplog.records if PATH in record.getMessage()]
    assert ["GET" in lines[0], "200" in lines[0], "DELETE" in lines[1], "403" in lines[1]] == [True] * 4
    assert "Bearer" not in caplog.text


def test_a_permission_request_omits_empty_attributes(api: ClusterApi, server: Server) -> None:
    server.body = b'{"status": {"allowed": true}}'
    assert api.may("list", "pods", namespace="", name="n")
    (asked,) = [body["spec"]["resourceAttributes"] for _, _, _, body in server.requests]
    assert asked == {"verb": "list", "resource": "pods", "name": "n"}
    server.body = b'{"status": {}}'
    assert not api.may("list", "pods")


@pytest.mark.parametrize(
    ("body", "words", "text"),
    [(b'{"message": "no such thing"}', "no such thing", "no such thing"), (b"<html>", "", "status 404")],
)
def test_a_refusal_has_the_status_and_message_of_the_server(
    api: ClusterApi, server: Server, body: bytes, words: str, text: str
) -> None:
    server.status, server.body = 404, body
    with pytest.raises(ApiRefusedError) as caught:
        api.get(PATH)
    assert (caught.value.status, caught.value.message, str(caught.value)) == (404, words, text)


@pytest.mark.parametrize("body", [b"<html>a login page</html>", b"[]", b"{}", b""])
def test_servers_that_are_not_a_kubernetes_api_are_recognized(
    api: ClusterApi, server: Server, body: bytes
) -> None:
    server.body = body
    with pytest.raises(NoKubernetesError):
        api.get(PATH)


def test_no_call_exceeds_its_time_limit_or_starts_after_it(api: ClusterApi, server: Server) -> None:
    server.delay_s = 3
    api.clock = Clock(call_s=0.3)
    began = time.monotonic()
    with pytest.raises(UnreachableError):
        api.get(PATH)
    assert time.monotonic() - began < 2.5
    api.clock = Clock(overall_s=0)
    with pytest.raises(UnreachableError, match="the time limit for requests was reached"):
        api.get(PATH)


def test_an_untrusted_certificate_raises_untrusted_error(
    api: ClusterApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, api.host.replace("http:", "https:"))))
    with ClusterApi() as other, pytest.raises(UntrustedError):
        other.get(PATH)
