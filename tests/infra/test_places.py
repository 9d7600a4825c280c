"""Every command of a cloud page fits the cluster of that page: it can be planned, and each step placed.

The nodes are those that the cluster's file or the page's command lines would start, with what their kubelets
leave for pods; planner and fit are the ones that a run and its preflight use.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace
from typing import Any

import pytest
import yaml

from decorators.arguments import Role
from decorators.backends.interface import StepRequest
from decorators.backends.kubernetes.fit import fit
from decorators.backends.kubernetes.request import values_for
from decorators.backends.overrides import request_for
from decorators.step_launch import minimum_of, minimum_of_other_step
from estimator import hardware
from estimator.hardware.cluster import tables
from estimator.hardware.cluster.inventory import ClusterState, cluster_capacity
from estimator.hardware.cluster.nodes import Node
from estimator.hardware.cluster.pods import PodRules
from estimator.hardware.cluster.pools import pool_of
from estimator.plan import GIB, MIB, Plan, Request
from flows.cluster_check import launch
from flows.finetune import artifacts, planning
from tests.infra.manifests import KUBERNETES, ROOT, needs_kubectl, of_kind, render
from tests.lab.pod_spec import quantity

pytestmark = pytest.mark.slow

GB = 10**9
# Beside GPU machines, which the table has: vCPU and GiB, by the clouds' pages of these machine types
CPU_MACHINES = {"m7i.2xlarge": (8, 32), "e2-standard-8": (8, 32), "Standard_D8s_v5": (8, 32)}
NVME_GB = {"p5.48xlarge": 8 * 3840}  # EC2, "accelerated computing": instance store volumes
LOCAL_SSD_GIB = 375  # GKE, "about local SSD storage"


@dataclass(frozen=True)
class Pool:
    """Nodes of one kind."""

    cloud: str
    machine: str
    count: int
    disk_bytes: float  # that pods may have together
    taints: tuple[str, ...] = ()

    def nodes(self) -> list[Node]:
        kind = hardware.current().find_instance(self.machine)
        gpus = kind.gpu_count if kind is not None else 0
        vcpu, gib = CPU_MACHINES.get(self.machine, (0, 0))
        sized = kind or replace(
            hardware.current().instances[0], cloud=self.cloud, vcpu=vcpu, ram_bytes=gib * GIB
        )
        room, daemons = tables.pod_resources_on(sized), tables.daemons()
        assert room is not None, self.machine
        resources: dict[str, float] = {
            "cpu": room.cpu + daemons.cpu,
            "memory": room.memory_bytes + daemons.memory_bytes,
            "ephemeral-storage": self.disk_bytes,
        }
        labels = {"node.kubernetes.io/instance-type": self.machine, "topology.kubernetes.io/zone": "zone-a"}
        if kind is not None:
            resources |= {"nvidia.com/gpu": gpus}
            if "EFA x" in kind.fabric:
                resources |= {"vpc.amazonaws.com/efa": float(kind.fabric.partition("EFA x")[2])}
            scheme = {"gcp": "gke"}.get(self.cloud, "gfd")
            labels |= dict(tables.labels_of(kind.gpu, scheme)[0].labels)
        return [
            Node(
                name=f"{self.machine}-{number}",
                labels=labels,
                allocatable=resources,
                capacity=resources,
                ready=True,
                unschedulable=False,
                taints=self.taints,
                cloud=self.cloud,
            )
            for number in range(self.count)
        ]


def eks() -> list[Node]:
    """Nodes of clusters/eks.yaml and karpenter/node-pools.yaml, less 10 % for evictions and 1 GiB for EKS."""
    cluster = yaml.safe_load((KUBERNETES / "clusters" / "eks.yaml").read_text())
    nodes = []
    for group in cluster["managedNodeGroups"]:
        size = group["volumeSize"] * GIB
        nodes += Pool("aws", group["instanceType"], group["desiredCapacity"], 0.9 * size - GIB).nodes()
    (h100,) = [pool for pool in map(pool_of, _node_pools()) if pool.name == "h100"]
    (types,) = [values for key, _, values in h100.requirements if key.endswith("/instance-type")]
    machine = hardware.current().find_instance(types[0])
    assert machine is not None
    size = NVME_GB[machine.name] * GB  # instanceStorePolicy of the node class
    count = h100.machines_left(machine) or 0
    return nodes + Pool("aws", machine.name, count, 0.9 * size - GIB, h100.taints).nodes()


def _node_pools() -> list[dict[str, Any]]:
    text = (KUBERNETES / "karpenter" / "node-pools.yaml").read_text()
    return list(yaml.safe_load_all(text))


def gke() -> list[Node]:
    """Nodes of infra/gke, minus the disk space reserved by GKE (page "plan node sizes")."""
    pool, main = example_of("gke"), (ROOT / "infra" / "gke" / "main.tf").read_text()
    system = re.search(r'node_count = (\d+)\s+node_config {\s+machine_type += "([\w-]+)"', main)
    assert system is not None
    ssds = re.search(rf'"{pool["machine_type"]}" = (\d+)[,\s]', _after("local_ssds", "gke"))
    assert ssds is not None
    boot = 100 * GB / GIB  # its default
    free_gib = boot - 0.1 * boot - min(boot / 2, 6 + 0.35 * boot, 100)
    nodes = Pool("gcp", system[2], int(system[1]), free_gib * GIB).nodes()
    disks = int(ssds[1])
    free_gib = disks * LOCAL_SSD_GIB * 0.9 - {1: 50, 2: 75}.get(disks, 100)
    taint = ("nvidia.com/gpu=present:NoSchedule",)
    return nodes + Pool("gcp", pool["machine_type"], int(pool["max_nodes"]), free_gib * GIB, taint).nodes()


def aks() -> list[Node]:
    """Nodes of infra/aks, minus 10 % of the disk for evictions."""
    pool, main = example_of("aks"), (ROOT / "infra" / "aks" / "main.tf").read_text()
    (machine,) = re.findall(r'vm_size += "(\w+)"', main)
    (count,) = re.findall(r"node_count += (\d+)", main)
    system_disk, gpu_disk = (int(size) * GIB for size in re.findall(r"os_disk_size_gb += (\d+)", main))
    nodes = Pool("azure", machine, int(count), 0.9 * system_disk).nodes()
    taints = ("sku=gpu:NoSchedule",)
    assert f'"{taints[0]}"' in main
    return nodes + Pool("azure", pool["vm_size"], int(pool["max_nodes"]), 0.9 * gpu_disk, taints).nodes()


def example_of(stack: str) -> dict[str, str]:
    """Return gpu_pool in the example variables of a stack."""
    text = (ROOT / "infra" / stack / "terraform.tfvars.example").read_text()
    (pool,) = re.findall(r"^gpu_pool += {(.*)}$", text, re.MULTILINE)
    return {name: value.strip('"') for name, value in re.findall(r'(\w+) = ("[^"]*"|\d+)', pool)}


def _after(name: str, stack: str) -> str:
    """Return the line of a local value of a stack."""
    (line,) = re.findall(rf"^ +{name} += (.*)$", (ROOT / "infra" / stack / "versions.tf").read_text(), re.M)
    return str(line)


def shell_lines(page: str) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", "").splitlines()]


def options_of(parameters: list[str]) -> dict[str, str]:
    """Parse ``--name value`` and ``--name=value``; options without a value are ignored."""
    option_values = {}
    for word, following in zip(parameters, [*parameters[1:], "--"], strict=True):
        if word.startswith("--"):
            name, _, value = word.removeprefix("--").partition("=")
            if value or not following.startswith("--"):
                option_values[name] = value or following
    return option_values


def parameters_of(line: str) -> dict[str, Any]:
    """Return the parameters of the flow in a command line."""
    parameters: dict[str, Any] = options_of(shlex.split(line))
    if "set" in parameters:
        parameters["set"] = (parameters["set"],)
    numbers = {"nodes", "global-batch-size"}
    parameters = {name: int(value) if name in numbers else value for name, value in parameters.items()}
    arguments = {name.replace("-", "_"): value for name, value in parameters.items() if name != "with"}
    return {"no_calibration": True, **arguments}


# page, whose cluster: the pages that make one, and those that speak of H100 without a cluster of their own
PAGES = [
    ("docs/kubernetes.md", eks),
    ("docs/nodes.md", eks),
    ("docs/backends.md", eks),
    ("docs/gcp.md", gke),
    ("docs/azure.md", aks),
]
RUNS = [
    (page, cluster, line)
    for page, cluster in PAGES
    for line in shell_lines(page)
    if line.startswith("finetune run --with kubernetes ") and "--plan-only" not in line
]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the plan of the command of a page on these nodes, as ``run`` makes it."""
    monkeypatch.setattr(artifacts, "stage", lambda _, model: (model, {}))
    monkeypatch.setattr(artifacts, "carry", lambda *_: None)

    def plan(line: str, nodes: list[Node]) -> Plan:
        state = ClusterState(context="page", nodes=tuple(nodes))
        cluster = cluster_capacity(state, hardware.current(), PodRules())
        monkeypatch.setattr(planning.destination, "read_cluster", lambda *_: cluster)
        return planning.plan_from_parameters(parameters_of(line), "kubernetes")

    return plan


