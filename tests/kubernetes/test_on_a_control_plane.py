"""The flows through the real Metaflow client on a real API server; commands of pods are executed.

What a pod has is the code package alone: its Python cannot import this project. Whoever launches has the role
that infra/kubernetes gives him, and no other.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from decorators.backends.kubernetes.affinity import affinity_of
from estimator.plan import Plan
from launchers.models import tiny_llama
from tests.conftest import write_sums
from tests.flows.conftest import QUICK
from tests.flows.marked_secrets import leaks, unpacked
from tests.kubernetes.cluster import NAMESPACE, Cluster, Launched
from tests.lab.api import Json
from tests.lab.control_plane import permissive_definition, wait_for
from tests.lab.kubelet import Node
from tests.lab.pod_spec import quantity
from tests.metaflow_extensions.finetune.test_lazily import documented

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

STEPS = 8
LIMIT_S = 1200  # a minute and a half on a machine that does nothing else
HF_TOKEN = "hf_" + "TheTokenOfTheTest" * 2
WEBHOOK = "https://hooks.example/services/T0000/TheWebhookOfTheTest"
READ_CARDS = """
import json, sys
from metaflow import Run, namespace
from metaflow.cards import get_cards
from metaflow.plugins.cards.exception import CardNotPresentException
namespace(None)
found = {}
for step in Run(sys.argv[1]):
    for task in step:
        try:
            cards = get_cards(task)
        except CardNotPresentException:
            continue
        for card in cards:
            found[f"{step.id}/{task.id}/{card.id}"] = card.get()
