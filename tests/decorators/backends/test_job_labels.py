"""Owner, flow and team of a run as labels of Kubernetes jobs and pods and tags of Batch jobs."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from metaflow.plugins.argo.argo_workflows import ArgoWorkflows
from metaflow.plugins.kubernetes.kube_utils import validate_kube_labels
from metaflow.plugins.kubernetes.kubernetes import Kubernetes

from decorators._metaflow import label_jobs, labels
from decorators.backends.batch import workarounds
from decorators.backends.job_labels import TEAM_VARIABLE, label_value, labels_of, note_team

OWN = {"finetune/user": "jane-example.com", "finetune/flow": "FinetuneFlow", "finetune/run": "12"}


@given(st.text(max_size=200))
def test_any_text_becomes_a_valid_kubernetes_label_value(text: str) -> None:
    assert re.fullmatch(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?", label_value(text))
    assert len(label_value(text)) <= 63


def test_the_labels_name_user_flow_run_and_team(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TEAM_VARIABLE, raising=False)
    assert labels_of("jane@example.com", "FinetuneFlow", "12") == OWN
    monkeypatch.setenv(TEAM_VARIABLE, "")
    note_team("Vision & Speech")
    assert labels_of("jane@example.com", "FinetuneFlow", None) == {
        "finetune/user": "jane-example.com",
        "finetune/flow": "FinetuneFlow",
        "finetune/team": "Vision-Speech",
    }
    validate_kube_labels(dict(labels_of("jane@example.com", "FinetuneFlow", "12")))


@pytest.mark.parametrize("maker", ["create_job_object", "create_jobset"])
def test_jobs_get_the_labels_and_keep_those_of_the_user(maker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    objects: dict[str, Any] = {}

    def make(self: Any, flow_name: str, run_id: str, user: str, labels: Any = None) -> str:
        objects.update(labels)
        return "job"

    monkeypatch.delenv(TEAM_VARIABLE, raising=False)
    monkeypatch.setattr(labels, "command_arguments", lambda: ["kubernetes"])
    monkeypatch.setattr(Kubernetes, "create_job_object", Kubernetes.create_job_object)
    monkeypatch.setattr(Kubernetes, "create_jobset", Kubernetes.create_jobset)
    monkeypatch.setattr(Kubernetes, maker, make)
    label_jobs(labels_of)
    label_jobs(labels_of)  # once for each step of the flow
    kubernetes = object.__new__(Kubernetes)
    expected_labels = {"flow_name": "FinetuneFlow", "run_id": "12", "user": "jane@example.com"}
    assert getattr(kubernetes, maker)(**expected_labels) == "job"
    assert objects == OWN
    getattr(kubernetes, maker)(**expected_labels, labels={"finetune/user": "ci", "queue": "a"})
    assert objects == {**OWN, "finetune/user": "ci", "queue": "a"}


def test_pods_of_a_deployed_workflow_get_the_labels_without_a_run_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TEAM_VARIABLE, raising=False)
    monkeypatch.setattr(labels, "command_arguments", lambda: ["argo-workflows"])
    monkeypatch.setattr(labels, "deployer", lambda: "argo-workflows")
    monkeypatch.setattr(ArgoWorkflows, "_base_kubernetes_labels", ArgoWorkflows._base_kubernetes_labels)
    label_jobs(labels_of)
    workflow = object.__new__(ArgoWorkflows)
    workflow.username, workflow.flow = "jane", type("Flow", (), {"name": "FinetuneFlow"})
    workflow_labels = workflow._base_kubernetes_labels()
    assert workflow_labels["app.kubernetes.io/part-of"] == "metaflow"
    assert (workflow_labels["finetune/user"], workflow_labels["finetune/flow"]) == ("jane", "FinetuneFlow")
    assert "finetune/run" not in workflow_labels


def test_a_batch_job_is_tagged_if_metaflow_tags_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TEAM_VARIABLE, "vision")
    reported = {"metaflow.user": "jane", "metaflow.flow_name": "FinetuneFlow", "metaflow.run_id": "12"}
    tagged = workarounds.correct({"parameters": reported, "tags": {"app": "metaflow"}})["tags"]
    assert tagged == {
        "app": "metaflow",
        "finetune/user": "jane",
        "finetune/flow": "FinetuneFlow",
        "finetune/run": "12",
        "finetune/team": "vision",
    }
    assert workarounds.correct({"parameters": reported, "tags": {}})["tags"] == {}
