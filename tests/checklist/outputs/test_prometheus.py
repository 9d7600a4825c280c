"""The Prometheus textfile: verdicts, nodes and measurements."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from checklist.outputs import prometheus
from checklist.result import Result
from checklist.verdict import judge
from estimator.errors import UserError
from tests.checklist.clusters import Cluster
from tests.checklist.runs import cpu_run, gpu_run, with_pairs, with_states
from tests.http_server import serving


def samples(file: Path) -> dict[tuple[str, tuple[str, ...]], float]:
    families = text_string_to_metric_families(file.read_text())
    return {
        (
            sample.name.removeprefix("training_checklist_"),
            tuple(value for name, value in sample.labels.items() if value and name != "cluster"),
        ): sample.value
        for family in families
        for sample in family.samples
    }


def test_the_prometheus_textfile_has_verdicts_nodes_and_measurements(
    failing: Result, healthy: Result, tmp_path: Path
) -> None:
    file = tmp_path / "checklist.prom"
    prometheus.write(failing, file)
    metrics = samples(file)
    assert (metrics["verdict", ()], metrics["check_verdict", ("pairs",)]) == (2, 2)
    assert metrics["check_verdict", ("mesh",)] == 0
    assert (metrics["node_bad", ("host-2",)], metrics["node_bad", ("host-0",)]) == (1, 0)
    assert (metrics["node_open_failures", ("host-2",)], metrics["node_open_failures", ("host-0",)]) == (1, 0)
    assert (metrics["open_failures", ()], metrics["check_coverage_ratio", ("pairs",)]) == (1, 1)
    best = {key: value for key, value in metrics.items() if key[0] == "node_pair_gbytes_per_second"}
    assert len(best) == 8
    assert best["node_pair_gbytes_per_second", ("host-2", "sent")] < 0.3 * max(best.values())
    slowest = min((v, k) for k, v in metrics.items() if k[0] == "pair_gbytes_per_second")[1]
    assert "host-2" in slowest[1]
    prometheus.write(healthy, file)
    metrics = samples(file)
    assert metrics["verdict", ()] == 0
    assert any(name == "figure" and value == pytest.approx(450) for (name, _), value in metrics.items())
    assert list(tmp_path.iterdir()) == [file], "nothing half-written is left for the collector"


def test_an_unwritable_textfile_is_reported_in_one_line(healthy: Result, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be written: No such file"):
        prometheus.write(healthy, tmp_path / "missing" / "checklist.prom")
    with pytest.raises(UserError, match=r"does not end in \.prom"):
        prometheus.write(healthy, tmp_path / "checklist.txt")


def test_a_pushgateway_gets_the_metrics_of_the_cluster_and_keeps_those_of_others(
    failing: Result,
) -> None:
    received: list[tuple[str, str, str]] = []

    class Gateway(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            text = self.rfile.read(int(self.headers["Content-Length"])).decode()
            received.append((self.command, self.path, text))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    with serving(Gateway) as url:
        prometheus.push(failing, url, "prod")
    ((command, path, text),) = received
    assert (command, path) == ("PUT", "/metrics/job/training_checklist/cluster/prod")
    assert 'training_checklist_verdict{cluster="prod"} 2.0' in text
    with pytest.raises(UserError, match="did not accept the metrics"):
        prometheus.push(failing, "http://127.0.0.1:9")
    with pytest.raises(UserError, match="must be an http"):
        prometheus.check_gateway("gateway:9091")


def test_suspects_and_the_cluster_are_among_the_labels(tmp_path: Path) -> None:
    links = {(0, 1): 0.5, (1, 0): 0.5}
    result = judge(with_pairs(cpu_run(6), Cluster(nodes=6, links=links)))
    prometheus.write(result, tmp_path / "checklist.prom", "north")
    text = (tmp_path / "checklist.prom").read_text()
    assert 'training_checklist_node_suspect{cluster="north",node="host-1"} 1.0' in text
    assert 'training_checklist_node_suspect{cluster="north",node="host-2"} 0.0' in text
    assert all('cluster="north"' in line for line in text.splitlines() if not line.startswith("#"))


def test_findings_of_a_gpu_are_labeled_with_it(tmp_path: Path) -> None:
    capped = with_states(gpu_run(), [9], "loaded", power_limit_w=500.0)
    prometheus.write(judge(capped), tmp_path / "checklist.prom")
    metrics = samples(tmp_path / "checklist.prom")
    gpus = {labels: value for (name, labels), value in metrics.items() if name == "gpu_verdict"}
    assert len(gpus) == 16
    assert {labels for labels, value in gpus.items() if value} == {("GPU-1-1", "host-1")}
    assert metrics["figure", ("SM clock", "host-0", "0", "MHz")] == 1700
