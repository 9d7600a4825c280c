"""The result as a Prometheus textfile, for node_exporter's textfile collector."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from checklist.result import Result, Verdict
from estimator.errors import UserError

LEVELS: dict[Verdict, int] = {"PASS": 0, "WARN": 1, "FAIL": 2, "NO-VERDICT": 3}
PREFIX = "training_checklist"


def write(result: Result, file: Path) -> None:
    """Replaces the file in one step, as a collector may read it at any time. Raises UserError."""
    check(file)
    import prometheus_client as prometheus  # heavy, and not everybody's

    registry = prometheus.CollectorRegistry()
    _fill(result, registry)
    try:
        prometheus.write_to_textfile(str(file), registry)
    except OSError as error:
        raise UserError(
            f"The Prometheus textfile {file} can't be written: {error.strerror or error}.",
            "Name a folder that there is and that may be written to.",
        ) from None


def check(file: Path) -> None:
    """Whether such a file can be written, as far as that is known before. Raises UserError."""
    if importlib.util.find_spec("prometheus_client") is None:
        raise UserError(
            "A Prometheus textfile needs the prometheus_client library, which is not installed.",
            "pip install prometheus_client",
        )
    if file.suffix != ".prom":
        raise UserError(f"The Prometheus textfile is called {file.name!r}.", "Its name must end in .prom.")


def _fill(result: Result, registry: Any) -> None:
    from prometheus_client import Gauge

    def gauge(name: str, tells: str, labels: tuple[str, ...] = ()) -> Any:
        return Gauge(f"{PREFIX}_{name}", tells, labels, registry=registry)

    levels = ", ".join(f"{number} {verdict}" for verdict, number in LEVELS.items())
    gauge("verdict", f"Of the whole run: {levels}").set(LEVELS[result.verdict])
    gauge("finished_timestamp_seconds", "When the run ended, Unix time").set(result.finished_unix)
    gauge("duration_seconds", "How long it took").set(result.measurements.seconds)
    gauge("nodes", "Nodes that took part").set(len(result.nodes))
    gauge("healthy_nodes", "Nodes with nothing against them").set(len(result.healthy_nodes))
    bad = gauge("node_bad", "1: the node is at fault", ("node",))
    for name in (*result.nodes, *result.bad_nodes):
        bad.labels(node=name).set(name in result.bad_nodes)
    verdicts = gauge("check_verdict", f"Of each check: {levels}", ("check",))
    for check in result.checks:
        verdicts.labels(check=check.check).set(LEVELS[check.verdict])
    figures = gauge("figure", "Figures that were judged", ("figure", "unit", "bytes", "node", "rank"))
    for check in result.checks:
        for figure in check.figures:
            size = "" if figure.bytes is None else str(figure.bytes)
            rank = "" if figure.rank is None else str(figure.rank)
            labels = {"figure": figure.name, "unit": figure.unit, "bytes": size, "rank": rank}
            figures.labels(**labels, node=figure.node or "").set(figure.value)
