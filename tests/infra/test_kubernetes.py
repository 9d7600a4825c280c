"""infra/kubernetes renders valid Kubernetes objects and agrees with the code that uses them."""

from __future__ import annotations

import csv
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from checklist.outputs import prometheus
from checklist.verdict import judge
from decorators.backends import tables
from decorators.backends.kubernetes import security
from decorators.backends.kubernetes.request import EFA, HUGEPAGES
from estimator import hardware
from estimator.hardware.cluster import tables as cluster_tables
from estimator.hardware.cluster.pods import PodRules
from estimator.hardware.cluster.pools import pool_of, refusal
from estimator.plan import Request
from launchers.cluster.endpoint import CLUSTER_PORTS, STORE_PORTS
from tests.checklist.runs import gpu_run
from tests.infra.manifests import KUBERNETES, Json, everything, needs_kubectl, of_kind, queues, render

pytestmark = needs_kubectl
CUSTOM = {
    "ClusterQueue",
    "LocalQueue",
    "ResourceFlavor",
    "WorkloadPriorityClass",
    "PrometheusRule",
    "ServiceMonitor",
}
API = "1.34"  # of the EKS cluster in clusters/eks.yaml
FOLDERS = sorted(
    path.parent for path in KUBERNETES.rglob("kustomization.yaml") if "components" not in path.parts
)
Objects = tuple[Json, ...]
Samples = dict[str, list[dict[str, str]]]  # the labels of each sample of each metric


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Objects:
    return everything(tmp_path_factory.mktemp("everything"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(KUBERNETES)))
def test_every_folder_renders(folder: Path) -> None:
    assert render(folder)


def test_every_object_has_the_shape_of_its_api(objects: Objects) -> None:
    launcher = render(KUBERNETES / "examples" / "launcher")
    known_objects = [item for item in (*objects, *launcher) if item["kind"] not in CUSTOM]
    assert len(known_objects) > 15
    for item in known_objects:
        kubernetes_validate.validate(item, API, strict=True)