json.dump(found, sys.stdout)
"""
READ_TASKS = """
import json, sys
from metaflow import Run, namespace
namespace(None)
run = Run(sys.argv[1])
tasks = {f"{step.id}/{task.id}": task.finished and task.successful for step in run for task in step}
json.dump({"run": run.finished and run.successful, "tasks": tasks}, sys.stdout)
"""
READ_PLAN = """
import sys
from metaflow import Run, namespace
namespace(None)
print(Run(sys.argv[1])["prepare"].task["plan"].data.to_json())
"""
# What a cluster that has trained this model before has in its datastore (the weights aside).
KEEP_MODEL = """
import sys
from pathlib import Path
from decorators import _metaflow
from decorators.storage import MetaflowStorage
from launchers.store.bundles import put_bundle
store = MetaflowStorage(_metaflow.configured_storage(), "finetune-cache")
put_bundle(store, sys.argv[1], Path(sys.argv[2]))
"""
FETCH = """
import sys
from pathlib import Path
from decorators import fetch_model
print(fetch_model(sys.argv[1], Path(sys.argv[2])))
"""


@pytest.fixture(scope="module")
def finetuned(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """A finished run of finetune_flow on two pods; the token is in a Secret and in the environment."""
    home = tmp_path_factory.mktemp("finetune")
    cluster.control_plane.apply(_secret("finetune-tokens", {"HF_TOKEN": HF_TOKEN}))
    data = write_sums(home / "sums.jsonl")
    launch_arguments = ["--with", "kubernetes", "--device=cpu", "--nodes=2"]
    launched = cluster.launch(
        "finetune_flow",
        home,
        *("run", *launch_arguments, f"--dataset={data}", *QUICK, f"--max-steps={STEPS}"),
        HF_TOKEN=HF_TOKEN,
        CHECKLIST_WEBHOOK_URL=WEBHOOK,
        METAFLOW_KUBERNETES_SECRETS="finetune-tokens",
    )
    assert launched.wait(LIMIT_S) == 0, launched.full_log()
    return launched


def test_tiny_llama_trains_over_two_pods(cluster: Cluster, finetuned: Launched) -> None:
    artifacts = finetuned.artifacts("FinetuneFlow")
    plan: Plan = artifacts["plan"]
    assert (plan.target, plan.request.nodes, plan.layout.device) == ("kubernetes", 2, "cpu")
    losses = [metrics["loss"] for metrics in artifacts["metrics"]]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 1
    assert "world size 2, scheduler kubernetes" in finetuned.log
    pods = [pod for pod in cluster.hub.pods if "-0-0.js-" in pod.spec.hostname]
    assert len({pod.spec.hostname for pod in pods}) == 2
    assert len({pod.spec.environment["NODE_NAME"] for pod in pods}) == 2
    finetuned.nothing_left()


def test_every_task_is_registered_with_the_metadata_service(finetuned: Launched) -> None:
    tasks = json.loads(finetuned.read(READ_TASKS, f"FinetuneFlow/{finetuned.run_id}"))
    assert tasks["run"]
    assert all(tasks["tasks"].values()), tasks
    assert sum(name.startswith("train_nodes/") for name in tasks["tasks"]) == 2


@pytest.mark.nightly
def test_the_cards_of_both_nodes_and_of_the_evaluation_are_stored(finetuned: Launched) -> None:
    cards = json.loads(finetuned.read(READ_CARDS, f"FinetuneFlow/{finetuned.run_id}"))
    steps = sorted(name.partition("/")[0] for name in cards)
    assert steps == ["evaluate", "train_nodes", "train_nodes"]
    assert all(name.endswith("/finetune") for name in cards)
    assert all("Card render failed" not in page and len(page) > 100_000 for page in cards.values())


def test_the_model_is_fetched_from_the_datastore(finetuned: Launched, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    finetuned.read(FETCH, f"FinetuneFlow/{finetuned.run_id}", str(folder))
    config = json.loads((folder / "model" / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert list((folder / "model").glob("*.safetensors"))


def test_the_launchers_role_is_sufficient(cluster: Cluster, finetuned: Launched) -> None:
    audited = [event for event in cluster.control_plane.audit() if event["user"]["username"] == "launcher"]
    modified = {event["objectRef"]["resource"] for event in audited if event["verb"] == "create"}
    assert {"jobs", "jobsets"} <= modified
    refused = [event["requestURI"] for event in audited if event["responseStatus"]["code"] == 403]
    assert refused == []


def test_no_secret_is_in_a_manifest_log_artifact_card_or_code_package(
    cluster: Cluster, finetuned: Launched
) -> None:
    (kubeconfig,) = (value for name, value in finetuned.environment.items() if name == "KUBECONFIG")
    token = json.loads(Path(kubeconfig).read_text())["users"][0]["user"]["token"]
    keys = cluster.store.keys
    hidden = {HF_TOKEN, WEBHOOK, token, keys["AWS_SECRET_ACCESS_KEY"], keys["AWS_ACCESS_KEY_ID"]}
    places = dict(_places(cluster, finetuned))
    assert any(name.endswith("flows/finetune_flow.py") for name in places), "a code package is unpacked"
    assert any(name.endswith(".html") for name in places), "a card is read"
    assert len([name for name in places if name.startswith("manifest jobs/")]) >= 7
    assert leaks(places.items(), hidden) == []
    # The test can see what it looks for: the pods did get the token.
    assert HF_TOKEN in (cluster.hub.pods[-1].folder / "start.sh").read_text()


@pytest.mark.nightly
def test_the_jobset_of_llama_70b_matches_the_plan_and_ctrl_c_deletes_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The nodes have RoCE. No container starts, so the control pod exists and no worker does."""
    machines = [
        Node(
            name=f"gpu-{number}",
            instance_type="p5.48xlarge",
            cpu="192",
            memory="2048Gi",
            extended={"nvidia.com/gpu": "8", "nvidia.com/sriov_rdma": "8"},
            taints=({"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"},),
        )
        for number in range(8)
    ]
    for machine in machines:
        cluster.add_machine(machine)
    _add_network(cluster, tmp_path)
    values = ("pod_template={metadata: {annotations: {team: a}}}", "priority_class=finetune-training")
    options = [f"--set=resources.{value}" for value in values]
    launched = cluster.launch("finetune_flow", tmp_path, "run", *_llama_70b(cluster, tmp_path), *options)
    try:
        jobset = wait_for(lambda: _jobset(cluster, launched), LIMIT_S, "there is a JobSet", every=0.5)
        name = jobset["metadata"]["name"]
        plan = Plan.from_json(launched.read(READ_PLAN, f"FinetuneFlow/{launched.run_id}").decode())
        (pod,) = wait_for(
            lambda: _placed(cluster, name), 120, "the scheduler places the control pod", every=0.5
        )
        assert pod["metadata"]["labels"]["jobset.sigs.k8s.io/replicatedjob-name"] == "control"
        assert pod["spec"]["nodeName"] in {machine.name for machine in machines}
        check_jobset(jobset, plan)
        check_preparing_job(cluster, launched, plan)
        os.killpg(launched.process.pid, signal.SIGINT)
        launched.wait(120)
        # Its node has no kubelet that would end it within its grace
        wait_for(lambda: _all_deleted(cluster, name), 60, "every pod is told to go")
    finally:
        if launched.process.poll() is None:
            os.killpg(launched.process.pid, signal.SIGINT)
            launched.wait(120)
        for machine in machines:
            cluster.api.delete(f"/api/v1/nodes/{machine.name}")
        _remove_pods_without_kubelet(cluster)


