"""The one client of a Kubernetes API server: plain JSON, a login like kubectl's, a limit on each call.

The kubernetes library reads the kubeconfig (or the pod's own access), signs in and checks certificates; what
is asked goes by its path, as JobSet, Kueue and Karpenter have no classes there.
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

_log = logging.getLogger(__name__)

Json = dict[str, Any]
IN_CLUSTER = "in-cluster"
CALL_S = 5.0  # one question to the API
OVERALL_S = 20.0
PAGE = 500  # objects in one answer, as kubectl asks for


class ApiRefusedError(Exception):
    """The server's answer with an error status; ``words`` are its own, empty where it has none."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words or f"status {status}")
        self.status = status
        self.words = words


class UnreachableError(Exception):
    """No answer, or none of a Kubernetes API."""


class UntrustedError(UnreachableError):
    """No one vouches for the server's certificate."""


class NoKubernetesError(UnreachableError):
    """Something else answers at that address."""

    def __init__(self) -> None:
        super().__init__("it doesn't answer as a Kubernetes API does")


def api_error(
    error: ApiRefusedError | UnreachableError, server: str = "", *, permission: str = ""
) -> UserError:
    """The error for a request that an API server did not answer or has refused.

    ``server``: its context or address; ``permission``: the RBAC rule that allows the request.
    """
    api = f"The Kubernetes API of {server}" if server else "The Kubernetes API"
    if isinstance(error, NoKubernetesError):
        return UserError(f"{api} can't be reached: {error}.", "Look at `server:` in the kubeconfig.")
    if isinstance(error, UntrustedError):
        return UserError(
            f"{api} can't be reached: {error}.",
            "Look at `server:` and `certificate-authority-data:` in the kubeconfig.",
        )
    if isinstance(error, UnreachableError):
        return UserError(
            f"{api} can't be reached: {error}.",
            "Is the cluster up, and the VPN? `kubectl cluster-info` shows the same.",
        )
    if error.status == 401:
        return UserError(
            f"{api} does not accept this login: it is wrong or has expired (401).",
            "Log in again; `kubectl auth can-i list pods` tells whether it works.",
        )
    if error.status == 403:
        return UserError(
            f"{api} does not allow the request: {error.words.rstrip('.') or 'forbidden'}.",
            f"It needs {permission}." if permission else "Ask for a role that allows it.",
        )
    return UserError(f"{api} answers with status {error.status}.", "Try `kubectl get nodes`.")


def failure_of(error: BaseException) -> ApiRefusedError | UnreachableError:
    """Classify an exception of the kubernetes library, or of whatever it has caused."""
    from kubernetes.client import ApiException

    origin: BaseException | None = error
    while origin is not None and not isinstance(origin, ApiException):
        origin = origin.__cause__ or origin.__context__
    if origin is None:
        return UnreachableError(plain(error))
    try:
        words = str(json.loads(origin.body or "{}")["message"])
    except (ValueError, KeyError):
        words = str(origin.reason or origin)
    words = " ".join(words.split())
    return ApiRefusedError(origin.status, words) if origin.status else UnreachableError(words)


@dataclass(kw_only=True, slots=True)
class Clock:
    """The time that asking a cluster may take, in seconds."""

    overall_s: float = OVERALL_S
    call_s: float = CALL_S
    started: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """Seconds for the next question; 0 where the time is over."""
        return max(0.0, min(self.call_s, self.started + self.overall_s - time.monotonic()))


def found_at(get: Callable[..., Json], path: str) -> Json | None:
    """Return the result of ``get`` for a path; None if the cluster has nothing there. Raises what ``get``
    raises.
    """
    try:
        return get(path)
    except ApiRefusedError as error:
        if error.status != 404:
            raise
        return None