def placed(request: Request, plan: Plan | None, role: Role, nodes: list[Node]) -> dict[str, Any]:
    """Return the requests of the pods of a step, after checking that nodes exist for all of them."""
    minimum = None
    if plan is not None:
        minimum = minimum_of(plan) if role == "train" else minimum_of_other_step(request)
    fit_result = fit(nodes, request, PodRules(), minimum)
    assert len(fit_result.names) >= request.nodes, (role, fit_result.rejections)
    step_request = StepRequest(backend="kubernetes", request=request, minimum=minimum, facts=fit_result.facts)
    return values_for(step_request).compute | {"gpu": request.gpus_per_node}


@pytest.mark.parametrize(
    ("page", "cluster", "line"), RUNS, ids=[f"{page}: {line[31:]}" for page, _, line in RUNS]
)
def test_the_example_run_of_each_cloud_page_fits_its_cluster(
    page: str, cluster: Any, line: str, planned: Any
) -> None:
    nodes = cluster()
    plan = planned(line, nodes)
    assert plan.request.instance_type in {name.rpartition("-")[0] for name in (node.name for node in nodes)}
    for role in ("data", "train", "evaluate"):
        placed(request_for(plan, role), plan, role, nodes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("page", "cluster"), PAGES)
def test_the_checklist_of_each_cloud_page_fits_its_cluster(page: str, cluster: Any) -> None:
    lines = [line for line in shell_lines(page) if line.startswith("finetune check --with kubernetes")]
    for line in lines:
        arguments = options_of(shlex.split(line))
        parameters = {"nodes": int(arguments["nodes"]), "gpus_per_node": int(arguments["gpus-per-node"])}
        placed(checklist_request(**parameters), None, "train", cluster())
    assert bool(lines) == (page in ("docs/kubernetes.md", "docs/gcp.md", "docs/azure.md"))


