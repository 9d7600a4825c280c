"""CloudWatch output in the embedded metric format."""

from __future__ import annotations

import io
import json

import pytest

from checklist.outputs import cloudwatch
from checklist.result import Result
from estimator.errors import UserError


@pytest.mark.parametrize("name", ["failing", "healthy"])
def test_the_cloudwatch_line_is_embedded_metric_format(name: str, request: pytest.FixtureRequest) -> None:
    result_made: Result = request.getfixturevalue(name)
    stream = io.StringIO()
    cloudwatch.write(result_made, stream, cluster="prod")
    (line,) = stream.getvalue().splitlines()
    record = json.loads(line)
    (directive,) = record["_aws"]["CloudWatchMetrics"]
    assert record["_aws"]["Timestamp"] == 1_060_000
    assert (directive["Namespace"], directive["Dimensions"]) == ("TrainingChecklist", [["Cluster"]])
    assert record["Cluster"] == "prod"
    names = [metric["Name"] for metric in directive["Metrics"]]
    assert len(names) == len(set(names)) <= 100
    assert all(isinstance(record[metric], int | float) for metric in names)
    assert record["Verdict"] == {"failing": 2, "healthy": 0}[name]
    units = {metric["Unit"] for metric in directive["Metrics"]}
    assert units <= {"None", "Count", "Seconds", "Gigabytes/Second"}


def test_a_cluster_without_a_name_is_refused(healthy: Result) -> None:
    with pytest.raises(UserError, match="name for CloudWatch is empty"):
        cloudwatch.line(healthy, cluster=" ")