SCORE = "def share_of_e(prompt, answer):\n    return answer.lower().count('e') / max(len(answer), 1)\n"


@pytest.mark.nightly
def test_the_code_package_of_a_flow_includes_gpu_profile(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "my_flow.py").write_text(documented())
    launched = cluster.launch(
        str(tmp_path / "my_flow"), tmp_path, "run", "--with=kubernetes:cpu=1,memory=2048"
    )
    assert launched.wait(LIMIT_S) == 0, launched.full_log()
    assert launched.artifacts("MyFlow")["measured"].host_peak_bytes > 0
    launched.nothing_left()


@pytest.mark.nightly
def test_rejection_sampling_generates_on_two_pods_and_scores_and_trains_on_others(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "scores.py").write_text(SCORE)
    data = write_sums(tmp_path / "sums.jsonl")
    options = ["--score=scores.py:share_of_e", f"--dataset={data}", "--answers=4", *QUICK, "--max-steps=2"]
    drawn = ("prompts=40", "max_new_tokens=8", "nodes=2")
    options += [f"--set=rejection.{each}" for each in drawn]
    launched = cluster.launch(
        "rejection_flow", tmp_path, "run", "--with", "kubernetes", "--device=cpu", *options
    )
    assert launched.wait(LIMIT_S) == 0, launched.full_log()
    artifacts = launched.artifacts("RejectionFlow")
    plan: Plan = artifacts["plan"]
    assert plan.target == "kubernetes"
    assert plan.generation is not None
    assert (artifacts["drawn"].answers, artifacts["selection"].overview.drawn.answers) == (160, 160)
    assert artifacts["selection"].kept.answers == 40
    assert artifacts["selection"].kept.mean > artifacts["selection"].overview.drawn.mean
    tasks = json.loads(launched.read(READ_TASKS, f"RejectionFlow/{launched.run_id}"))["tasks"]
    assert sum(name.startswith("generate/") for name in tasks) == 2
    assert all(tasks.values())
    cards = json.loads(launched.read(READ_CARDS, f"RejectionFlow/{launched.run_id}"))
    steps = sorted(name.partition("/")[0] for name in cards if name.endswith("/rejection"))
    assert steps == ["generate", "generate", "score", "select"]
    resources_by_step = {
        pod["metadata"]["annotations"]["metaflow/step_name"]: pod["spec"]["containers"][0]["resources"]
        for pod in cluster.pods()
        if pod["metadata"].get("annotations", {}).get("metaflow/run_id") == launched.run_id
    }
    for name in ("generate", "score", "compare"):
        stage = plan.generation.stage(name)
        assert stage is not None
        assert quantity(resources_by_step[name]["requests"]["memory"]) == pytest.approx(
            stage.request.memory_mib * 2**20, rel=0.01
        )
    launched.nothing_left()


