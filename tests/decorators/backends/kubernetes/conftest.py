"""A real API server for the preflight checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from decorators.backends.findings import Findings
from decorators.backends.interface import ClusterFacts, MinimumRequest
from decorators.backends.kubernetes.nodes import PodSettings
from decorators.backends.kubernetes.preflight import inspect
from decorators.backends.kubernetes.scopes import quota_pod
from decorators.backends.options import Options
from estimator.hardware.cluster.api import Clock
from estimator.plan import GIB, Request
from tests.decorators.backends.plans import node_object, planned
from tests.lab.control_plane import ControlPlane

INFRA = Path(__file__).parents[4] / "infra/kubernetes/base"
TWO = planned("llama-70b", "full", "H100", 2).request  # 2 x p5.48xlarge
LEAST = MinimumRequest(cpu=8, memory_bytes=500 * GIB)
Asker = Callable[..., tuple[Findings, ClusterFacts]]


@pytest.fixture
def namespace(control_plane: ControlPlane, request: pytest.FixtureRequest) -> str:
    return control_plane.namespace(f"p{abs(hash(request.node.name)) % 10**8}")


@pytest.fixture
def run_preflight(control_plane: ControlPlane, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Asker:
    """The preflight of one user: ``run_preflight(user=, asks=, options=, **step)``."""

    def run_preflight(
        user: str = "admin", asks: Request = TWO, options: Options | None = None, **step: Any
    ) -> Any:
        monkeypatch.setenv("KUBECONFIG", str(control_plane.kubeconfig(user)))
        options = options or Options()
        return inspect(
            asks,
            options=options,
            pods=PodSettings(
                **{"namespace": namespace, "image": "127.0.0.1:9/finetune:1", **step},
                zone=options.zone,
                quota_pod=quota_pod(options),
            ),
            minimum=LEAST,
            clock=Clock(overall_s=90),  # a machine that is busy with other tests
        )

    return run_preflight


@pytest.fixture
def nodes(control_plane: ControlPlane) -> Iterator[Callable[..., None]]:
    """Add nodes for the duration of the test."""
    environment_created: list[str] = []

    def add(*names: str, **overrides: Any) -> None:
        for name in names:
            body = {"apiVersion": "v1", "kind": "Node", **node_object(name, **overrides)}
            control_plane.api().create("/api/v1/nodes", body)
            environment_created.append(name)

    yield add
    for name in environment_created:
        control_plane.api().delete(f"/api/v1/nodes/{name}")


def rows_of(findings: Findings, check: str) -> list[tuple[str, str, str]]:
    return [(row.state, row.detail, row.fix) for row in findings.rows if row.check == check]