def checklist_request(**options: Any) -> Request:
    flow_options = launch.FlowOptions(**options)
    return launch._request(flow_options, options["gpus_per_node"])


@needs_kubectl
def test_example_quotas_admit_the_runs_of_the_pages(planned: Any) -> None:
    """Kueue counts all pods of a step together, in the flavor of their nodes."""
    (queue,) = of_kind(render(KUBERNETES / "examples" / "eks-h100"), "ClusterQueue")
    flavors = {
        flavor["name"]: {item["name"]: quantity(str(item["nominalQuota"])) for item in flavor["resources"]}
        for flavor in queue["spec"]["resourceGroups"][0]["flavors"]
    }
    nodes = eks()
    runs = [line for page, cluster, line in RUNS if cluster is eks and page == "docs/kubernetes.md"]
    assert runs
    for line in runs:
        plan = planned(line, nodes)
        for role in ("data", "train", "evaluate"):
            request = request_for(plan, role)  # type: ignore[arg-type]
            step_request = placed(request, plan, role, nodes)  # type: ignore[arg-type]
            quota = flavors["gpu-h100" if request.gpus_per_node else "cpu"]
            requests = {
                "cpu": step_request["cpu"],
                "memory": step_request["memory"] * 10**6,
                "ephemeral-storage": step_request["disk"] * 10**6,
                "nvidia.com/gpu": step_request["gpu"],
                **{
                    name: quantity(value)
                    for name, value in step_request.get("extended_resources", {}).items()
                },
            }
            for name, amount in requests.items():
                assert request.nodes * amount <= quota[name], (line, role, name)
    # and no more than the nodes have
    for flavor, gpus in (("cpu", False), ("gpu-h100", True)):
        mine = [node.allocatable for node in nodes if bool(node.allocatable.get("nvidia.com/gpu")) == gpus]
        for name in ("cpu", "memory", "ephemeral-storage", "nvidia.com/gpu", "vpc.amazonaws.com/efa"):
            assert flavors[flavor][name] <= sum(node.get(name, 0) for node in mine), (flavor, name)


def test_disks_of_batch_pools_hold_the_run_of_the_page(planned: Any) -> None:
    """docs/aws.md, on the pools of the example of its variables; images take some 30 GiB of a disk."""
    (line,) = [
        line
        for line in shell_lines("docs/aws.md")
        if line.startswith("finetune run --with batch") and "--plan-only" not in line
    ]
    plan = planning.plan_from_parameters(
        {**parameters_of(line), "from_catalogue": True, "cloud": "aws"}, "batch"
    )
    example = (ROOT / "infra" / "aws" / "terraform.tfvars.example").read_text()
    pool = re.search(rf'instance_type = "{plan.request.instance_type}", max_nodes = (\d+)', example)
    assert pool is not None, plan.request.instance_type
    assert int(pool[1]) >= plan.request.nodes
    variables = (ROOT / "infra" / "aws" / "variables.tf").read_text()
    (disk,) = re.findall(r"disk_gib +\S+ optional\(number, (\d+)\)", variables)
    assert plan.request.disk_mib * MIB < (int(disk) - 30) * GIB
    (cpu_disk,) = re.findall(r'"cpu_disk_gib" {[^}]*default += (\d+)', variables)
    assert request_for(plan, "data").disk_mib * MIB < (int(cpu_disk) - 30) * GIB
