"""A Kubernetes API server asked in plain JSON, with the login of the kubeconfig, and a limit on each call."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import TracebackType
from typing import Any
from urllib.parse import urlencode

from estimator.errors import UserError
from estimator.hardware import cluster_nodes

Json = dict[str, Any]


class ApiRefusedError(Exception):
    """The server's answer with an error status, in its own words."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class UnreachableError(Exception):
    """No answer at all."""


def found_at(get: Callable[..., Json], path: str) -> Json | None:
    """What ``get`` tells of a path; None where the cluster has nothing there. Raises what ``get`` raises."""
    try:
        return get(path)
    except ApiRefusedError as error:
        if error.status != 404:
            raise
        return None


class ClusterApi:
    """The cluster of the current context, or the one that this pod runs in. Use it in a ``with``.

    Raises UserError where the kubernetes library or an access is missing.
    """

    def __init__(self, context: str | None = None) -> None:
        try:
            from kubernetes import client
        except ImportError:
            raise UserError(
                "Running on Kubernetes needs the kubernetes library, which is not installed.",
                "pip install 'metaflow-finetune[kubernetes]'",
            ) from None
        self.context, self._configuration = cluster_nodes.access(context)
        self._client = client.ApiClient(self._configuration)

    @property
    def host(self) -> str:
        return str(self._configuration.host)

    def __enter__(self) -> ClusterApi:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._client.close()

    def get(self, path: str, timeout_s: float, **query: str) -> Json:
        """Raises ApiRefusedError, UnreachableError."""
        return self._ask("GET", path + (f"?{urlencode(query)}" if query else ""), timeout_s)

    def post(self, path: str, body: Json, timeout_s: float) -> Json:
        return self._ask("POST", path, timeout_s, body)

    def delete(self, path: str, timeout_s: float) -> Json:
        """Delete an object, and what belongs to it in the background."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        return self._ask("DELETE", path, timeout_s, body)

    def _ask(self, method: str, path: str, timeout_s: float, body: Json | None = None) -> Json:
        from urllib3.exceptions import HTTPError

        if timeout_s <= 0:
            raise UnreachableError("the time for asking is over")
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        for login in self._configuration.auth_settings().values():
            if login.get("value"):
                headers[login["key"]] = login["value"]
        try:
            answer = self._client.rest_client.pool_manager.request(
                method,
                self.host + path,
                body=json.dumps(body) if body is not None else None,
                headers=headers,
                timeout=timeout_s,
                retries=False,
            )
        except HTTPError as error:
            raise UnreachableError(" ".join(str(error).rsplit(">: ", 1)[-1].split())) from None
        try:
            read = json.loads(answer.data)
        except ValueError:
            read = {}
        if answer.status >= 400:
            said = read.get("message") if isinstance(read, dict) else None
            raise ApiRefusedError(answer.status, said or f"status {answer.status}")
        if not isinstance(read, dict) or not read:
            raise UnreachableError("it doesn't answer as a Kubernetes API does")
        return read
