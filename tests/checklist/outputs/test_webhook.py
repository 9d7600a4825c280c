"""The webhook gets a message within its limits; a failure is one line without the address."""

from __future__ import annotations

import dataclasses
import time
from email.message import Message
from typing import Any

import pytest

from checklist.outputs import webhook
from checklist.result import Result
from tests.checklist.servers import SECRET, busy_hook, hook


def test_the_webhook_gets_verdict_finding_and_advice(failing: Result) -> None:
    with hook() as (url, received):
        assert webhook.send(failing, url, title="prod <cluster> & co") is None
    (body,) = received
    assert body["text"].startswith("prod &lt;cluster&gt; &amp; co: FAIL. host-2 is slow in both directions")
    texts = [block["text"]["text"] for block in body["blocks"]]
    assert all(block["type"] == "section" for block in body["blocks"])
    assert "3 of 4 nodes healthy, bad: host-2." in texts
    assert any("`kubectl drain host-2" in text for text in texts)


def test_a_message_stays_within_the_limits_of_slack(failing: Result) -> None:
    many = tuple(dataclasses.replace(failing.findings[0], title="x" * 5000) for _ in range(80))
    blocks = webhook.message(dataclasses.replace(failing, findings=many))["blocks"]
    assert len(blocks) <= 50
    assert all(len(block["text"]["text"]) <= 3000 for block in blocks)
    assert blocks[-1]["text"]["text"] == "And 70 more findings."


@pytest.mark.parametrize("status", [400, 403, 404, 500, 302])
def test_a_refusing_webhook_is_reported_in_one_line_without_its_address(failing: Result, status: int) -> None:
    with hook(status) as (url, _):
        line = webhook.send(failing, url)
    assert "SECRET" not in line
    assert "127.0.0.1" not in line
    assert line.endswith("The result is kept.")


def test_an_unreachable_webhook_is_reported_in_one_line_without_its_address(failing: Result) -> None:
    line = webhook.send(failing, f"http://127.0.0.1:9/services/{SECRET}")
    assert (
        line == "The webhook could not be called: no connection (ConnectionRefusedError). The result is kept."
    )
    line = webhook.send(failing, f"ftp://host/{SECRET}")
    assert line == "The webhook was not called: $CHECKLIST_WEBHOOK_URL is not an http(s) address."
    bad = webhook.send(failing, f"http://[{SECRET}")
    assert bad is not None
    assert "SECRET" not in bad


@pytest.mark.parametrize("how", [{"delay_s": 5.0}, {"drip": True}], ids=["silent", "dripping"])
def test_a_slow_webhook_is_abandoned_at_its_time_limit(failing: Result, how: Any) -> None:
    start = time.monotonic()
    with hook(**how) as (url, _):
        line = webhook.send(failing, url, timeout_s=0.5)
        elapsed_s = time.monotonic() - start
    assert elapsed_s < 2
    assert line == "The webhook could not be called: no answer within 0.5 s. The result is kept."


@pytest.mark.parametrize(
    ("replies", "waits"),
    [
        (((429, "1"), (503, "2")), [1.0, 2.0]),
        (((429, None), (429, "soon")), [webhook.WAIT_S, 2 * webhook.WAIT_S]),
    ],
    ids=["as asked for", "longer each time"],
)
def test_a_busy_webhook_is_called_again_after_its_retry_time(
    failing: Result, monkeypatch: pytest.MonkeyPatch, replies: Any, waits: list[float]
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(webhook.time, "sleep", slept.append)
    answers = [(status, lambda after=after: after) for status, after in replies]
    with busy_hook(*answers, (200, lambda: None)) as (url, called):
        assert webhook.send(failing, url) is None
    assert (slept, len(called)) == (waits, 3)


@pytest.mark.parametrize("reported", ["3600", "1e400", "99999999999999999999"])
def test_a_webhook_with_too_long_a_retry_time_is_abandoned_at_once(failing: Result, reported: str) -> None:
    start = time.monotonic()
    with busy_hook((429, lambda: reported)) as (url, called):
        line = webhook.send(failing, url, most_wait_s=0.5)
    assert line is not None
    assert "status 429, the next attempt would be in" in line
    assert "SECRET" not in line
    assert len(called) == 1
    assert time.monotonic() - start < 4


def test_the_total_wait_for_a_webhook_has_a_limit(failing: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook.time, "sleep", lambda _: None)
    with busy_hook((503, lambda: "1")) as (url, called):
        line = webhook.send(failing, url, most_wait_s=1.5)
    assert len(called) == 2
    assert line is not None
    assert "status 503, the next attempt would be in 1 s, and only 0.5 s are left" in line


def test_a_webhook_that_is_always_busy_is_tried_a_limited_number_of_times(failing: Result) -> None:
    with busy_hook((429, lambda: "0")) as (url, called):
        line = webhook.send(failing, url)
    assert len(called) == webhook.TRIES
    assert line == "The webhook could not be called: it answers with status 429, 4 times. The result is kept."


@pytest.mark.parametrize("status", [400, 500, 502])
def test_permanent_webhook_errors_are_not_retried(failing: Result, status: int) -> None:
    with busy_hook((status, lambda: "0")) as (url, called):
        assert webhook.send(failing, url) is not None
    assert len(called) == 1


@pytest.mark.parametrize(
    ("reported", "date", "wait_s"),
    [
        ("120", None, 120.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", "Wed, 21 Oct 2015 07:27:30 GMT", 30.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", None, 0.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", "no date", 0.0),
        ("-5", None, None),
        ("1.5", None, None),
        ("", None, None),
    ],
)
def test_retry_after_is_read_as_seconds_or_as_a_date_by_the_clock_of_the_server(
    reported: str, date: str | None, wait_s: float | None
) -> None:
    headers = Message()
    headers["Retry-After"] = reported
    if date is not None:
        headers["Date"] = date
    assert webhook.retry_delay_s(headers) == wait_s
