"""The name of the cluster that a run is launched at."""

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


def test_a_kubernetes_cluster_has_one_name_whatever_a_user_calls_its_context(tmp_path: Path) -> None:
    names = set()
    for context in ("mine", "yours"):
        _kubeconfig(tmp_path, context, "https://abc.eks.example:6443")
        names.add(cluster_name("kubernetes", {"namespace": "train"}))
    assert names == {"kubernetes:abc.eks.example:6443/train"}


def test_a_flow_compiled_without_a_kubeconfig_names_no_cluster_that_it_is_not() -> None:
    assert cluster_name("kubernetes", {"namespace": None}) == "kubernetes:unknown/default"


def test_a_queue_has_one_name_by_its_name_and_by_its_arn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    assert cluster_name("batch", {"queue": "gpus"}) == cluster_name("batch", {"queue": ARN})
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    assert cluster_name("batch", {"queue": "gpus"}) == "batch:unknown/gpus"


class _Step:
    def __init__(self, namespace: str | None, backend: str = "kubernetes") -> None:
        self._namespace, self._backend = namespace, backend

    def backend(self) -> str:
        return self._backend

    def values(self, decorator: str) -> dict[str, str | None]:  # noqa: ARG002
        return {"namespace": self._namespace, "queue": "configured"}


def test_the_name_follows_the_step_until_a_user_gives_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "_made", None)
    monkeypatch.delenv(clusters.CLUSTER_VARIABLE, raising=False)
    monkeypatch.setenv(clusters.CLUSTER_VARIABLE, "")
    assert clusters.settle(_Step(None)) == "kubernetes:unknown/default"  # type: ignore[arg-type]
    # A deployment looks at its steps twice, and sees what comes after --with only the second time
    assert clusters.settle(_Step("train")) == "kubernetes:unknown/train"  # type: ignore[arg-type]
    assert clusters.current_cluster() == "kubernetes:unknown/train"
    monkeypatch.setenv(clusters.CLUSTER_VARIABLE, "production")
    assert clusters.settle(_Step("train")) == "production"  # type: ignore[arg-type]


def test_a_batch_queue_that_the_user_names_is_the_target_and_a_queue_of_kubernetes_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clusters, "_made", None)
    monkeypatch.setenv(clusters.CLUSTER_VARIABLE, "")
    names = [
        clusters.settle(_Step(None, backend), queue)  # type: ignore[arg-type]
        for backend, queue in (("batch", "gpus"), ("batch", None), ("kubernetes", "gpus"))
    ]
    assert [name.rpartition("/")[2] for name in names] == ["gpus", "configured", "default"]
