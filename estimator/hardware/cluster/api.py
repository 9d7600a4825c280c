"""Client of the Kubernetes API: plain JSON, authentication like kubectl, a time limit per call.

The kubernetes library reads the kubeconfig (or the service account of the pod), authenticates and checks
certificates; requests use paths, as the library has no classes for JobSet, Kueue and Karpenter.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlencode

from estimator.errors import UserError
from estimator.names import did_you_mean
from estimator.untrusted import parse_json

_log = logging.getLogger(__name__)

Json = dict[str, Any]
IN_CLUSTER = "in-cluster"
CALL_S = 5.0  # time limit of one request
OVERALL_S = 20.0
PAGE = 500  # objects per page, as in kubectl


class ApiRefusedError(Exception):
    """Response with an error status; ``message``: message of the server, or empty."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message or f"status {status}")
        self.status = status
        self.message = message


class UnreachableError(Exception):
    """No response, or not one of a Kubernetes API."""


class UntrustedError(UnreachableError):
    """The certificate of the server is not trusted."""


class NoKubernetesError(UnreachableError):
    """The server is not a Kubernetes API."""

    def __init__(self) -> None:
        super().__init__("the server is not a Kubernetes API")


def api_error(
    error: ApiRefusedError | UnreachableError, server: str = "", *, permission: str = ""
) -> UserError:
    """Return the error for a request that failed or was refused.

    ``server``: its context or address; ``permission``: the RBAC rule that allows the request.
    """
    api = f"The Kubernetes API of {server}" if server else "The Kubernetes API"
    if isinstance(error, NoKubernetesError):
        return UserError(f"{api} cannot be reached: {error}.", "Check `server:` in the kubeconfig.")
    if isinstance(error, UntrustedError):
        return UserError(
            f"{api} cannot be reached: {error}.",
            "Check `server:` and `certificate-authority-data:` in the kubeconfig.",
        )
    if isinstance(error, UnreachableError):
        return UserError(
            f"{api} cannot be reached: {error}.",
            "Check cluster and VPN, such as with `kubectl cluster-info`.",
        )
    if error.status == 401:
        return UserError(
            f"{api} does not accept this login: it is wrong or has expired (401).",
            "Log in again, and check with `kubectl auth can-i list pods`.",
        )
    if error.status == 403:
        return UserError(
            f"{api} does not allow the request: {error.message.rstrip('.') or 'forbidden'}.",
            f"It needs {permission}." if permission else "Ask for a role that allows it.",
        )
    return UserError(f"{api} answers with status {error.status}.", "Try `kubectl get nodes`.")


def failure_of(error: BaseException) -> ApiRefusedError | UnreachableError:
    """Classify an exception raised by the kubernetes library."""
    from kubernetes.client import ApiException

    origin: BaseException | None = error
    while origin is not None and not isinstance(origin, ApiException):
        origin = origin.__cause__ or origin.__context__
    if origin is None:
        return UnreachableError(last_clause(error))
    try:
        message = str(parse_json(origin.body or "{}")["message"])
    except (ValueError, KeyError, TypeError):
        message = str(origin.reason or origin)
    message = " ".join(message.split())
    return ApiRefusedError(origin.status, message) if origin.status else UnreachableError(message)


@dataclass(kw_only=True, slots=True)
class Clock:
    """Time limit for all requests to a cluster, in seconds."""

    overall_s: float = OVERALL_S
    call_s: float = CALL_S
    started: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """Return the seconds left for the next request; 0 after the limit."""
        return max(0.0, min(self.call_s, self.started + self.overall_s - time.monotonic()))


def get_or_none(get: Callable[..., Json], path: str) -> Json | None:
    """Return the result of ``get`` for a path, or None for status 404. Raises what ``get`` raises."""
    try:
        return get(path)
    except ApiRefusedError as error:
        if error.status != 404:
            raise
        return None


def list_all(get: Callable[..., Json], path: str, kind: str, **query: str) -> list[Json]:
    """Read a list of objects page by page. Raises what ``get`` raises; NoKubernetesError for another kind."""
    items: list[Json] = []
    page = {"limit": str(PAGE), **query}
    while True:
        response = get(path, **page)
        if response.get("kind") != kind:
            raise NoKubernetesError
        items += response.get("items") or []
        token = (response.get("metadata") or {}).get("continue")
        if not token:
            return items
        page["continue"] = token


