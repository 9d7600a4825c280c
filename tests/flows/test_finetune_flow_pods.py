"""The pods of each flow on Kubernetes directly and on Argo Workflows, compared field by field.

A real API server has nodes with GPUs and shared RDMA devices; ``argo-workflows create`` deploys to it, and
a run's Jobs and JobSets are compiled for the same nodes (flows/submitted_pods.py). What may differ is in
``DIFFERENCES``, with reasons; a row that no field needs fails, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml

from decorators.backends.strategic_merge import merge
from tests.decorators.conftest import Home
from tests.decorators.test_gpu_profile_deployed import CREDENTIALS, _client
from tests.decorators.test_storage import s3 as s3
from tests.flows.clusters import GPU_TAINT, node
from tests.lab.api import Json
from tests.lab.control_plane import ControlPlane, permissive_definition

pytest.importorskip("kubernetes", reason="needs the kubernetes package to compile for a cluster")
pytestmark = pytest.mark.slow

FLOWS = Path(__file__).parents[2] / "flows"
SUBMITTED = Path(__file__).parent / "flows" / "submitted_pods.py"
RDMA = "rdma/hca_shared_devices_a"
FINETUNE = {
    "model": "llama-70b",
    "method": "full",
    "resources": {"gpu": "h100-sxm", "nodes": 2, "priority_class": "research", "team": "a"},
}
CHECK = "{nodes: 2, gpus_per_node: 8, instance_type: p5.48xlarge, priority_class: idle}"
CASES = {
    "finetune": ("finetune_flow.py", "settings", json.dumps(FINETUNE), ("prepare", "train", "train_nodes")),
    "checklist": ("checklist_flow.py", "options", CHECK, ("verdict", "check", "check_nodes")),
}
SECURITY = '{"allow_privilege_escalation": false}'

# Fields that differ, and why. Those of one kind of step have its name in front: "pod" is a step on one node.
DIFFERENCES = {
    "*/spec.containers.*.command": "the step's command names its run and task, which Argo fills in",
    "*/spec.containers.*.env.METAFLOW_*": "Metaflow's own, of run, task and code package",
    "*/spec.containers.*.env.ARGO_*": "Metaflow's own, of the workflow",
    "*/spec.containers.*.env.MF_*": "names of JobSet and main node, which Argo fills in",
    "*/metadata.annotations.metaflow/*": "Metaflow's own, of run and task",
    "*/metadata.labels.app.kubernetes.io/*": "Metaflow's own",
    "*/metadata.labels.finetune/run": "a deployment's runs are not known yet; Argo has the workflow",
    "*/metadata.labels.*argo*": "the workflow, by Metaflow and Argo",
    "*/metadata.annotations.workflows.argoproj.io/*": "the workflow's title and description, by Metaflow",
    "*/spec.containers.*.env.USER": "Metaflow's own, as a deployed flow has nobody's environment",
    "*/spec.containers.*.env.FINETUNE_SIZES": "of a run, the process that launched it has them",
    "pod/metadata.namespace": "Argo makes the pod in its workflow's namespace",
    "pod/spec.restartPolicy": "Argo's pods have Never, as it retries itself",
    "pod/spec.terminationGracePeriodSeconds": "without a checkpoint to store: none by Metaflow, 30 s on Argo",
    "pod/spec.containers.*.volumeMounts.out.mountPath": "where Metaflow leaves outputs for Argo",
    "pod/spec.volumes.dhsm.emptyDir.medium": "Metaflow declares it on Argo always, mounted or not",
    "jobset/spec.affinity*": "the JobSet's name, which Argo fills in",
    "jobset/spec.subdomain": "the JobSet's name, which Argo fills in",
    "jobset/spec.containers.*.env.TASK_ID_*": "parts of the task's id, put together in the pod",
    "jobset/metadata.labels.task_id_entropy": "part of the task's id, by Metaflow",
    "jobset/metadata.labels.num_parallel": "number of nodes, by Metaflow",
}
OF_CHECKS = {"*/spec.activeDeadlineSeconds": "a nightly check has a deadline; a run has a person who waits"}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A namespace of the API server with the nodes."""

    plane: ControlPlane
    namespace: str
    home: Home
    store: str

    def environment(self) -> dict[str, str]:
        return {
            **CREDENTIALS,
            "KUBECONFIG": str(self.plane.kubeconfig(namespace=self.namespace)),
            "METAFLOW_KUBERNETES_NAMESPACE": self.namespace,
            "METAFLOW_KUBERNETES_CONTAINER_IMAGE": "127.0.0.1:9/finetune:1",
            "METAFLOW_KUBERNETES_IMAGE_PULL_SECRETS": '["registry"]',
            "METAFLOW_DEFAULT_DATASTORE": "s3",
            "METAFLOW_DATASTORE_SYSROOT_S3": "s3://deployed/root",
            "METAFLOW_S3_ENDPOINT_URL": self.store,
            "AWS_ENDPOINT_URL": self.store,
            "METAFLOW_DEFAULT_METADATA": "local",
        }

    def run(self, *arguments: str) -> str:
        done = self.home.python(*arguments, **self.environment())
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def get(self, kind: str, name: str) -> Json:
        return self.plane.api().get(f"/apis/argoproj.io/v1alpha1/namespaces/{self.namespace}/{kind}/{name}")


