"""Output of the result to Prometheus: a textfile for node_exporter, or a request to a Pushgateway."""

from __future__ import annotations

import http.client
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from checklist.result import Result, Verdict
from estimator.errors import UserError

LEVELS: dict[Verdict, int] = {"PASS": 0, "WARN": 1, "FAIL": 2, "NO-VERDICT": 3}
PREFIX = "training_checklist"
PUSH_TIMEOUT_S = 10.0
MAX_PAIRS = 64  # maximum number of pairs, because each is a separate series


def write(result: Result, file: Path, cluster: str = "default") -> None:
    """Replace the file atomically, because a collector may read it at any time. Raises UserError."""
    check(file)
    import prometheus_client as prometheus  # heavy, and an optional dependency

    registry = prometheus.CollectorRegistry()
    _fill(result, registry, cluster)
    try:
        prometheus.write_to_textfile(str(file), registry)
    except OSError as error:
        raise UserError(
            f"The Prometheus textfile {file} cannot be written: {error.strerror or error}.",
            "Name an existing folder with write permission.",
        ) from None


def push(result: Result, gateway: str, cluster: str = "default") -> None:
    """Replace the cluster's metrics on a Pushgateway. Raises UserError."""
    check_gateway(gateway)
    import prometheus_client as prometheus

    registry = prometheus.CollectorRegistry()
    _fill(result, registry, cluster)
    key = {"cluster": cluster}
    try:
        prometheus.push_to_gateway(gateway, PREFIX, registry, grouping_key=key, timeout=PUSH_TIMEOUT_S)
    except (OSError, http.client.HTTPException) as error:  # urllib's errors are OSErrors
        raise UserError(
            f"The Pushgateway {gateway} did not accept the metrics: {error}.",
            "Check its address; in the cluster: http://pushgateway.finetune:9091",
        ) from None


def check(file: Path) -> None:
    """Check in advance that the file can be written. Raises UserError."""
    _check_library("A Prometheus textfile")
    if file.suffix != ".prom":
        raise UserError(
            f"--prometheus {file.name!r} does not end in .prom.",
            "node_exporter reads *.prom only: rename it.",
        )


def check_gateway(gateway: str) -> None:
    """Check in advance that the address can be one of a Pushgateway. Raises UserError."""
    _check_library("A Pushgateway")
    address = urlsplit(gateway)
    if address.scheme not in ("http", "https") or not address.hostname or address.password:
        raise UserError(
            "--pushgateway must be an http(s) address without a password.",
            "Write --pushgateway http://HOST:9091",
        )


def _check_library(what: str) -> None:
    if importlib.util.find_spec("prometheus_client") is None:
        raise UserError(
            f"{what} needs the prometheus_client library, which is not installed.",
            "pip install prometheus_client",
        )


def _fill(result: Result, registry: Any, cluster: str) -> None:
    from prometheus_client import Gauge

    gauges: dict[str, Any] = {}

    def put(name: str, description: str, value: float, **labels: str) -> None:
        if name not in gauges:
            gauges[name] = Gauge(f"{PREFIX}_{name}", description, ("cluster", *labels), registry=registry)
        gauges[name].labels(cluster=cluster, **labels).set(value)

    levels = ", ".join(f"{number} {verdict}" for verdict, number in LEVELS.items())
    put("verdict", f"Of the whole run: {levels}", LEVELS[result.verdict])
    put("finished_timestamp_seconds", "When the run ended, Unix time", result.finished_unix)
    put("duration_seconds", "How long it took", result.measurements.seconds)
    put("nodes", "Nodes that took part", len(result.nodes))
    put("healthy_nodes", "Nodes with nothing against them", len(result.healthy_nodes))
    suspects = {name for finding in result.findings for name in finding.suspects}
    failures = result.open_failures()
    put("open_failures", "Failures that a later run has to clear", len(failures))
    for name in dict.fromkeys((*result.nodes, *result.bad_nodes)):
        put("node_bad", "1: the node is at fault", name in result.bad_nodes, node=name)
        put(
            "node_suspect",
            "1: the node or its links may be at fault",
            name in suspects,
            node=name,
        )
        count = sum(name in failure.nodes for failure in failures)
        put("node_open_failures", "Open failures that are of the node", count, node=name)
    for check in result.checks:
        put("check_verdict", f"Of each check: {levels}", LEVELS[check.verdict], check=check.check)
        if check.coverage is not None and check.coverage.of:
            share = check.coverage.measured / check.coverage.of
            put(
                "check_coverage_ratio",
                "What the check has measured of what there is",
                share,
                check=check.check,
            )
        for figure in check.figures:
            size = "" if figure.bytes is None else str(figure.bytes)
            rank = "" if figure.rank is None else str(figure.rank)
            labels = {"figure": figure.name, "unit": figure.unit, "bytes": size, "rank": rank}
            put("figure", "Figures that were judged", figure.value, **labels, node=figure.node or "")
    _gpus(result, put)
    _pairs(result, put)


def _gpus(result: Result, set_gauge: Callable[..., None]) -> None:
    """Add the worst finding of each GPU."""
    worst: dict[str, float] = {}
    for finding in result.findings:
        for uuid in finding.gpus:
            worst[uuid] = max(LEVELS[finding.verdict], worst.get(uuid, 0))
    names = result.measurements.names
    for fact in result.measurements.facts:
        for uuid in fact.gpu_uuids[fact.local_rank :][:1]:
            description = "Of each GPU, by what was found against it: 0 nothing, 1 warn, 2 fail"
            set_gauge("gpu_verdict", description, worst.get(uuid, 0), node=names[fact.node], gpu=uuid)


def _pairs(result: Result, set_gauge: Callable[..., None]) -> None:
    """Add each node's best pair by direction, and the slowest pairs."""
    names = dict(zip(result.measurements.nodes, result.nodes, strict=True))
    if result.diagnosis is not None:
        directions = {"sent": result.diagnosis.transmit, "received": result.diagnosis.receive}
        for direction, best in directions.items():
            for node, value in enumerate(best):
                if value is not None and node in names:
                    description = "The best that the node sent to any other, or received, GB/s"
                    set_gauge(
                        "node_pair_gbytes_per_second", description, value, node=names[node], way=direction
                    )
    rates: dict[tuple[str, str], float] = {}
    for pair in result.measurements.pairs:
        if pair.src in names and pair.dst in names:
            names_of_pair = names[pair.src], names[pair.dst]
            rates[names_of_pair] = max(pair.gbytes_per_s or 0.0, rates.get(names_of_pair, 0.0))
    for src, dst in sorted(rates, key=rates.__getitem__)[:MAX_PAIRS]:
        description = f"The {MAX_PAIRS} slowest pairs of nodes, GB/s; 0: it failed"
        set_gauge("pair_gbytes_per_second", description, rates[src, dst], src=src, dst=dst)