class ClusterApi:
    """Context manager: the API of a kubeconfig context, or of the cluster that this pod runs in.

    Raises UserError if the kubernetes library or access is missing; ``purpose`` is for its message. Requests
    raise ApiRefusedError and UnreachableError, the latter also after the time limit of the clock.
    """

    def __init__(
        self,
        context: str | None = None,
        *,
        purpose: str = "Running on Kubernetes",
        clock: Clock | None = None,
    ) -> None:
        try:
            from kubernetes import client
        except ImportError:
            raise UserError(
                f"{purpose} needs the kubernetes library, which is not installed.",
                "pip install 'metaflow-finetune[kubernetes]'",
            ) from None
        self.context, self._configuration = access(context)
        self._client = client.ApiClient(self._configuration)
        self.clock = clock or Clock()

    @property
    def host(self) -> str:
        return str(self._configuration.host)

    @property
    def server(self) -> str:
        """Context and address, for messages."""
        return f"context {self.context!r} ({self.host})"

    def __enter__(self) -> ClusterApi:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.close()

    def get(self, path: str, **query: str) -> Json:
        """Read an object or a list of them."""
        return self._request("GET", path + (f"?{urlencode(query)}" if query else ""))

    def delete(self, path: str) -> Json:
        """Delete an object, and its dependents in the background."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        return self._request("DELETE", path, body)

    def patch(self, path: str, body: Json) -> Json:
        """Merge values into an object; None removes one, and lists of plain values or taints are replaced."""
        return self._request("PATCH", path, body, "application/strategic-merge-patch+json")

    def apply(self, path: str, body: Json) -> Json:
        """Create or update an object (server-side apply)."""
        query = urlencode({"fieldManager": "finetune", "force": "true"})
        return self._request("PATCH", f"{path}?{query}", body, "application/apply-patch+yaml")

    def may(self, verb: str, resource: str, **attributes: str) -> bool:
        """Return whether this login has a permission; ``group``, ``namespace``, ``name`` default to any."""
        attributes = {"verb": verb, "resource": resource, **attributes}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": {key: value for key, value in attributes.items() if value}},
        }
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        return bool((self._request("POST", path, review).get("status") or {}).get("allowed"))

    def _request(
        self, method: str, path: str, body: Json | None = None, kind: str = "application/json"
    ) -> Json:
        from urllib3.exceptions import HTTPError, SSLError

        timeout_s = self.clock.left()
        if timeout_s <= 0:
            raise UnreachableError("the time limit for requests was reached")
        headers = {"Accept": "application/json", "Content-Type": kind}
        for login in self._configuration.auth_settings().values():
            if login.get("value"):
                headers[login["key"]] = login["value"]
        try:
            response = self._client.rest_client.pool_manager.request(
                method,
                self.host + path,
                body=json.dumps(body) if body is not None else None,
                headers=headers,
                timeout=timeout_s,
                retries=False,
            )
        except SSLError as error:
            _log.info("Kubernetes %s %s: %s", method, path, last_clause(error))
            raise UntrustedError(last_clause(error)) from None
        except HTTPError as error:
            _log.info("Kubernetes %s %s: %s", method, path, last_clause(error))
            raise UnreachableError(last_clause(error)) from None
        _log.debug("Kubernetes %s %s: status %d", method, path, response.status)
        try:
            content = parse_json(response.data)
        except ValueError:
            content = {}
        if response.status >= 400:
            message = content.get("message") if isinstance(content, dict) else None
            raise ApiRefusedError(response.status, str(message or ""))
        if not isinstance(content, dict) or not content:
            raise NoKubernetesError
        return content


def access(context: str | None) -> tuple[str, Any]:
    """Return (name, client configuration) of a kubeconfig context, or of the cluster that this pod runs in.

    Reads KUBECONFIG on each call; the client library does so only on import. Raises UserError.
    """
    from kubernetes import client, config
    from yaml import YAMLError

    configuration = client.Configuration()
    files = [Path(part).expanduser() for part in _kubeconfig().split(os.pathsep) if part]
    if not any(file.is_file() for file in files):
        if context is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            try:
                config.load_incluster_config(client_configuration=configuration)
            except config.ConfigException as error:
                raise UserError(
                    f"Cannot read this pod's cluster credentials: {error}", "Give it a service account."
                ) from None
            return IN_CLUSTER, configuration
        raise UserError(
            f"There is no kubeconfig at {os.pathsep.join(map(str, files))}.",
            "Set KUBECONFIG, or write one with your cloud's command, such as `aws eks update-kubeconfig`.",
        )
    try:
        merged = config.kube_config.KubeConfigMerger(_kubeconfig()).config
        value: Mapping[str, Any] = merged.value if merged is not None else {}
        names = [item["name"] for item in value.get("contexts") or []]
        name = context or value.get("current-context") or ""
        if name in names:
            config.load_kube_config(_kubeconfig(), context=name, client_configuration=configuration)
    except (config.ConfigException, YAMLError, OSError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"The kubeconfig {_kubeconfig()} cannot be used: {last_clause(error)}",
            "`kubectl config view` shows what is in it.",
        ) from None
    if not name:
        raise UserError(
            f"The kubeconfig {_kubeconfig()} has no current context.",
            f"Choose one: --context NAME ({', '.join(names[:5])})." if names else "It has no contexts.",
        )
    if name not in names:
        raise UserError(
            f"There is no context {name!r} in the kubeconfig {_kubeconfig()}.",
            did_you_mean(name, names) or f"It has {', '.join(names[:5]) or 'no contexts'}.",
        )
    return name, configuration


def _kubeconfig() -> str:
    return os.environ.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())


def last_clause(error: object) -> str:
    """Return the last clause of an error on one line, as urllib3 and the client nest messages."""
    return " ".join(str(error).rsplit(">: ", 1)[-1].split())
