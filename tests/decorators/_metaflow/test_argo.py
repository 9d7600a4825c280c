"""Requests of Metaflow's Argo client while a flow is deployed."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from kubernetes.client.rest import RESTClientObject
from kubernetes.config import kube_config
from metaflow.plugins.argo.argo_client import ArgoClient
from urllib3.exceptions import HTTPError

from decorators._metaflow import api_retries, argo


@pytest.mark.parametrize("request_name", ["get_workflow_template", "get_cronworkflow"])
def test_a_deployment_does_not_wait_for_an_api_server_that_stops_responding(
    request_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, name in (
        (RESTClientObject, "request"),
        (ArgoClient, "__init__"),
        (ArgoClient, "schedule_workflow_template"),
    ):
        monkeypatch.setattr(kind, name, getattr(kind, name))  # restored after the test
    monkeypatch.setattr(api_retries, "READ_S", 0.1)
    argo._change_client()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{silent.getsockname()[1]}"}}
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        config = {"clusters": [cluster], "contexts": [context], "current-context": "c"}
        (tmp_path / "config").write_text(json.dumps(config | {"users": [{"name": "u", "user": {}}]}))
        monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
        client = ArgoClient(namespace="default")
        with pytest.raises(HTTPError, match="timed out"):
            getattr(client, request_name)("train")