@pytest.fixture(scope="module")
def cluster(
    control_plane: ControlPlane, s3: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("submitted")
    (folder / ".metaflow").mkdir()
    _client("s3", s3).create_bucket(Bucket="deployed")
    api, namespace = control_plane.api(), control_plane.namespace("submitted")
    api.create(f"/api/v1/namespaces/{namespace}/secrets", {"metadata": {"name": "registry"}})
    for name in ("research", "idle"):
        definition = {"metadata": {"name": name}, "value": 1}
        api.create("/apis/scheduling.k8s.io/v1/priorityclasses", definition)
    kinds = {
        "workflowtemplates": "WorkflowTemplate",
        "cronworkflows": "CronWorkflow",
        "workflows": "Workflow",
    }
    for plural, kind in kinds.items():
        definition = permissive_definition(
            plural, "argoproj.io", "v1alpha1", kind, "Namespaced", folder / f"{plural}.json"
        )
        control_plane.install(f"{plural}.argoproj.io", definition)
    labels = {
        "node.kubernetes.io/instance-type": "p5.48xlarge",
        "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
    }
    resources = {"cpu": "192", "memory": "2048Gi", "nvidia.com/gpu": "8", RDMA: "63"}
    nodes = [node(f"rdma-{number}", labels, resources, taints=[GPU_TAINT]) for number in range(2)]
    nodes.append(node("small", {}, {"cpu": "64", "memory": "512Gi"}))
    for each in nodes:
        api.create("/api/v1/nodes", each)
    yield Cluster(plane=control_plane, namespace=namespace, home=Home(folder), store=s3)
    for each in nodes:
        api.delete(f"/api/v1/nodes/{each['metadata']['name']}")
    for plural in kinds:
        control_plane.kubectl("delete", "crd", f"{plural}.argoproj.io", "--timeout=60s")


@pytest.mark.parametrize(
    "name",
    # test_checklist_flow_deployed.py compiles the checklist with every change
    ["finetune", pytest.param("checklist", marks=pytest.mark.nightly)],
)
def test_pods_on_argo_equal_those_of_a_direct_run(cluster: Cluster, name: str) -> None:
    flow, config, values, steps = CASES[name]
    deploy_arguments = (
        str(FLOWS / flow),
        "--config-value",
        config,
        values,
        "--with",
        f"kubernetes:security_context={SECURITY}",
    )
    direct = json.loads(cluster.run(str(SUBMITTED), *deploy_arguments, "run").splitlines()[-1])
    cluster.run(*deploy_arguments, "argo-workflows", "--name", f"same-{name}", "create")
    workflow = cluster.get("workflowtemplates", f"same-{name}")
    templates = {template["name"]: template for template in workflow["spec"]["templates"]}
    reasons = DIFFERENCES | (OF_CHECKS if name == "checklist" else {})
    unexplained, used = [], set()
    for step in steps:
        mine = _pods_of_run(direct[step])
        theirs = _pods_of_argo(templates[step.replace("_", "-")], workflow["spec"].get("podMetadata") or {})
        assert mine.keys() == theirs.keys()
        for job, pod in mine.items():
            kind = "jobset" if len(mine) > 1 else "pod"
            argo_fields, direct_fields = _fields(pod), _fields(theirs[job])
            for field in sorted(argo_fields.keys() | direct_fields.keys()):
                if argo_fields.get(field) == direct_fields.get(field):
                    continue
                rows = {row for row in reasons if fnmatchcase(f"{kind}/{field}", row)}
                used |= rows
                if not rows:
                    unexplained.append(
                        f"{step} {job} {field}: {argo_fields.get(field)} | {direct_fields.get(field)}"
                    )
    assert not unexplained, "\n".join(unexplained)
    several = templates[steps[-1].replace("_", "-")]
    _check_trained_pods(several, graceful=name == "finetune")
    _check_jobset_is_taken(cluster, several)
    if name == "checklist":
        cron = cluster.get("cronworkflows", f"same-{name}")
        assert cron["spec"]["workflowSpec"] == {"workflowTemplateRef": {"name": f"same-{name}"}}
        assert cron["spec"]["concurrencyPolicy"] == "Forbid"
        _check_nightly(several)
    else:
        assert DIFFERENCES.keys() - used == set(), "rows that explain nothing"


def _check_trained_pods(template: Json, *, graceful: bool) -> None:
    """Check required fields of the multi-node step, which both variants could otherwise lack."""
    for pod in _pods_of_argo(template).values():
        spec, container = pod["spec"], pod["spec"]["containers"][0]
        assert container["resources"]["limits"][RDMA] == container["resources"]["requests"][RDMA] == "1"
        assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert {"name": "NCCL_NET", "value": "IB"} in container["env"]
        assert any(toleration["key"] == "nvidia.com/gpu" for toleration in spec["tolerations"])
        assert spec["nodeSelector"]["node.kubernetes.io/instance-type"] == "p5.48xlarge"
        assert [v for v in spec["volumes"] if v.get("emptyDir", {}).get("medium") == "Memory"]
        assert ("lifecycle" in container, spec["terminationGracePeriodSeconds"]) == (graceful, 60 * graceful)


def _check_nightly(template: Json) -> None:
    """Check that tainted nodes are tolerated and that pending pods have a time limit."""
    manifest = yaml.safe_load(re.sub(r"\{\{[^}]*\}\}", "1", template["resource"]["manifest"]))
    for job in manifest["spec"]["replicatedJobs"]:
        pod_spec = job["template"]["spec"]
        mark = {"key": "training-checklist/unfit", "operator": "Exists", "effect": "NoSchedule"}
        assert mark in pod_spec["template"]["spec"]["tolerations"]
        assert pod_spec["activeDeadlineSeconds"] < 8 * 3600


def _check_jobset_is_taken(cluster: Cluster, template: Json) -> None:
    """Check that the API server accepts every field of the JobSet."""
    numbers = re.sub(r"\{\{=asInt[^}]*\}\}", "1", template["resource"]["manifest"])
    jobset = yaml.safe_load(re.sub(r"\{\{[^}]*\}\}", "n1", numbers))
    path = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{cluster.namespace}/jobsets"
    stored = cluster.plane.api().create(f"{path}?dryRun=All", jobset)["spec"]
    assert stored["failurePolicy"].items() >= jobset["spec"]["failurePolicy"].items()
    assert stored["ttlSecondsAfterFinished"] == jobset["spec"]["ttlSecondsAfterFinished"]
    for sent, job in zip(jobset["spec"]["replicatedJobs"], stored["replicatedJobs"], strict=True):
        for name in ("podFailurePolicy", "activeDeadlineSeconds"):
            assert job["template"]["spec"][name] == sent["template"]["spec"][name]


def _pods_of_run(manifest: Json) -> dict[str, Json]:
    if manifest["kind"] == "Job":
        return {"pod": manifest["spec"]["template"]}
    jobs = manifest["spec"]["replicatedJobs"]
    return {job["name"]: job["template"]["spec"]["template"] for job in jobs}


def _pods_of_argo(template: Json, of_all: Json | None = None) -> dict[str, Json]:
    """Combine a template into pods like Argo; ``of_all`` is ``podMetadata`` of the workflow."""
    if "resource" in template:
        text = re.sub(r"(?<!['\"\w-])\{\{=asInt[^}]*\}\}", "1", template["resource"]["manifest"])
        return _pods_of_run(yaml.safe_load(text))
    placed = ("volumes", "nodeSelector", "tolerations", "activeDeadlineSeconds", "serviceAccountName")
    spec = {name: template[name] for name in placed if template.get(name) is not None}
    spec["containers"] = [{**template["container"], "name": "main"}]
    patch = {"spec": json.loads(template.get("podSpecPatch") or "{}")}
    template_metadata = merge(of_all or {}, template["metadata"])
    return {"pod": merge({"metadata": template_metadata, "spec": spec}, patch)}


def _fields(pod: Json) -> dict[str, Any]:
    """Return a pod as path -> value; named items by name, without the name of the container."""
    fields: dict[str, Any] = {}

    def walk(path: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(f"{path}.{key}", item)
        elif isinstance(value, list) and value and all(isinstance(i, dict) and "name" in i for i in value):
            for item in value:
                named = "*" if path == "spec.containers" else item["name"]
                for key, inner in item.items():
                    if key != "name":
                        walk(f"{path}.{named}" if key == "value" else f"{path}.{named}.{key}", inner)
        elif isinstance(value, list):
            fields[path] = sorted(json.dumps(item, sort_keys=True) for item in value)
        elif value is not None:
            fields[path] = value

    walk("spec", pod["spec"])
    walk("metadata", pod.get("metadata") or {})
    return {path: value for path, value in fields.items() if value != []}
