"""infra/kubernetes on a real API server: every object is accepted, and roles allow exactly what is needed.

The Prometheus operator's own definition is not on the machine, and Kueue's only where somebody has put them
there (tests.lab.control_plane): else their kinds are defined here without a schema, so the server checks only
names and scopes of those.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from decorators.backends.findings import Findings
from decorators.backends.kubernetes.nodes import PodSettings
from decorators.backends.kubernetes.preflight import inspect
from decorators.backends.options import Options
from estimator.hardware.cluster.api import Clock
from tests.decorators.backends.plans import planned
from tests.infra.manifests import KUBERNETES, everything, needs_kubectl, render
from tests.lab.api import Api, ApiError, Json
from tests.lab.control_plane import ControlPlane, kueue_definitions, wait_for

pytestmark = [pytest.mark.slow, needs_kubectl]
DEFINED = [
    ("kueue.x-k8s.io", "v1beta2", "ResourceFlavor", "resourceflavors", "Cluster"),
    ("kueue.x-k8s.io", "v1beta2", "ClusterQueue", "clusterqueues", "Cluster"),
    ("kueue.x-k8s.io", "v1beta2", "WorkloadPriorityClass", "workloadpriorityclasses", "Cluster"),
    ("kueue.x-k8s.io", "v1beta2", "LocalQueue", "localqueues", "Namespaced"),
    ("monitoring.coreos.com", "v1", "PrometheusRule", "prometheusrules", "Namespaced"),
    ("monitoring.coreos.com", "v1", "ServiceMonitor", "servicemonitors", "Namespaced"),
]
LAUNCHER = ("somebody", "finetune-launchers")  # user, group
DEPLOYER = ("somebody", "finetune-deployers")
FLOW = ("system:serviceaccount:finetune:flow", "system:serviceaccounts")
CHECKER = ("somebody", "finetune-checkers")
CHECKLIST = ("system:serviceaccount:finetune-check:checklist", "system:serviceaccounts")
IN_CLUSTER = ("system:serviceaccount:finetune:launcher", "system:serviceaccounts")
STRANGER = ("somebody", "system:authenticated")

# who, verbs, API group, resource, name, namespace (None: the cluster), allowed by base, allowed by everything
_ALLOWED = [
    (LAUNCHER, "create get patch delete", "batch", "jobs", "", "finetune", True, True),
    (LAUNCHER, "create get delete", "jobset.x-k8s.io", "jobsets", "", "finetune", True, True),
    (LAUNCHER, "list", "", "pods", "", "finetune", True, True),
    (LAUNCHER, "list", "", "events", "", "finetune", True, True),
    (LAUNCHER, "list", "", "nodes", "", None, True, True),
    (LAUNCHER, "get", "", "namespaces", "finetune", "finetune", True, True),
    (LAUNCHER, "get", "", "serviceaccounts", "flow", "finetune", True, True),
    (LAUNCHER, "list", "", "resourcequotas", "", "finetune", True, True),
    (LAUNCHER, "get", "kueue.x-k8s.io", "localqueues", "", "finetune", True, True),
    (LAUNCHER, "list", "kueue.x-k8s.io", "workloads", "", "finetune", True, True),
    (LAUNCHER, "list", "scheduling.k8s.io", "priorityclasses", "", None, True, True),
    (LAUNCHER, "list", "karpenter.sh", "nodepools", "", None, True, True),
    (LAUNCHER, "list", "", "limitranges", "", "finetune", True, True),
    (LAUNCHER, "list", "networking.k8s.io", "networkpolicies", "", "finetune", True, True),
    (LAUNCHER, "create", "networking.k8s.io", "networkpolicies", "", "finetune", False, False),
    (LAUNCHER, "get list", "kueue.x-k8s.io", "clusterqueues", "", None, True, True),
    (LAUNCHER, "get", "kueue.x-k8s.io", "cohorts", "", None, True, True),
    (LAUNCHER, "get", "kueue.x-k8s.io", "resourceflavors", "", None, True, True),
    (LAUNCHER, "get", "kueue.x-k8s.io", "topologies", "", None, True, True),
    (LAUNCHER, "patch", "kueue.x-k8s.io", "clusterqueues", "", None, False, False),
    (LAUNCHER, "get create", "", "pods/exec", "", "finetune", False, True),
    (LAUNCHER, "create delete", "", "pods", "", "finetune", False, False),
    (LAUNCHER, "get list", "", "secrets", "", "finetune", False, False),
    (LAUNCHER, "create", "", "serviceaccounts/token", "", "finetune", False, False),
    (LAUNCHER, "create", "rbac.authorization.k8s.io", "rolebindings", "", "finetune", False, False),
    (LAUNCHER, "create", "batch", "jobs", "", "default", False, False),
    (LAUNCHER, "list", "", "pods", "", "kube-system", False, False),
    (LAUNCHER, "patch", "", "nodes", "", None, False, False),
    (LAUNCHER, "get", "", "namespaces", "default", "default", False, False),
    (LAUNCHER, "list", "apiextensions.k8s.io", "customresourcedefinitions", "", None, False, False),
    (LAUNCHER, "create", "argoproj.io", "workflowtemplates", "", "finetune", False, False),
    (CHECKER, "create", "batch", "jobs", "", "finetune-check", True, True),
    (CHECKER, "create", "jobset.x-k8s.io", "jobsets", "", "finetune-check", True, True),
    (CHECKER, "list", "", "nodes", "", None, True, True),
    (CHECKER, "create", "argoproj.io", "cronworkflows", "", "finetune-check", False, True),
    (CHECKER, "patch", "", "nodes", "", None, False, False),
    (CHECKER, "create", "batch", "jobs", "", "finetune", False, False),
    (CHECKER, "create", "", "pods/exec", "", "finetune-check", False, False),
    (CHECKER, "get", "", "secrets", "", "finetune-check", False, False),
    (DEPLOYER, "create update", "argoproj.io", "workflowtemplates", "", "finetune", False, True),
    (DEPLOYER, "create", "argoproj.io", "cronworkflows", "", "finetune", False, True),
    (DEPLOYER, "create", "argoproj.io", "workflows", "", "finetune", False, True),
    (DEPLOYER, "get", "", "secrets", "", "finetune", False, False),
    (FLOW, "patch", "argoproj.io", "workflowtaskresults", "", "finetune", False, True),
    (FLOW, "create list deletecollection", "jobset.x-k8s.io", "jobsets", "", "finetune", False, True),
    (FLOW, "create", "batch", "jobs", "", "finetune", False, False),
    (FLOW, "patch list", "", "nodes", "", None, False, False),
    (CHECKLIST, "get list patch", "", "nodes", "", None, True, True),
    (CHECKLIST, "delete update", "", "nodes", "", None, False, False),
    (CHECKLIST, "get", "", "secrets", "", "finetune-check", False, False),
    (CHECKLIST, "create deletecollection", "jobset.x-k8s.io", "jobsets", "", "finetune-check", False, True),
    (CHECKLIST, "create", "jobset.x-k8s.io", "jobsets", "", "finetune", False, False),
    (STRANGER, "create", "batch", "jobs", "", "finetune", False, False),
    (STRANGER, "list", "", "nodes", "", None, False, False),
    # Nobody who trains gets at the account that marks nodes: whoever may create a Job could run it as that
    *[
        (who, verb, group, resource, "", "finetune-check", False, False)
        for who in (LAUNCHER, DEPLOYER, FLOW)
        for verb, group, resource in (
            ("create", "batch", "jobs"),
            ("patch", "batch", "jobs"),
            ("create", "jobset.x-k8s.io", "jobsets"),
            ("create", "", "pods"),
            ("create", "", "pods/exec"),
            ("create", "", "serviceaccounts/token"),
            ("create", "argoproj.io", "workflows"),
            ("create", "argoproj.io", "workflowtemplates"),
            ("create", "argoproj.io", "cronworkflows"),
            ("impersonate", "", "serviceaccounts"),
        )
    ],
]
ALLOWED = [(who, verb, *rest) for who, verbs, *rest in _ALLOWED for verb in verbs.split()]


@pytest.fixture(scope="module")
def based(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    """The server after `kubectl apply -k infra/kubernetes/base`."""
    real = {item["metadata"]["name"]: item for item in kueue_definitions()}
    for group, version, kind, plural, scope in DEFINED:
        cluster_definition = _definition(group, version, kind, plural, scope)
        control_plane.apply(real.get(f"{plural}.{group}", cluster_definition))
    served = {f"{plural}.{group}" for group, _, _, plural, _ in DEFINED}
    wait_for(lambda: served <= _resources(control_plane), 60, "the definitions are served")
    control_plane.kubectl("apply", "--validate=false", "-k", str(KUBERNETES / "base"))
    yield control_plane
    for item in render(KUBERNETES / "base"):
        if item["kind"] in ("ClusterRole", "ClusterRoleBinding"):
            control_plane.kubectl("delete", item["kind"], item["metadata"]["name"])
    control_plane.kubectl("delete", "namespace", "finetune", "finetune-check", "--wait=false")


def test_roles_allow_exactly_the_intended_requests(
    based: ControlPlane, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert _unexpected_answers(based, 6) == []
    everything_applied = everything(tmp_path_factory.mktemp("everything"))
    # Kubernetes 1.34 has those of the other kind, this server not
    objects = [item for item in everything_applied if not item["kind"].startswith("MutatingAdmissionPolicy")]
    based.apply(*objects)
    assert _unexpected_answers(based, 7) == []
    # They are there, under their names
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
    listed_objects = based.kubectl("get", "-f", "-", "-o", "name", stdin=listed).split()
    assert len(listed_objects) == len(objects)


def test_the_example_can_be_applied_unchanged(based: ControlPlane) -> None:
    based.kubectl("apply", "--validate=false", "-k", str(KUBERNETES / "examples" / "eks-h100"))
    account = json.loads(based.kubectl("get", "serviceaccount", "flow", "-n", "finetune", "-o", "json"))
    assert account["metadata"]["annotations"]["eks.amazonaws.com/role-arn"].endswith("role/finetune-flow")


@pytest.fixture
def divided(based: ControlPlane) -> ControlPlane:
    """The server with the example of two teams applied."""
    based.kubectl("apply", "--validate=false", "-k", str(KUBERNETES / "examples" / "two-teams"))
    return based


@pytest.mark.skipif(not kueue_definitions(), reason="no kueue-crds.json beside the control plane's binaries")
def test_every_field_of_the_kueue_objects_is_valid(divided: ControlPlane) -> None:
    """The server drops fields that the definition does not have."""
    rendered = [
        item
        for item in render(KUBERNETES / "examples" / "two-teams")
        if item["apiVersion"] == "kueue.x-k8s.io/v1beta2"
    ]
    assert {item["kind"] for item in rendered} == {row[2] for row in DEFINED if row[0].startswith("kueue")}
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": rendered})
    stored_objects = json.loads(divided.kubectl("get", "-f", "-", "-o", "json", stdin=listed))["items"]
    for sent, stored in zip(rendered, stored_objects, strict=True):
        assert _without(sent.get("spec"), stored.get("spec")) == [], sent["metadata"]["name"]


def _without(sent: object, stored: object, path: str = "spec") -> list[str]:
    """Return fields that were sent and not stored."""
    if isinstance(sent, dict):
        stored_fields = stored if isinstance(stored, dict) else {}
        return [
            lost for name in sent for lost in _without(sent[name], stored_fields.get(name), f"{path}.{name}")
        ]
    if isinstance(sent, list) and isinstance(stored, list) and len(sent) == len(stored):
        pairs = enumerate(zip(sent, stored, strict=True))
        return [lost for number, (a, b) in pairs for lost in _without(a, b, f"{path}[{number}]")]
    return [] if sent == stored else [path]


@pytest.mark.parametrize(
    ("queue", "nodes", "state"),
    [
        ("research-h100", 1, "ok"),  # the team's own
        ("product-h100", 2, "ok"),  # borrowed from the other team
        ("finetune-h100", 2, "ok"),  # all of it borrowed
        ("research-h100", 3, "no"),
    ],
)
def test_a_team_may_borrow_at_most_the_whole_cluster(
    divided: ControlPlane, monkeypatch: pytest.MonkeyPatch, queue: str, nodes: int, state: str
) -> None:
    """Run the preflight as a launcher with the roles of base."""
    monkeypatch.setenv("KUBECONFIG", str(divided.kubeconfig("launcher")))
    # Planned with the cluster's nodes a run asks for less memory than with the catalogue's
    request = replace(planned("llama-70b", "full", "H100", 2).request, nodes=nodes, memory_mib=1700 * 1024)
    asks = Options(queue=queue)
    pods = PodSettings(namespace="finetune", image="127.0.0.1:9/finetune:1")

    def allowed() -> Findings:
        return inspect(request, options=asks, pods=pods, clock=Clock(overall_s=90))[0]

    doing = f"{queue} says {state} to {nodes} nodes: {allowed().rows}"
    wait_for(lambda: allowed().state("queue") == state, 30, doing, every=1)


def test_a_job_of_a_launcher_never_runs_as_the_account_that_taints_nodes(based: ControlPlane) -> None:
    """The real controller creates no pod: the account belongs to a namespace closed to the launcher."""
    api = based.api("launcher")
    for number, account in enumerate(("checklist", "flow")):
        wait_for(lambda: _allowed(based.api(), *ALLOWED[0][:6]), 30, "the role counts")
        api.create("/apis/batch/v1/namespaces/finetune/jobs", _job(f"j{number}", account))
    with pytest.raises(ApiError, match="forbidden"):
        api.create("/apis/batch/v1/namespaces/finetune-check/jobs", _job("j", "checklist"))
    wait_for(lambda: _pods(based, "j1"), 60, "the launcher's own Job has its pod")

    def event_messages() -> str:
        events = based.api().items("/api/v1/namespaces/finetune/events")
        return " ".join(str(event.get("message")) for event in events)

    wait_for(lambda: 'serviceaccount "checklist" not found' in event_messages(), 60, "the other has none")
    assert _pods(based, "j0") == []


def test_a_launcher_inside_the_cluster_has_its_role_and_starts_a_pod(based: ControlPlane) -> None:
    folder = KUBERNETES / "examples" / "launcher"
    objects = render(folder)
    (cron,) = [item for item in objects if item["kind"] == "CronJob"]  # this server has no batch/v1 of it
    based.apply(*[item for item in objects if item is not cron])
    mine = [(IN_CLUSTER, *row[1:6]) for row in ALLOWED if row[0] == LAUNCHER and row[6] and row[7]]
    wait_for(lambda: all(_allowed(based.api(), *row) for row in mine), 30, "it may what launchers may")
    never = [(IN_CLUSTER, *row[1:6]) for row in ALLOWED if row[0] == LAUNCHER and not row[7]]
    assert [row for row in never if _allowed(based.api(), *row)] == []
    job = {"metadata": {"name": "now"}, "spec": cron["spec"]["jobTemplate"]["spec"]}
    based.api().create("/apis/batch/v1/namespaces/finetune/jobs", job)
    (pod,) = wait_for(lambda: _pods(based, "now"), 60, "the controller makes its pod")
    assert pod["spec"]["serviceAccountName"] == "launcher"
    assert any(
        "serviceaccount" in mount["mountPath"] for mount in pod["spec"]["containers"][0]["volumeMounts"]
    )


def _job(name: str, account: str) -> Json:
    container = {"name": "c", "image": "c"}
    pod = {"serviceAccountName": account, "restartPolicy": "Never", "containers": [container]}
    return {"metadata": {"name": name}, "spec": {"template": {"spec": pod}}}


def _pods(server: ControlPlane, job: str) -> list[Json]:
    return server.api().items("/api/v1/namespaces/finetune/pods", labelSelector=f"job-name={job}")


def _unexpected_answers(server: ControlPlane, column: int) -> list[object]:
    """Return the rows that the server answers differently, after it has read the roles."""
    api = server.api()

    def wrong_requests() -> list[object]:
        return [row[:6] for row in ALLOWED if _allowed(api, *row[:6]) != row[column]]

    deadline = time.monotonic() + 120
    while (wrong := wrong_requests()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return wrong


def _allowed(
    api: Api, who: tuple[str, str], verb: str, group: str, resource: str, name: str, namespace: str | None
) -> bool:
    """Return the answer of `kubectl auth can-i --as`, also for kinds that this server lacks."""
    plural, _, subresource = resource.partition("/")
    attributes = {"verb": verb, "group": group, "resource": plural, "subresource": subresource, "name": name}
    spec = {"user": who[0], "groups": [who[1]]}
    review = {"spec": {**spec, "resourceAttributes": {**attributes, "namespace": namespace or ""}}}
    answer = api.create("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
    return bool(answer["status"].get("allowed"))


def _resources(server: ControlPlane) -> set[str]:
    return set(server.kubectl("api-resources", "-o", "name", check=False).split())


def _definition(group: str, version: str, kind: str, plural: str, scope: str) -> dict[str, object]:
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": scope,
            "names": {"kind": kind, "plural": plural},
            "versions": [{"name": version, "served": True, "storage": True, "schema": schema}],
        },
    }
