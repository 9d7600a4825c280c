"""The webhook gets a message within its limits; one that fails is a line, without its address."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest

from checklist.outputs import webhook
from checklist.result import Result
from checklist.verdict import judge
from tests.checklist.clusters import Cluster
from tests.checklist.runs import cpu_run, gpu_run, with_pairs
from tests.checklist.servers import SECRET, hook


@pytest.fixture(scope="module")
def sick() -> Result:
    return judge(with_pairs(cpu_run(4), Cluster(nodes=4, transmit={2: 0.25}, receive={2: 0.25})))


@pytest.fixture(scope="module")
def healthy() -> Result:
    return judge(gpu_run())


def test_the_webhook_gets_verdict_finding_and_advice(sick: Result) -> None:
    with hook() as (url, received):
        assert webhook.send(sick, url, title="prod <cluster> & co") is None
    (body,) = received
    assert body["text"].startswith("prod &lt;cluster&gt; &amp; co: FAIL. host-2 is slow in both directions")
    texts = [block["text"]["text"] for block in body["blocks"]]
    assert all(block["type"] == "section" for block in body["blocks"])
    assert "3 of 4 nodes healthy, bad: host-2." in texts
    assert any("`kubectl drain host-2" in text for text in texts)


def test_a_message_stays_within_slacks_limits(sick: Result) -> None:
    many = tuple(dataclasses.replace(sick.findings[0], title="x" * 5000) for _ in range(80))
    blocks = webhook.message(dataclasses.replace(sick, findings=many))["blocks"]
    assert len(blocks) <= 50
    assert all(len(block["text"]["text"]) <= 3000 for block in blocks)
    assert blocks[-1]["text"]["text"] == "And 70 more findings."


@pytest.mark.parametrize("status", [400, 403, 404, 500, 302])
def test_a_webhook_that_refuses_is_one_line_without_its_address(sick: Result, status: int) -> None:
    with hook(status) as (url, _):
        line = webhook.send(sick, url)
    assert line is not None
    assert "SECRET" not in line
    assert "127.0.0.1" not in line
    assert line.endswith("The result is kept.")


def test_a_webhook_that_is_down_is_one_line_without_its_address(sick: Result) -> None:
    line = webhook.send(sick, f"http://127.0.0.1:9/services/{SECRET}")
    assert (
        line == "The webhook could not be called: no connection (ConnectionRefusedError). The result is kept."
    )
    line = webhook.send(sick, f"ftp://host/{SECRET}")
    assert line == "The webhook was not called: $CHECKLIST_WEBHOOK_URL is no http(s) address."
    bad = webhook.send(sick, f"http://[{SECRET}")
    assert bad is not None
    assert "SECRET" not in bad


@pytest.mark.parametrize("how", [{"delay_s": 5.0}, {"drip": True}], ids=["silent", "dripping"])
def test_a_slow_webhook_holds_nobody_up(sick: Result, how: Any) -> None:
    start = time.monotonic()
    with hook(**how) as (url, _):
        line = webhook.send(sick, url, timeout_s=0.5)
        taken = time.monotonic() - start
    assert taken < 2
    assert line == "The webhook could not be called: no answer within 0.5 s. The result is kept."