def _llama_70b(cluster: Cluster, home: Path) -> list[str]:
    """Arguments; the cluster has the weights from an earlier run (in fact those of tiny-llama)."""
    home.mkdir(exist_ok=True)
    weights = tiny_llama.make(home / "m")
    keep = [sys.executable, "-c", KEEP_MODEL, "weights/meta-llama--Llama-3.1-70B", str(weights)]
    variables = cluster.environment(home)
    done = cluster.hub.run(keep, variables, timeout=180, cwd=home)
    assert done.returncode == 0, done.stdout
    data = write_sums(home / "sums.jsonl")
    return ["--with", "kubernetes", "--model=llama-70b", "--gpu=H100", f"--dataset={data}"]


def _add_network(cluster: Cluster, folder: Path) -> None:
    """Add the network as Multus and the NVIDIA network operator do for RoCE."""
    group, plural = "k8s.cni.cncf.io", "network-attachment-definitions"
    kind = "NetworkAttachmentDefinition"
    definition = permissive_definition(plural, group, "v1", kind, "Namespaced", folder / "definition.json")
    cluster.control_plane.install(f"{plural}.{group}", definition)
    device = {"k8s.v1.cni.cncf.io/resourceName": "nvidia.com/sriov_rdma"}
    network = {"apiVersion": f"{group}/v1", "kind": kind, "metadata": {"name": "rail", "annotations": device}}
    cluster.api.create(f"/apis/{group}/v1/namespaces/{NAMESPACE}/{plural}", network)


def _jobset(cluster: Cluster, launched: Launched) -> Json | None:
    assert launched.process.poll() is None, launched.full_log()
    jobsets = cluster.api.items(f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{NAMESPACE}/jobsets")
    jobset_of_run = [
        jobset for jobset in jobsets if "llama-70b" in str(jobset) or "p5.48xlarge" in str(jobset)
    ]
    return jobset_of_run[0] if jobset_of_run else None


def _pods(cluster: Cluster, jobset: str) -> list[Json]:
    path = f"/api/v1/namespaces/{NAMESPACE}/pods"
    return cluster.api.items(path, labelSelector=f"jobset.sigs.k8s.io/jobset-name={jobset}")


def _all_deleted(cluster: Cluster, jobset: str) -> bool:
    return all("deletionTimestamp" in pod["metadata"] for pod in _pods(cluster, jobset))


def _remove_pods_without_kubelet(cluster: Cluster) -> None:
    """Remove pods that no machine will ever end."""

    def leftover() -> list[Json]:
        kubelet_nodes = {kubelet.node.name for kubelet in cluster.kubelets}
        return [pod for pod in cluster.pods() if pod["spec"].get("nodeName") not in kubelet_nodes]

    def all_removed() -> bool:
        for pod in leftover():
            path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}"
            cluster.api.delete(path, gracePeriodSeconds=0)
        return not leftover()

    # A Job that is being deleted may make one more.
    wait_for(all_removed, 60, "no pod is left on a machine without kubelet", every=0.5)


def _placed(cluster: Cluster, jobset: str) -> list[Json]:
    return [pod for pod in _pods(cluster, jobset) if pod["spec"].get("nodeName")]


def check_jobset(jobset: Json, plan: Plan) -> None:
    planned_request, jobs = plan.request, {job["name"]: job for job in jobset["spec"]["replicatedJobs"]}
    assert planned_request.nodes > 1
    assert jobs["control"]["replicas"] + jobs["worker"]["replicas"] == planned_request.nodes
    for job in jobs.values():
        pod = job["template"]["spec"]["template"]["spec"]
        container = pod["containers"][0]
        assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == planned_request.gpus_per_node == 8
        assert container["resources"]["limits"]["nvidia.com/sriov_rdma"] == "8"
        assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
        assert {"name": "NCCL_NET", "value": "IB"} in container["env"]
        assert pod["priorityClassName"] == "finetune-training"
        assert pod["terminationGracePeriodSeconds"] == 60
        assert "preStop" in container["lifecycle"]
        annotations = job["template"]["spec"]["template"]["metadata"]["annotations"]
        assert annotations["k8s.v1.cni.cncf.io/networks"] == ",".join(["rail"] * 8)
        assert annotations["team"] == "a"
        assert pod["nodeSelector"]["node.kubernetes.io/instance-type"] == planned_request.instance_type
        assert pod["affinity"] == affinity_of(jobset["metadata"]["name"])
        shared = next(v for v in pod["volumes"] if v.get("emptyDir", {}).get("medium") == "Memory")
        assert shared["emptyDir"]["sizeLimit"] == f"{planned_request.shared_memory_mib}Mi"
        manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": pod}
        kubernetes_validate.validate(manifest, "1.32", strict=True)


