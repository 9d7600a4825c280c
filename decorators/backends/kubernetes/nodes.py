"""The rows of a preflight that speak of nodes: which could take the request, zones, GPUs, fabric."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from decorators.backends import tables
from decorators.backends.findings import Clock, Findings
from decorators.backends.kubernetes import daemon_pods
from decorators.backends.kubernetes import request as kubernetes
from decorators.backends.kubernetes.api import ApiRefusedError, ClusterApi, Json, UnreachableError, found_at
from decorators.backends.kubernetes.autoscalers import could_grow
from decorators.backends.kubernetes.fit import Fit, Least, fit
from decorators.backends.kubernetes.request import ClusterFacts, Toleration
from decorators.backends.options import Options
from decorators.backends.tables import Room
from estimator.hardware.cluster_nodes import PAGE, RULE, Node, node_of
from estimator.plan import GIB, Request

DEVICE_PLUGIN = f"kubectl apply -f {tables.release('NVIDIA device plugin').manifest}"
OTHER_GPUS = "finetune gpus --from-cluster shows what it has; plan for that with --gpu and --gpus"
LESS = "Add a node with that room, or ask for less: --with kubernetes:disk=MB,memory=MB,cpu=N"
INSTALL_EFA = "kubectl apply -k infra/kubernetes/components/efa-device-plugin"


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What Metaflow will submit a step with, beside its size."""

    namespace: str = "default"
    service_account: str | None = None
    image: str | None = None
    pull_secrets: tuple[str, ...] = ()
    node_selector: tuple[tuple[str, str], ...] = ()  # the user's own
    tolerations: tuple[Toleration, ...] = ()  # beside those that the request gets by the table of taints
    own_tolerations: bool = False  # the user's stand instead of the table's
    submits: bool = True  # this login does, rather than a scheduler that the flow is deployed to

    @classmethod
    def from_values(
        cls,
        values: Mapping[str, Any],
        own_selector: Mapping[str, str] | None = None,
        *,
        tolerations: tuple[Toleration, ...] = (),
        own_tolerations: bool = False,
        submits: bool = True,
    ) -> Step:
        """From the values of a step's ``@kubernetes``."""
        return cls(
            namespace=values.get("namespace") or "default",
            service_account=values.get("service_account"),
            image=values.get("image"),
            pull_secrets=tuple(values.get("image_pull_secrets") or ()),
            node_selector=tuple((own_selector or {}).items()),
            tolerations=tolerations,
            own_tolerations=own_tolerations,
            submits=submits,
        )


@dataclass(kw_only=True, slots=True)
class Look:
    """One preflight while it runs."""

    api: ClusterApi
    request: Request
    options: Options
    step: Step
    least: Least | None
    findings: Findings
    clock: Clock

    def get(self, path: str, **query: str) -> Json:
        return self.api.get(path, self.clock.left(), **query)

    def find(self, path: str) -> Json | None:
        """The same, or None where the cluster has nothing there."""
        return found_at(self.get, path)

    def may(self, verb: str, resource: str, *, group: str = "", namespace: str = "", name: str = "") -> bool:
        """Whether this login may, so that nothing is asked that is refused; no namespace: in all of them."""
        wanted = {"verb": verb, "resource": resource, "group": group, "namespace": namespace, "name": name}
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": {key: value for key, value in wanted.items() if value}},
        }
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        return bool(self.api.post(path, body, self.clock.left()).get("status", {}).get("allowed"))

    def namespaced(self, kind: str, name: str = "", group: str = "") -> str:
        root = f"/apis/{group}" if group else "/api/v1"
        return f"{root}/namespaces/{self.step.namespace}/{kind}" + (f"/{name}" if name else "")