def test_launcher_pods_meet_the_enforced_pod_security_standard(objects: Objects) -> None:
    levels = [
        item["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
        for item in of_kind(objects, "Namespace")
    ]
    assert levels == ["restricted", "restricted"]  # components/restricted is among all components
    (cron,) = of_kind(render(KUBERNETES / "examples" / "launcher"), "CronJob")
    pod = cron["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    both = {**pod["securityContext"], **container["securityContext"]}
    in_snakes = {re.sub(r"([A-Z])", r"_\1", name).lower(): value for name, value in both.items()}
    assert security.is_restricted(in_snakes)
    assert in_snakes["run_as_user"] == security.RESTRICTED["run_as_user"] == 1000
    assert security.is_restricted(security.RESTRICTED)
    for name in security.RESTRICTED:
        if name != "run_as_user":
            assert not security.is_restricted({k: v for k, v in security.RESTRICTED.items() if k != name})


def test_roles_name_every_verb_and_no_secret(objects: Objects) -> None:
    rules = [
        rule for kind in ("Role", "ClusterRole") for item in of_kind(objects, kind) for rule in item["rules"]
    ]
    assert rules
    for rule in rules:
        assert "*" not in {*rule["verbs"], *rule["resources"], *rule["apiGroups"]}
        assert not {"secrets", "pods/log", "serviceaccounts/token"} & set(rule["resources"])


# -- queues ----------------------------------------------------------------------------------------------


def test_a_queue_covers_every_resource_of_the_pods_of_a_flow(objects: Objects) -> None:
    requested = {"cpu", "memory", "ephemeral-storage", "nvidia.com/gpu", EFA, HUGEPAGES}
    cluster_queues = of_kind(objects, "ClusterQueue")
    assert len(cluster_queues) == len(queues())
    for queue in cluster_queues:
        (group,) = queue["spec"]["resourceGroups"]
        assert set(group["coveredResources"]) == requested
        for flavor in group["flavors"]:
            assert [item["name"] for item in flavor["resources"]] == group["coveredResources"]


def test_each_queue_admits_to_the_nodes_of_its_gpu(objects: Objects) -> None:
    flavors = {item["metadata"]["name"]: item.get("spec", {}) for item in of_kind(objects, "ResourceFlavor")}
    queue_of = {item["metadata"]["name"]: item["spec"] for item in of_kind(objects, "ClusterQueue")}
    with (cluster_tables.DATA / "gpu_labels.csv").open() as file:
        labels = {row["gpu"]: row["value"] for row in csv.DictReader(file) if row["scheme"] == "gfd"}
    for local in of_kind(objects, "LocalQueue"):
        name = local["metadata"]["name"]
        assert local["spec"]["clusterQueue"] == name
        cpu, gpu = (item["name"] for item in queue_of[name]["resourceGroups"][0]["flavors"])
        assert "nodeLabels" not in flavors[cpu]
        product = flavors[gpu]["nodeLabels"]["nvidia.com/gpu.product"]
        assert labels[hardware.current().gpu(product).name] == product
        assert all(part in product.lower() for part in name.removeprefix("finetune-").split("-"))


def test_the_priorities_of_queue_and_pods_are_the_same(objects: Objects) -> None:
    def values(kind: str) -> dict[str, int]:
        return {item["metadata"]["name"]: item["value"] for item in of_kind(objects, kind)}

    assert values("WorkloadPriorityClass") == values("PriorityClass")
    assert min(values("PriorityClass").values()) == values("PriorityClass")["finetune-checklist"] < 0


# -- EFA -------------------------------------------------------------------------------------------------


def test_the_efa_plugin_runs_on_every_machine_with_gpus_and_efa(objects: Objects) -> None:
    (daemons,) = of_kind(objects, "DaemonSet")
    (term,) = daemons["spec"]["template"]["spec"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    gpus = {gpu.name: gpu.vendor for gpu in hardware.current().gpus}
    expected = {
        item.name
        for item in hardware.current().instances
        if item.cloud == "aws" and tables.efa_interfaces(item) and gpus.get(item.gpu) == "nvidia"
    }
    assert set(term["matchExpressions"][0]["values"]) == expected


def test_the_efa_plugin_needs_a_digest_set_by_the_user(objects: Objects, tmp_path: Path) -> None:
    (daemons,) = of_kind(objects, "DaemonSet")
    image = daemons["spec"]["template"]["spec"]["containers"][0]["image"]
    name, _, digest = image.partition("@sha256:")
    assert not re.fullmatch("[0-9a-f]{64}", digest)  # an invalid reference, so no node pulls anything
    chosen = {
        "components": [os.path.relpath(KUBERNETES / "components" / "efa-device-plugin", tmp_path.resolve())],
        "images": [{"name": name, "digest": f"sha256:{'a' * 64}"}],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(chosen))
    (daemons,) = of_kind(render(tmp_path), "DaemonSet")
    assert daemons["spec"]["template"]["spec"]["containers"][0]["image"] == f"{name}@sha256:{'a' * 64}"
    assert name in (KUBERNETES / "README.md").read_text()


def test_flow_pods_accept_connections_only_from_nodes_of_their_run(objects: Objects) -> None:
    network_policies = of_kind(objects, "NetworkPolicy")
    policies = [
        item for item in network_policies if item["metadata"]["name"] != "pushgateway"
    ]  # no pod of a flow
    assert {item["metadata"]["namespace"] for item in policies} == {"finetune", "finetune-check"}
    of_jobsets = {"matchExpressions": [{"key": "jobset.sigs.k8s.io/jobset-name", "operator": "Exists"}]}
    for item in policies:
        spec = item["spec"]
        assert set(spec["policyTypes"]) == {"Ingress", "Egress"}
        if spec["podSelector"]:
            assert spec["podSelector"] == of_jobsets
            assert set(CLUSTER_PORTS + STORE_PORTS) == set(range(29400, 29440))
            ports = [
                {"protocol": "TCP", "port": 29400, "endPort": 29439},
                {"protocol": "TCP", "port": 32768, "endPort": 60999},  # net.ipv4.ip_local_port_range of a pod
            ]
            assert spec["ingress"] == [{"from": [{"podSelector": of_jobsets}], "ports": ports}]
            assert spec["egress"] == [{"to": [{"podSelector": of_jobsets}], "ports": ports}]
        else:
            assert "ingress" not in spec
    assert len(policies) == 4


def test_the_eks_cluster_enforces_policies_logs_and_encrypts() -> None:
    cluster = yaml.safe_load((KUBERNETES / "clusters" / "eks.yaml").read_text())
    (cni,) = [item for item in cluster["addons"] if item["name"] == "vpc-cni"]
    assert json.loads(cni["configurationValues"]) == {"enableNetworkPolicy": "true"}
    assert "audit" in cluster["cloudWatch"]["clusterLogging"]["enableTypes"]
    assert "0.0.0.0/0" not in cluster["vpc"]["publicAccessCIDRs"]
    for group in cluster["managedNodeGroups"]:
        assert group["volumeEncrypted"]
        assert group["disablePodIMDS"]


def test_the_eks_cluster_defines_every_referenced_account_group_and_machine() -> None:
    cluster = yaml.safe_load((KUBERNETES / "clusters" / "eks.yaml").read_text())
    accounts = of_kind(render(KUBERNETES / "base"), "ServiceAccount")
    assert {_place(item["metadata"]) for item in cluster["iam"]["serviceAccounts"]} == {
        _place(item["metadata"]) for item in accounts
    }
    assert cluster["metadata"]["version"] == API
    assert cluster["accessConfig"]["accessEntries"][0]["kubernetesGroups"] == ["finetune-launchers"]
    pools = {pool.name: pool for pool in map(pool_of, node_pools())}
    machine = hardware.current().find_instance("p5.48xlarge")
    requirements = {key: values for key, _, values in pools["h100"].requirements}
    assert requirements["node.kubernetes.io/instance-type"] == (machine.name,)
    (zone,) = requirements["topology.kubernetes.io/zone"]
    assert zone in cluster["availabilityZones"]  # of its subnets; left out, eksctl draws them
    assert len(cluster["availabilityZones"]) >= 2  # as EKS demands
    (queue,) = of_kind(render(KUBERNETES / "examples" / "eks-h100"), "ClusterQueue")
    quota = {
        item["name"]: int(item["nominalQuota"])
        for item in queue["spec"]["resourceGroups"][0]["flavors"][1]["resources"]
        if item["name"] in ("nvidia.com/gpu", EFA)
    }
    nodes = pools["h100"].machines_left(machine)
    assert nodes == 2
    assert quota == {
        "nvidia.com/gpu": nodes * machine.gpu_count,
        EFA: nodes * tables.efa_interfaces(machine),
    }


def test_karpenter_gpu_pools_start_empty_and_match_their_runs() -> None:
    """Only empty nodes are removed. Labels that queues select are on the pools, before nodes exist."""
    classes = {item["metadata"]["name"]: item["spec"] for item in of_kind(_karpenter(), "EC2NodeClass")}
    for item in node_pools():
        spec = item["spec"]
        assert spec["disruption"]["consolidationPolicy"] == "WhenEmpty"
        assert {tuple(b["reasons"]): b["nodes"] for b in spec["disruption"]["budgets"]}[("Drifted",)] == "0"
        assert spec["template"]["spec"]["expireAfter"] == "Never"
        assert classes[spec["template"]["spec"]["nodeClassRef"]["name"]]["metadataOptions"] == {
            "httpTokens": "required",
            "httpPutResponseHopLimit": 1,
        }
    pools = {pool.name: pool for pool in map(pool_of, node_pools())}
    sizes = {"cpu": 1, "memory_mib": 1, "shared_memory_mib": 1, "disk_mib": 1}
    h100 = Request(nodes=2, gpus_per_node=8, gpu_type="H100 SXM", instance_type="p5.48xlarge", **sizes)
    l40s = Request(
        nodes=1, gpus_per_node=4, gpu_type="L40S", instance_type="g6e.12xlarge", spot=True, **sizes
    )
    for name, request, other in (("h100", h100, "l40s-spot"), ("l40s-spot", l40s, "h100")):
        (label,) = cluster_tables.labels_of(request.gpu_type or "", "gfd")
        selected = replace(request, node_labels=label.labels)
        assert refusal(pools[name], selected, PodRules()) is None
        assert refusal(pools[other], selected, PodRules())
    assert "leave room for 2" in str(refusal(pools["h100"], replace(h100, nodes=3), PodRules()))


def _karpenter() -> Objects:
    return render(KUBERNETES / "karpenter")


def node_pools() -> list[Json]:
    return of_kind(_karpenter(), "NodePool")


def _place(metadata: dict[str, str]) -> tuple[str, str]:
    return metadata["namespace"], metadata["name"]


# -- metadata ---------------------------------------------------------------------------------------------


def test_network_rules_let_the_metadata_service_reach_its_database_and_clients_reach_it() -> None:
    objects = render(KUBERNETES / "examples" / "metadata-service")
    for item in objects:
        kubernetes_validate.validate(item, API, strict=True)
        assert item["metadata"]["namespace"] == "metaflow"
    (database,), (service,) = of_kind(objects, "StatefulSet"), of_kind(objects, "Deployment")
    pods = {item["metadata"]["name"]: item["spec"]["template"] for item in (database, service)}
    for service_object in of_kind(objects, "Service"):
        name = service_object["metadata"]["name"]
        assert service_object["spec"]["selector"] == pods[name]["metadata"]["labels"]
        ports = {port["name"]: port["containerPort"] for port in pods[name]["spec"]["containers"][0]["ports"]}
        (port,) = service_object["spec"]["ports"]
        assert ports[port["targetPort"]] == port["port"]
    spec = pods["metadata-service"]["spec"]
    for container in (*spec["initContainers"], *spec["containers"]):
        variables = {item["name"]: item.get("value") for item in container["env"]}
        assert (variables["MF_METADATA_DB_HOST"], variables["MF_METADATA_DB_PORT"]) == ("metadata-db", "5432")
    policies = {
        item["metadata"]["name"]: item["spec"]["ingress"][0] for item in of_kind(objects, "NetworkPolicy")
    }
    (expression,) = policies["metadata-service"]["from"][0]["namespaceSelector"]["matchExpressions"]
    assert expression["values"] == ["finetune", "finetune-check"]
    allowed = policies["metadata-db"]["from"][0]["podSelector"]["matchLabels"]
    assert allowed == pods["metadata-service"]["metadata"]["labels"]
    guide = (KUBERNETES.parents[1] / "docs" / "kubernetes.md").read_text()
    assert "METAFLOW_SERVICE_INTERNAL_URL=http://metadata-service.metaflow:8080" in guide
    (role,) = of_kind(objects, "Role")
    assert not any(set(rule["verbs"]) - {"get", "list", "create"} for rule in role["rules"])
    assert not any("secrets" in rule["resources"] for rule in role["rules"])


# -- monitoring ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """Labels of each sample of each metric written by the checklist."""
    file = tmp_path_factory.mktemp("metrics") / "checklist.prom"
    prometheus.write(judge(gpu_run()), file)
    families = text_string_to_metric_families(file.read_text())
    return {family.name: [sample.labels for sample in family.samples] for family in families}


def test_the_alerts_have_the_shape_of_the_prometheus_operator(objects: Objects) -> None:
    from cloudcoil.models.prometheus_operator import v1  # here: its import takes seconds

    for model in (v1.PrometheusRule, v1.ServiceMonitor):
        (manifest,) = of_kind(objects, model.__name__)
        read = model.model_validate(manifest).model_dump(mode="json", by_alias=True, exclude_unset=True)
        assert read["spec"] == manifest["spec"]  # what the model doesn't know, it would drop


def test_prometheus_finds_the_gateway_to_which_the_checklist_sends_its_metrics(objects: Objects) -> None:
    (service,), (monitor,) = of_kind(objects, "Service"), of_kind(objects, "ServiceMonitor")
    (gateway,) = of_kind(objects, "Deployment")
    labels = gateway["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (port,), (endpoint,) = service["spec"]["ports"], monitor["spec"]["endpoints"]
    assert endpoint == {"port": port["name"], "honorLabels": True}
    metadata = service["metadata"]
    address = f"http://{metadata['name']}.{metadata['namespace']}:{port['port']}"
    assert address in (KUBERNETES / "examples" / "nightly.yaml").read_text()
    prometheus.check_gateway(address)
    policies = {item["metadata"]["name"]: item["spec"] for item in of_kind(objects, "NetworkPolicy")}
    assert policies["pushgateway"]["ingress"] == [{"ports": [{"protocol": "TCP", "port": port["port"]}]}]
    outwards = [
        item["spec"]
        for item in of_kind(objects, "NetworkPolicy")
        if item["metadata"]["namespace"] == "finetune-check" and not item["spec"]["podSelector"]
    ]
    allowed = [
        entry["port"] for spec in outwards for rule in spec.get("egress", ()) for entry in rule["ports"]
    ]
    assert port["port"] in allowed


def test_alerts_use_metrics_that_the_checklist_writes(objects: Objects, written: Samples) -> None:
    (group,) = of_kind(objects, "PrometheusRule")[0]["spec"]["groups"]
    for rule in group["rules"]:
        metrics = _check(rule["expr"], written)
        used = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        assert used <= {name for metric in metrics for labels in written[metric] for name in labels}
    assert {name for rule in group["rules"] for name in _names(rule["expr"])} <= set(written)


def test_the_dashboard_shows_metrics_that_the_checklist_writes(objects: Objects, written: Samples) -> None:
    (manifest,) = of_kind(objects, "ConfigMap")
    dashboard = json.loads(manifest["data"]["training-checklist.json"])
    shown = [target for panel in dashboard["panels"] for target in panel["targets"]]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for target in shown:
        metrics = _check(target["expr"], written)
        used = set(re.findall(r"{{(\w+)}}", target.get("legendFormat", "")))
        assert used <= {name for metric in metrics for labels in written[metric] for name in labels}
    assert {name for target in shown for name in _names(target["expr"])} == set(written)


def _check(expression: str, written: Samples) -> set[str]:
    """Return the metrics of an expression; fails if there are none or if they select nothing."""
    promql_parser.parse(expression)
    names = _names(expression)
    assert names, expression
    assert names <= set(written), expression
    for name, selector in re.findall(r"(training_checklist_\w+){([^}]*)}", expression):
        assert any(_selected(labels, selector) for labels in written[name]), expression
    return names


def _names(expression: str) -> set[str]:
    return set(re.findall(r"training_checklist_\w+", expression))


def _selected(labels: dict[str, str], selector: str) -> bool:
    for label, operator, value in re.findall(r'(\w+)(=~|=)"([^"]*)"', selector):
        pattern: Any = value if operator == "=~" else re.escape(value)
        if not re.fullmatch(pattern, labels.get(label, "")):
            return False
    return True
