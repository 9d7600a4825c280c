"""Output of the result as one log line in CloudWatch's embedded metric format.

The format:
https://docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/CloudWatch_Embedded_Metric_Format_Specification.html
"""

from __future__ import annotations

import json
from typing import Any, TextIO

from checklist.outputs.prometheus import LEVELS
from checklist.result import Result
from estimator.errors import UserError

NAMESPACE = "TrainingChecklist"
MAX_METRICS = 100  # maximum per line
UNITS = {"GB/s": "Gigabytes/Second", "s": "Seconds"}


def line(result: Result, *, cluster: str = "default", namespace: str = NAMESPACE) -> str:
    """Build the JSON line, without a newline. The only dimension is the cluster's name."""
    if not cluster.strip():
        raise UserError(
            "The cluster's name for CloudWatch is empty.", "Name the cluster: the name is a dimension."
        )
    values: dict[str, tuple[float, str]] = {
        "Verdict": (LEVELS[result.verdict], "None"),
        "Nodes": (len(result.nodes), "Count"),
        "HealthyNodes": (len(result.healthy_nodes), "Count"),
        "BadNodes": (len(result.bad_nodes), "Count"),
        "Duration": (result.measurements.seconds, "Seconds"),
    }
    for check in result.checks:
        values[f"Check/{check.check}"] = (LEVELS[check.verdict], "None")
    if result.busbw_gbytes_per_s is not None:
        values["AllReduceBusBandwidth"] = (result.busbw_gbytes_per_s, UNITS["GB/s"])
    for check in result.checks:
        for figure in check.figures:
            if figure.node is None:  # figures of a node would need another dimension
                size = "" if figure.bytes is None else f"/{figure.bytes}"
                values[f"Figure/{figure.name}{size}"] = (figure.value, UNITS.get(figure.unit, "None"))
    kept = dict(list(values.items())[:MAX_METRICS])
    metrics = [{"Name": name, "Unit": unit} for name, (_, unit) in kept.items()]
    record: dict[str, Any] = {
        "_aws": {
            "Timestamp": round(result.finished_unix * 1000),
            "CloudWatchMetrics": [{"Namespace": namespace, "Dimensions": [["Cluster"]], "Metrics": metrics}],
        },
        "Cluster": cluster,
        "Headline": result.headline,
        "BadNodeNames": list(result.bad_nodes),
        **{name: value for name, (value, _) in kept.items()},
    }
    return json.dumps(record, allow_nan=False)


def write(result: Result, stream: TextIO, *, cluster: str = "default", namespace: str = NAMESPACE) -> None:
    """Write the line to a stream collected by CloudWatch Logs, such as a Batch job's standard output."""
    stream.write(line(result, cluster=cluster, namespace=namespace) + "\n")
    stream.flush()
