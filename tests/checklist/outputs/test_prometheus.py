"""A textfile for node_exporter: verdicts, nodes and figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from checklist.outputs import prometheus
from checklist.result import Result
from checklist.verdict import judge
from estimator.errors import UserError
from tests.checklist.clusters import Cluster
from tests.checklist.runs import cpu_run, gpu_run, with_pairs


@pytest.fixture(scope="module")
def sick() -> Result:
    return judge(with_pairs(cpu_run(4), Cluster(nodes=4, transmit={2: 0.25}, receive={2: 0.25})))


@pytest.fixture(scope="module")
def healthy() -> Result:
    return judge(gpu_run())


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