def check_preparing_job(cluster: Cluster, launched: Launched, plan: Plan) -> None:
    """Check that the weights fit on the disk of the pod that fetches them, without a GPU."""
    (pod,) = (
        pod
        for pod in cluster.pods()
        if pod["metadata"].get("annotations", {}).get("metaflow/run_id") == launched.run_id
        and pod["metadata"]["annotations"]["metaflow/step_name"] == "prepare"
    )
    assert (pod["spec"]["priorityClassName"], pod["spec"]["priority"]) == ("finetune-training", 1000)
    resources = pod["spec"]["containers"][0]["resources"]
    assert plan.prepare is not None
    disk = quantity(resources["requests"]["ephemeral-storage"])
    assert 2 * plan.parameters < disk < plan.request.disk_mib * 2**20
    assert disk >= plan.prepare.disk_mib * 2**20
    assert not re.search("nvidia.com/|rdma", str(resources))
    assert not {"NCCL_NET", "IPC_LOCK", "preStop", "rail", "team"} & set(re.findall(r"\w+", str(pod)))


@pytest.fixture(scope="module")
def checked(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """A finished run of checklist_flow on two pods."""
    home = tmp_path_factory.mktemp("checklist")
    options = ["--nodes=2", "--device=cpu", "--profile=quick"]
    launched = cluster.launch("checklist_flow", home, "run", "--with", "kubernetes", *options)
    launched.wait(LIMIT_S)
    return launched


@pytest.mark.nightly
def test_the_checklist_measures_two_pods_and_judges_them(cluster: Cluster, checked: Launched) -> None:
    artifacts = checked.artifacts("ChecklistFlow")
    assert artifacts["cluster"].startswith("kubernetes:")
    result = artifacts["result"]
    assert len(result["nodes"]) == 2, checked.full_log()
    assert result["verdict"] in ("PASS", "WARN"), checked.full_log()
    assert checked.process.returncode == 0, checked.full_log()
    assert len(artifacts["healthy_nodes"]) == 2
    assert artifacts["bad_nodes"] == []
    checked.nothing_left()
    cards = json.loads(checked.read(READ_CARDS, f"ChecklistFlow/{checked.run_id}"))
    assert [name.partition("/")[0] for name in cards] == ["verdict"]
    (page,) = cards.values()
    assert "Card render failed" not in page


def _places(cluster: Cluster, finetuned: Launched) -> Iterator[tuple[str, bytes]]:
    """Return everything that a run stores or prints, by name."""
    yield "terminal", finetuned.log.encode()
    for name, text in cluster.logs().items():
        yield f"pod {name}", text.encode()
    for path in finetuned.home.rglob("*"):
        if path.is_file():
            yield f"launching machine {path}", path.read_bytes()
    kinds = {
        "pods": "/api/v1/pods",
        "jobs": "/apis/batch/v1/jobs",
        "jobsets": "/apis/jobset.x-k8s.io/v1alpha2/jobsets",
        "configmaps": "/api/v1/configmaps",
        "events": "/api/v1/events",
    }
    for kind, path in kinds.items():
        for item in cluster.api.items(path):
            yield f"manifest {kind}/{item['metadata']['name']}", json.dumps(item).encode()
    yield "audit", json.dumps(cluster.control_plane.audit()).encode()
    for key, content in cluster.store.objects().items():
        yield from unpacked(f"s3 {key}", content)


def _secret(name: str, values: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "stringData": values,
    }
