"""Webhook, Prometheus textfile, CloudWatch line: right when they work, one line when they don't."""

from __future__ import annotations

import dataclasses
import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from checklist.outputs import cloudwatch, prometheus, webhook
from checklist.result import Result
from checklist.verdict import judge
from estimator.errors import UserError
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


def samples(file: Path) -> dict[tuple[str, tuple[str, ...]], float]:
    families = text_string_to_metric_families(file.read_text())
    return {
        (
            sample.name.removeprefix("training_checklist_"),
            tuple(value for value in sample.labels.values() if value),
        ): sample.value
        for family in families
        for sample in family.samples
    }


def test_the_prometheus_textfile_has_verdicts_nodes_and_figures(
    sick: Result, healthy: Result, tmp_path: Path
) -> None:
    file = tmp_path / "checklist.prom"
    prometheus.write(sick, file)
    found = samples(file)
    assert found["verdict", ()] == 2
    assert found["check_verdict", ("pairs",)] == 2
    assert found["check_verdict", ("mesh",)] == 0
    assert (found["node_bad", ("host-2",)], found["node_bad", ("host-0",)]) == (1, 0)
    prometheus.write(healthy, file)
    found = samples(file)
    assert found["verdict", ()] == 0
    assert any(name == "figure" and value == pytest.approx(450) for (name, _), value in found.items())
    assert list(tmp_path.iterdir()) == [file], "nothing half-written is left for the collector"


def test_a_textfile_that_can_not_be_written_is_one_line(healthy: Result, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"can't be written: No such file"):
        prometheus.write(healthy, tmp_path / "missing" / "checklist.prom")
    with pytest.raises(UserError, match=r"Its name must end in .prom"):
        prometheus.write(healthy, tmp_path / "checklist.txt")


@pytest.mark.parametrize("name", ["sick", "healthy"])
def test_the_cloudwatch_line_is_embedded_metric_format(name: str, request: pytest.FixtureRequest) -> None:
    made: Result = request.getfixturevalue(name)
    stream = io.StringIO()
    cloudwatch.write(made, stream, cluster="prod")
    (line,) = stream.getvalue().splitlines()
    record = json.loads(line)
    (directive,) = record["_aws"]["CloudWatchMetrics"]
    assert record["_aws"]["Timestamp"] == 1_060_000
    assert directive["Namespace"] == "TrainingChecklist"
    assert directive["Dimensions"] == [["Cluster"]]
    assert record["Cluster"] == "prod"
    names = [metric["Name"] for metric in directive["Metrics"]]
    assert len(names) == len(set(names)) <= 100
    assert all(isinstance(record[metric], int | float) for metric in names)
    assert record["Verdict"] == {"sick": 2, "healthy": 0}[name]
    units = {metric["Unit"] for metric in directive["Metrics"]}
    assert units <= {"None", "Count", "Seconds", "Gigabytes/Second"}


def test_a_cluster_without_a_name_is_refused(healthy: Result) -> None:
    with pytest.raises(UserError, match="name for CloudWatch is empty"):
        cloudwatch.line(healthy, cluster=" ")
