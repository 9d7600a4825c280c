"""The nightly checklist: an Argo workflow, compiled with a local S3."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from decorators.node_request import LAUNCH_VARIABLE
from flows.cluster_check.launch import Launch
from tests.decorators.conftest import Home
from tests.decorators.test_gpu_profile_deployed import compiled, templates
from tests.decorators.test_storage import s3 as s3

pytest.importorskip("kubernetes", reason="needs the kubernetes package to compile for a cluster")

FLOW = str(Path(__file__).parents[2] / "flows" / "checklist_flow.py")
WEBHOOK = "https://hooks.example/services/a-secret"
OPTIONS = """
nodes: 4
profile: standard
instance_type: p5.48xlarge
thresholds: own.csv
priority_class: idle
webhook: true
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    folder = tmp_path_factory.mktemp("nightly")
    (folder / ".metaflow").mkdir()
    (folder / "nightly.yaml").write_text(OPTIONS)
    (folder / "own.csv").write_text("system,op,floor,source\nours,gemm_bf16,700,our own measurement\n")
    return Home(folder)


def _argo(home: Home, address: str, *arguments: str) -> dict[str, Any]:
    arguments = (*arguments, "argo-workflows", "--name", "checklist", "create", "--only-json")
    workflow, text = compiled(home, address, FLOW, *arguments, CHECKLIST_WEBHOOK_URL=WEBHOOK)
    assert "Traceback" not in text
    return workflow


@pytest.mark.slow
def test_the_nightly_checklist_requests_the_nodes_of_its_deployment(home: Home, s3: str) -> None:
    workflow = _argo(home, s3, "--config", "options", str(home.path / "nightly.yaml"))
    cron = json.loads(workflow["metadata"]["annotations"]["metaflow/cron"])
    assert cron["schedule"] == "0 3 * * ?"  # the six fields of @schedule without the year
    assert WEBHOOK not in json.dumps(workflow)

    manifest = templates(workflow)["check-nodes"]["resource"]["manifest"]
    jobset = yaml.safe_load(re.sub(r"\{\{[^}]*\}\}", "1", manifest))
    pods = [job["template"]["spec"]["template"]["spec"] for job in jobset["spec"]["replicatedJobs"]]
    assert len(pods) == 2  # the control job's and the workers'
    for pod in pods:
        (container,) = pod["containers"]
        limits, variables = container["resources"]["limits"], {v["name"]: v for v in container["env"]}
        assert (limits["nvidia.com/gpu"], limits["vpc.amazonaws.com/efa"]) == ("8", "32")
        assert pod["nodeSelector"]["node.kubernetes.io/instance-type"] == "p5.48xlarge"
        assert pod["priorityClassName"] == "idle"
        (memory,) = [v["emptyDir"] for v in pod["volumes"] if v["emptyDir"].get("medium") == "Memory"]
        assert memory["sizeLimit"] == "8192Mi"
        assert variables["NODE_NAME"]["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName"
        launch = Launch.unpack(variables[LAUNCH_VARIABLE]["value"])
        assert (launch.backend, launch.gpus_per_node) == ("kubernetes", 8)
        assert "our own measurement" in str(launch.thresholds)

    verdict = templates(workflow)["verdict"]
    assert json.loads(verdict["podSpecPatch"])["priorityClassName"] == "idle"
    small = verdict["container"]
    assert "nvidia.com/gpu" not in small["resources"]["requests"]
    assert {"FINETUNE_CLUSTER", LAUNCH_VARIABLE} <= {variable["name"] for variable in small["env"]}


@pytest.mark.slow
def test_a_nightly_checklist_of_one_node_has_low_priority_and_selects_its_node(home: Home, s3: str) -> None:
    workflow = _argo(home, s3, "--config-value", "options", "{nodes: 1, priority_class: idle}")
    pod_templates = templates(workflow)
    retried = {name for name, made in pod_templates.items() if "retryStrategy" in made}
    assert {"start", "verdict", "end"} <= retried
    assert not {"check", "check-nodes"} & retried, "what was lost is part of the result"
    steps = [pod_templates[name] for name in ("start", "check", "verdict", "end")]
    patches = [json.loads(step["podSpecPatch"]) for step in steps]
    assert [patch.get("priorityClassName") for patch in patches] == ["idle"] * 4
    (main,) = patches[1]["containers"]
    variables = {variable["name"]: variable for variable in main["env"]}
    assert variables["NODE_NAME"]["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}


@pytest.mark.slow
def test_values_of_the_with_option_are_kept_in_a_deployment(home: Home, s3: str) -> None:
    with_own = "kubernetes:gpu=4,cpu=10,shared_memory=20000,node_selector=pool=big"
    workflow = _argo(home, s3, "--config-value", "options", "nodes: 2", "--with", with_own)
    manifest = templates(workflow)["check-nodes"]["resource"]["manifest"]
    assert len(re.findall(r"nvidia.com/gpu: '4'", manifest)) == 2
    assert len(re.findall(r"\bcpu: '?10(\.0)?'?$", manifest, re.MULTILINE)) >= 2
    assert "20000Mi" in manifest
    assert "pool: big" in manifest
    launch = next(
        variable["value"]
        for variable in templates(workflow)["start"]["container"]["env"]
        if variable["name"] == LAUNCH_VARIABLE
    )
    assert Launch.unpack(launch).gpus_per_node == 4
