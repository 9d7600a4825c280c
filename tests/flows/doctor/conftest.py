"""Probes by name, each in its own process as the command runs them, with a test home."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flows.doctor.line import Line
from flows.doctor.probes import PROBES
from flows.doctor.processes import run_probes
from tests.flows.conftest import environment

QueryProbe = Callable[..., dict[str, Line]]


@pytest.fixture
def query_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> QueryProbe:
    """``query_probe(name, limit_s=, only=, **variables)``: the first line of each check of a probe."""

    def query(
        name: str, limit_s: float | None = None, only: tuple[str, ...] = (), **variables: str
    ) -> dict[str, Line]:
        doctor_environment = environment(tmp_path, HOME=str(tmp_path), AWS_EC2_METADATA_DISABLED="true")
        for variable in os.environ.keys() - doctor_environment.keys():
            monkeypatch.delenv(variable)
        for variable, value in {**doctor_environment, **variables}.items():
            monkeypatch.setenv(variable, value)
        monkeypatch.chdir(tmp_path)
        (probe,) = (probe for probe in PROBES if probe.name == name)
        ((_, lines),) = run_probes([replace(probe, arguments=only or probe.arguments)], limit_s)
        return {line.check: line for line in reversed(lines)}

    return query
