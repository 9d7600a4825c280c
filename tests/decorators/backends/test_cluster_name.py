"""The name of the cluster on which a run is launched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from decorators.backends import cluster_name as clusters
from decorators.backends.cluster_name import cluster_name

ARN = "arn:aws:batch:eu-west-1:123456789012:job-queue/gpus"


@pytest.fixture(autouse=True)
def _no_target(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("KUBERNETES_SERVICE_HOST", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws"))


def _kubeconfig(folder: Path, context: str, server: str) -> None:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": context,
        "contexts": [{"name": context, "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
    }
    (folder / "kubeconfig").write_text(json.dumps(config))


def test_the_name_of_a_kubernetes_cluster_is_independent_of_context_and_namespace(tmp_path: Path) -> None:
    names = set()
    for context in ("mine", "yours"):
        _kubeconfig(tmp_path, context, "https://abc.eks.example:6443")
        names.add(cluster_name("kubernetes", {"namespace": f"of-{context}"}))
    assert names == {"kubernetes:abc.eks.example:6443"}


def test_the_cluster_name_is_unknown_without_a_kubeconfig() -> None:
    assert cluster_name("kubernetes", {"namespace": None}) == "kubernetes:unknown"


def test_a_batch_queue_has_the_same_cluster_name_by_name_and_by_arn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    assert cluster_name("batch", {"queue": "gpus"}) == cluster_name("batch", {"queue": ARN})
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    assert cluster_name("batch", {"queue": "gpus"}) == "batch:unknown/gpus"


class _Step:
    def __init__(self, queue: str | None, backend: str) -> None:
        self._queue, self._backend = queue, backend

    def backend(self) -> str:
        return self._backend

    def values(self, decorator: str) -> dict[str, str | None]:  # noqa: ARG002
        return {"queue": self._queue}


def test_the_cluster_name_follows_the_step_unless_the_user_sets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "_decided_name", None)
    monkeypatch.delenv(clusters.CLUSTER_VARIABLE, raising=False)
    monkeypatch.setenv(clusters.CLUSTER_VARIABLE, "")
    assert clusters.decide_cluster_name(_Step("mine", "batch")) == "batch:unknown/mine"  # type: ignore[arg-type]
    # A deployment looks at its steps twice, and sees what comes after --with only the second time
    assert clusters.decide_cluster_name(_Step("yours", "batch")) == "batch:unknown/yours"  # type: ignore[arg-type]
    assert clusters.current_cluster() == "batch:unknown/yours"
    monkeypatch.setenv(clusters.CLUSTER_VARIABLE, "production")
    assert clusters.decide_cluster_name(_Step("yours", "batch")) == "production"  # type: ignore[arg-type]


def test_a_batch_queue_of_the_user_names_the_cluster_and_a_kubernetes_queue_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clusters, "_decided_name", None)
    monkeypatch.setenv(clusters.CLUSTER_VARIABLE, "")
    names = [
        clusters.decide_cluster_name(_Step("configured", backend), queue)  # type: ignore[arg-type]
        for backend, queue in (("batch", "gpus"), ("batch", None), ("kubernetes", "gpus"))
    ]
    assert names == ["batch:unknown/gpus", "batch:unknown/configured", "kubernetes:unknown"]
