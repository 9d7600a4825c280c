"""The Kubernetes objects of a server."""

from __future__ import annotations

from typing import Any

import pytest

from estimator.inference.serving import Serving
from estimator.plan import GIB
from launchers.inference.manifests import manifests, resource_name
from launchers.inference.servers import TOKEN_VARIABLE, Endpoint

SERVING = Serving(
    device="cuda", gpus=2, context=4096, requests=8, memory={"weights": 8 * GIB}, capacity_bytes=70 * GIB
)


def manifests_for(*, claim: str | None = None, token: bool = False) -> list[dict[str, Any]]:
    endpoint = Endpoint(host="127.0.0.1", port=8000, model="Llama_8B-finetuned")
    return manifests(endpoint, SERVING, gpu="H100", source="org/mine", claim=claim, token=token)


def test_the_pod_requests_the_planned_gpus_on_nodes_that_have_them() -> None:
    deployment, service = manifests_for()
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert container["resources"]["requests"]["memory"] == "22Gi"
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": 8000}


def test_a_claim_is_mounted_read_only_and_the_token_comes_from_a_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "hush")
    deployment, _ = manifests_for(claim="models", token=True)
    pod = deployment["spec"]["template"]["spec"]
    assert pod["volumes"][1]["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    names = {each["name"]: each["valueFrom"]["secretKeyRef"]["name"] for each in pod["containers"][0]["env"]}
    assert names[TOKEN_VARIABLE] == "llama-8b-finetuned-token"
    assert "hush" not in str(deployment)


@pytest.mark.parametrize("model", ["A/b_C.1", "--x--", "é", "m" * 80])
def test_object_names_are_valid_in_kubernetes(model: str) -> None:
    import re

    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", resource_name(model))