def check_nodes(seen: Look) -> ClusterFacts:
    """The rows on nodes, GPUs and fabric; facts of what fits."""
    try:
        nodes = _listed(seen)
    except (ApiRefusedError, UnreachableError) as error:
        seen.findings.unknown("nodes", f"not told: {error}", f"An administrator can allow it: {RULE}")
        return ClusterFacts()
    nodes = [node for node in nodes if _has(node, seen.step.node_selector)]
    own, only = seen.step.tolerations, seen.step.own_tolerations
    fitting = partial(fit, nodes, seen.request, seen.options, seen.least, own=own, own_only=only)
    found = fitting()
    daemons, beside = _daemons(seen, found)
    if daemons is not None:
        found = fitting(daemons=daemons)
    if len(found.names) >= seen.request.nodes:
        seen.findings.ok("nodes", f"{len(found.names)} could take it, {seen.request.nodes} needed; {beside}")
        _zones(seen, found)
    else:
        _too_few(seen, found)
    _fabric(seen, found)
    return found.facts


def _daemons(seen: Look, found: Fit) -> tuple[Room | None, str]:
    """What the nodes' daemon pods ask for, None where that is not told; and in words."""
    told, assumed = None, " (assumed: this login may not list the pods of all namespaces)"
    try:
        if seen.may("list", "pods"):
            told = daemon_pods.most_of(seen.get, found.names)
            assumed = " (assumed: the nodes have none yet)"
    except (ApiRefusedError, UnreachableError) as error:
        assumed = f" (assumed: {error})"
    kept = told or tables.daemons()
    left = f"{kept.cpu:g} CPUs and {kept.memory_bytes / GIB:.1f} GiB are left to daemon pods"
    return told, left + ("" if told else assumed)


def _listed(seen: Look) -> list[Node]:
    nodes: list[Node] = []
    page: dict[str, str] = {"limit": str(PAGE)}
    while True:
        answer = seen.get("/api/v1/nodes", **page)
        nodes += [node_of(item) for item in answer.get("items") or []]
        token = (answer.get("metadata") or {}).get("continue")
        if not token:
            return nodes
        page["continue"] = token


def _has(node: Node, selector: tuple[tuple[str, str], ...]) -> bool:
    return all(node.labels.get(name) == value for name, value in selector)


def _too_few(seen: Look, found: Fit) -> None:
    request = seen.request
    lacks = ", ".join(f"{count} {what}" for what, count in found.lacks[:4]) or "there are none"
    has = f"{len(found.names)} of {request.nodes} nodes could take it; the others: {lacks}"
    try:
        growth = could_grow(seen.get, seen.may, request, found.clouds)
    except (ApiRefusedError, UnreachableError) as error:
        seen.findings.unknown("nodes", f"{has}; what could be added is not told: {error}")
        return
    if growth.possible:
        seen.findings.unknown("nodes", f"{has}; {growth.why}", growth.command)
    elif any("device plugin" in what for what, _ in found.lacks):
        seen.findings.no("device plugin", has, DEVICE_PLUGIN)
    else:
        others = f"; {growth.why}" if growth.why else ""
        seen.findings.no("nodes", has + others, OTHER_GPUS if request.gpus_per_node else LESS)


def _zones(seen: Look, found: Fit) -> None:
    if seen.request.nodes < 2 or found.facts.zone or seen.options.zone or not found.zones:
        return
    spread = ", ".join(f"{zone}: {count}" for zone, count in found.zones)
    seen.findings.unknown(
        "zone",
        f"no zone has {seen.request.nodes} of the nodes ({spread}): traffic between zones is slow, and costs",
        "--zone NAME keeps to one",
    )


def _fabric(seen: Look, found: Fit) -> None:
    if seen.request.nodes < 2:
        return
    fabric = tables.fabric_of(kubernetes.machine_of(seen.request))
    if fabric is None:
        return
    if not fabric.asked_for:
        seen.findings.unknown("fabric", f"{fabric.name} is not used: {fabric.why}")
    elif found.names and not found.facts.efa:
        seen.findings.unknown(
            "fabric", "the machines have EFA, but the nodes offer none: NCCL will go over TCP", INSTALL_EFA
        )
    elif found.facts.efa:
        seen.findings.ok("fabric", f"EFA, {found.facts.efa} interfaces a node")
