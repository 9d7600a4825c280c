"""Patience with an API server that is gone for a while."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from decorators._metaflow.endings import say
from estimator.formatting import format_duration

API_SERVER_GONE_S = 300.0  # how long an API server may be gone under a run, as while it is upgraded
_patience_s = API_SERVER_GONE_S
_PROBLEMS = {401: "doesn't take this login any more", 403: "allows this no longer"}


def hurry() -> None:
    """From now on an API server that does not answer is asked no more."""
    global _patience_s
    _patience_s = 0.0


def with_patience(fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A question to the API server, asked again while that doesn't answer, or takes the login for outdated.

    The login is read again each time, as someone may renew it.
    """

    @functools.wraps(fetch)
    def patient(self: Any) -> Any:
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        began, last_problem = time.monotonic(), ""
        while True:
            try:
                answer = fetch(self)
                self._answered = True
                return answer
            except (HTTPError, ApiException) as error:
                status = getattr(error, "status", None)
                gone = not status or status in (401, 429) or status >= 500
                # A server that has just started refuses for a moment what it has not yet read the roles for.
                gone = gone or (status == 403 and hasattr(self, "_answered"))
                if not gone or time.monotonic() - began >= _patience_s:
                    raise
            problem = _PROBLEMS.get(status or 0, "doesn't answer")
            if problem != last_problem:
                say(f"The Kubernetes API {problem}; asking on for {format_duration(_patience_s)}.")
                last_problem = problem
            time.sleep(2)
            if status == 401:
                self._client._refresh_client()

    return patient