def list_all(get: Callable[..., Json], path: str, kind: str, **query: str) -> list[Json]:
    """Read a list of objects page by page. Raises NoKubernetesError for another kind, else as ``get``."""
    items: list[Json] = []
    page = {"limit": str(PAGE), **query}
    while True:
        answer = get(path, **page)
        if answer.get("kind") != kind:
            raise NoKubernetesError
        items += answer.get("items") or []
        token = (answer.get("metadata") or {}).get("continue")
        if not token:
            return items
        page["continue"] = token


class ClusterApi:
    """The cluster of the current context, or the one that this pod runs in. Use it in a ``with``.

    Raises UserError where the kubernetes library or an access is missing; ``purpose`` is what needs it.
    Requests raise ApiRefusedError and UnreachableError, the latter also once the clock's time is over.
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
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._client.close()

    def get(self, path: str, **query: str) -> Json:
        """Read an object or a list of them."""
        return self._ask("GET", path + (f"?{urlencode(query)}" if query else ""))

    def delete(self, path: str) -> Json:
        """Delete an object, and what belongs to it in the background."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        return self._ask("DELETE", path, body)

    def patch(self, path: str, body: Json) -> Json:
        """Lay values over an object's; None takes one away, a list of plain values or taints is replaced."""
        return self._ask("PATCH", path, body, "application/strategic-merge-patch+json")

    def apply(self, path: str, body: Json) -> Json:
        """Create an object, or change it to these values (server-side apply)."""
        query = urlencode({"fieldManager": "finetune", "force": "true"})
        return self._ask("PATCH", f"{path}?{query}", body, "application/apply-patch+yaml")

    def may(self, verb: str, resource: str, **attributes: str) -> bool:
        """Whether this login may do that; what is left out of ``group``, ``namespace``, ``name`` is any."""
        attributes = {"verb": verb, "resource": resource, **attributes}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": {key: value for key, value in attributes.items() if value}},
        }
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        return bool((self._ask("POST", path, review).get("status") or {}).get("allowed"))

    def _ask(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        kind: str = "application/json",
    ) -> Json:
        from urllib3.exceptions import HTTPError, SSLError

        timeout_s = self.clock.left()
        if timeout_s <= 0:
            raise UnreachableError("the time for asking is over")
        headers = {"Accept": "application/json", "Content-Type": kind}
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
        except SSLError as error:
            _log.info("Kubernetes %s %s: %s", method, path, plain(error))
            raise UntrustedError(plain(error)) from None
        except HTTPError as error:
            _log.info("Kubernetes %s %s: %s", method, path, plain(error))
            raise UnreachableError(plain(error)) from None
        _log.debug("Kubernetes %s %s: status %d", method, path, answer.status)
        try:
            content = json.loads(answer.data)
        except ValueError:
            content = {}
        if answer.status >= 400:
            words = content.get("message") if isinstance(content, dict) else None
            raise ApiRefusedError(answer.status, str(words or ""))
        if not isinstance(content, dict) or not content:
            raise NoKubernetesError
        return content


def access(context: str | None) -> tuple[str, Any]:
    """(name, client configuration) of a kubeconfig's context, or of the cluster that this pod runs in.

    Reads KUBECONFIG each time; the client library does so only when it is imported. Raises UserError.
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
                    f"This pod's access to its cluster can't be read: {error}", "Give it a service account."
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
            f"The kubeconfig {_kubeconfig()} can't be used: {plain(error)}",
            "`kubectl config view` shows what is in it.",
        ) from None
    if not name:
        raise UserError(
            f"The kubeconfig {_kubeconfig()} has no current context.",
            f"Choose one: --context NAME ({', '.join(names[:5])})."
            if names
            else "It has no contexts at all.",
        )
    if name not in names:
        raise UserError(
            f"There is no context {name!r} in the kubeconfig {_kubeconfig()}.",
            did_you_mean(name, names) or f"It has {', '.join(names[:5]) or 'no contexts at all'}.",
        )
    return name, configuration


def _kubeconfig() -> str:
    return os.environ.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())


def plain(error: object) -> str:
    """An error's last clause, on one line: urllib3 and the client nest theirs."""
    return " ".join(str(error).rsplit(">: ", 1)[-1].split())
