"""Time limits and retries of requests to the Kubernetes API server."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from decorators._metaflow.endings import print_line
from estimator.formatting import format_duration

MAX_OUTAGE_S = 300.0  # maximum outage of the API server during a run, for example for an upgrade
_retry_limit_s = MAX_OUTAGE_S
CONNECT_S = 10.0
READ_S = 15.0  # a read is repeated by urllib3 (three times) and then by retry_outages
WRITE_S = 70.0  # longer than the server's own limit of 60 s (kube-apiserver --request-timeout)
_PROBLEMS = {401: "rejects the credentials", 403: "denies access"}


def stop_retrying() -> None:
    """Disable retries: an unavailable API server is an error from now on."""
    global _retry_limit_s
    _retry_limit_s = 0.0


def limit_requests() -> None:
    """Give every request of the Kubernetes client a time limit; idempotent.

    By default the client waits without limit for a server that has stopped responding, for example after a
    load balancer or a VPN has dropped the connection.
    """
    from kubernetes.client.rest import RESTClientObject

    original = RESTClientObject.request
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def limited(self: Any, method: str, *arguments: Any, **options: Any) -> Any:
        if not options.get("_request_timeout"):
            options["_request_timeout"] = (CONNECT_S, READ_S if method.upper() == "GET" else WRITE_S)
        return original(self, method, *arguments, **options)

    RESTClientObject.request = limited


def retry_outages(fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap a request to the API server: retry while the server is unavailable or rejects the credentials.

    The credentials are read again before each retry, because they may be renewed.
    """

    @functools.wraps(fetch)
    def retried(self: Any) -> Any:
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        start, last_problem = time.monotonic(), ""
        while True:
            try:
                response = fetch(self)
                self._answered = True
                return response
            except (HTTPError, ApiException) as error:
                status = getattr(error, "status", None)
                unavailable = not status or status in (401, 429) or status >= 500
                # A server that has just started returns 403 until it has loaded the roles.
                unavailable = unavailable or (status == 403 and hasattr(self, "_answered"))
                if not unavailable or time.monotonic() - start >= _retry_limit_s:
                    raise
            problem = _PROBLEMS.get(status or 0, "does not respond")
            if problem != last_problem:
                print_line(f"The Kubernetes API {problem}; retrying for {format_duration(_retry_limit_s)}.")
                last_problem = problem
            time.sleep(2)
            if status == 401:
                self._client._refresh_client()

    return retried
