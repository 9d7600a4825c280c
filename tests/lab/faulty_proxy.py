"""An HTTP proxy that can be slow or unreachable, respond with 503, or refuse credentials."""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from tests.lab.api import Inside

_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "upgrade", "host"}
_EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
_Answer = tuple[int, dict[str, str], bytes, str | None]  # status, headers, body, Content-Length
_BUSY = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


@dataclass
class Faults:
    """The current faults; a test may change them at any time."""

    busy_share: float = 0.0  # of the requests, answered 503
    delay_s: float = 0.0  # before each answer
    expired: bool = False  # every request is answered 400, as S3 does: the credentials' time is over
    gone: bool = False  # every connection is cut without an answer
    refused: int = 0  # how many were answered 503 so far
    passed: int = 0
    random: random.Random = field(default_factory=lambda: random.Random(1))


def _handler(target: str, inside: Inside, faults: Faults) -> type[BaseHTTPRequestHandler]:
    host, port = urlsplit(target).hostname or "", urlsplit(target).port or 80

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _forward(self) -> None:
            body = self._body()
            time.sleep(faults.delay_s)
            if faults.gone:
                self.close_connection = True
                return
            if faults.expired:
                self._answer(400, {"Content-Type": "application/xml"}, _EXPIRED)
                return
            if faults.random.random() < faults.busy_share:
                faults.refused += 1
                self._answer(503, {"Content-Type": "application/xml"}, _BUSY)
                return
            faults.passed += 1
            forwarded_headers = {
                name: value for name, value in self.headers.items() if name.lower() not in _HOP
            }
            forwarded_headers |= {"Content-Length": str(len(body)), "Host": f"{host}:{port}"}
            self._answer(*self._query_target(forwarded_headers, body))

        def _query_target(self, headers: dict[str, str], body: bytes) -> _Answer:
            """Forward a request and retry if the target drops the connection, which is not a tested fault."""
            for _ in range(2):
                with suppress(ConnectionError, http.client.HTTPException):
                    return self._query_target_once(headers, body)
            return self._query_target_once(headers, body)

        def _query_target_once(self, headers: dict[str, str], body: bytes) -> _Answer:
            with inside():
                upstream = http.client.HTTPConnection(host, port, timeout=60)
                upstream.connect()
            with closing(upstream):
                upstream.request(self.command, self.path, body, headers)
                answer = upstream.getresponse()
                content, length = answer.read(), answer.getheader("Content-Length")
                return answer.status, dict(answer.getheaders()), content, length

        def do_GET(self) -> None:
            self._forward()

        def do_HEAD(self) -> None:
            self._forward()

        def do_PUT(self) -> None:
            self._forward()

        def do_POST(self) -> None:
            self._forward()

        def do_DELETE(self) -> None:
            self._forward()

        def _body(self) -> bytes:
            if "chunked" in self.headers.get("Transfer-Encoding", ""):
                parts = []
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def _answer(
            self, status: int, headers: dict[str, str], content: bytes, length: str | None = None
        ) -> None:
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in {*_HOP, "content-length", "date", "server"}:
                    self.send_header(name, value)
            of_head = length if self.command == "HEAD" else None
            self.send_header("Content-Length", of_head or str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Log nothing; tests read the faults instead."""

    return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that have disconnected."""


@contextmanager
def before(
    target: str, faults: Faults, *, address: str = "127.0.0.1", inside: Inside = nullcontext
) -> Iterator[str]:
    """Yield the address of a proxy for ``target`` (http://host:port)."""
    with inside():
        server = _Server((address, 0), _handler(target, inside, faults))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://{address}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
