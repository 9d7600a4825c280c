"""Requests to a Kubernetes API server as plain JSON, also from another network namespace."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import requests

_TIMEOUT_S = 20.0
Json = dict[str, Any]
Inside = Callable[[], AbstractContextManager[None]]  # in its block this thread is in a network, as Hub.inside


class ApiError(Exception):
    """An error of the API server: ``status`` is the HTTP status, the text is that of the server."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Api:
    """One user of the API server. Safe to use from several threads."""

    def __init__(self, url: str, *, authority: Path, token: str, inside: Inside = nullcontext) -> None:
        self.url, self._inside = url, inside
        self._authority, self._token = authority, token
        self._of_thread = threading.local()

    def get(self, path: str, **query: str) -> Json:
        return self._request("GET", path, params=query)

    def items(self, path: str, **query: str) -> list[Json]:
        """Return the objects of a list."""
        return list(self.get(path, **query)["items"])

    def create(self, path: str, body: Json) -> Json:
        return self._request("POST", path, json=body)

    def replace(self, path: str, body: Json) -> Json:
        return self._request("PUT", path, json=body)

    def patch(self, path: str, body: Json, kind: Literal["strategic-merge", "merge"] = "merge") -> Json:
        return self._request(
            "PATCH", path, json=body, headers={"Content-Type": f"application/{kind}-patch+json"}
        )

    def delete(self, path: str, **options: Any) -> None:
        """``options`` are those of DeleteOptions; a missing object is no error."""
        try:
            self._request("DELETE", path, json={"apiVersion": "v1", "kind": "DeleteOptions", **options})
        except ApiError as error:
            if error.status != 404:
                raise

    def exists(self, path: str) -> bool:
        try:
            self.get(path)
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return True

    def ready(self) -> bool:
        """Return whether the server responds that it is ready."""
        try:
            with self._inside():
                return bool(self._session().get(f"{self.url}/readyz", timeout=_TIMEOUT_S).ok)
        except requests.RequestException:
            return False

    def _request(self, method: str, path: str, **request_options: Any) -> Json:
        """Send a request; raises ApiError for an error and requests.RequestException without a connection."""
        with self._inside():
            answer = self._session().request(method, self.url + path, timeout=_TIMEOUT_S, **request_options)
        if not answer.ok:
            try:
                message = str(answer.json().get("message"))
            except ValueError:
                message = answer.text
            raise ApiError(answer.status_code, message)
        document: Json = answer.json()
        return document

    def _session(self) -> requests.Session:
        session: requests.Session | None = getattr(self._of_thread, "session", None)
        if session is None:
            session = self._of_thread.session = requests.Session()
            session.trust_env = False  # REQUESTS_CA_BUNDLE would win over the server's own authority
            session.verify = str(self._authority)
            session.headers["Authorization"] = f"Bearer {self._token}"
        return session
