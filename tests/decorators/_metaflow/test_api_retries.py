"""Requests to an API server: limited in time, retried during an outage, not after a refusal."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest
from kubernetes.client import ApiClient, ApiException, BatchV1Api, Configuration
from kubernetes.client.rest import RESTClientObject
from urllib3.exceptions import HTTPError, MaxRetryError

from decorators._metaflow import api_retries
from tests.decorators.backends.kubernetes.test_errors import answer

FORBIDDEN = 'jobs.batch is forbidden: User "ann" cannot create resource "jobs" in API group "batch"'
GONE = MaxRetryError(None, "/apis")  # type: ignore[arg-type]


class NodeRequest:
    """A replacement for RunningJobSet of Metaflow; each query gets the next of these responses."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self._client, self.renewed = list(answers), self, 0

    def _refresh_client(self) -> None:
        self.renewed += 1

    def fetch(self) -> Any:
        reply = self.answers.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply


def test_requests_are_retried_until_a_restarted_server_accepts_the_login(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(api_retries, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: None))
    request = NodeRequest("first", GONE, GONE, answer(503, "starting"), answer(403, FORBIDDEN), "second")
    patient = api_retries.retry_outages(NodeRequest.fetch)
    assert (patient(request), patient(request)) == ("first", "second")
    output = capsys.readouterr().err
    assert output.count("The Kubernetes API does not respond; retrying for 5 min.") == 1


def test_a_rejected_login_is_reloaded_before_each_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_retries, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: None))
    request = NodeRequest(answer(401, "Unauthorized"), answer(401, "Unauthorized"), "then")
    assert api_retries.retry_outages(NodeRequest.fetch)(request) == "then"
    assert request.renewed == 2


@pytest.mark.parametrize("error", [answer(403, FORBIDDEN), answer(404, "not found")])
def test_a_permanent_refusal_is_not_retried(error: ApiException) -> None:
    with pytest.raises(ApiException):
        api_retries.retry_outages(NodeRequest.fetch)(NodeRequest(error))


def test_retries_end_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_retries, "_retry_limit_s", 0.0)
    with pytest.raises(MaxRetryError):
        api_retries.retry_outages(NodeRequest.fetch)(NodeRequest(GONE))


@pytest.mark.parametrize("call", ["read_namespaced_job", "delete_namespaced_job"])
def test_a_request_to_a_server_that_stops_responding_ends_after_the_limit(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RESTClientObject, "request", RESTClientObject.request)  # restored after the test
    monkeypatch.setattr(api_retries, "READ_S", 0.1)
    monkeypatch.setattr(api_retries, "WRITE_S", 0.1)
    api_retries.limit_requests()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with ApiClient(Configuration(host=address)) as client, pytest.raises(HTTPError) as error:
            getattr(BatchV1Api(client), call)("train", "default")
    assert "timed out" in str(error.value)
