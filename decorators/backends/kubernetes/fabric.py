"""Network fabric for GPU traffic between a step's nodes, and what its pods need to use it.

The table is ``data/pod_fabrics.yaml``. The preflight reports the devices of the nodes and the networks of the
namespace (``ClusterFacts.devices`` and ``networks``). Without a preflight only EFA is known, from the machine
type.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from decorators.backends import tables
from decorators.backends.interface import ClusterFacts, Network
from decorators.backends.options import Options
from decorators.backends.tables import PodFabric
from estimator.errors import UserError
from estimator.plan import Request

MULTUS = "k8s.v1.cni.cncf.io/networks"
GKE_INTERFACES = "networking.gke.io/interfaces"
GKE_DEFAULT = "networking.gke.io/default-interface"
SHARED = "rdma/"  # prefix of k8s-rdma-shared-dev-plugin: one such resource gives access to all its devices
# Resources of nodes that are no network devices
_NETWORK = re.compile(r"rdma|roce|infiniband|/ib|resib|mlnx|sriov|hca|hostdev|efa|networks/", re.IGNORECASE)
_NO_FABRIC = ("nvidia.com/gpu*", "nvidia.com/mig-*", "nvidia.com/vgpu*", "hugepages-*", "*.IP")


@dataclass(frozen=True, kw_only=True, slots=True)
class UsedFabric:
    """A fabric and the pod settings that use it."""

    row: PodFabric
    resources: tuple[tuple[str, int], ...]  # (extended resource, count)
    annotations: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return self.row.fabric

    @property
    def patch(self) -> dict[str, Any]:
        """Patch that is merged into the pod template."""
        patch = dict(self.row.patch)
        if self.annotations:
            metadata = dict(patch.get("metadata") or {})
            metadata["annotations"] = {**(metadata.get("annotations") or {}), **dict(self.annotations)}
            patch["metadata"] = metadata
        return patch


def fabric_of(request: Request, options: Options, facts: ClusterFacts) -> UsedFabric | None:
    """Return the fabric of a multi-node step; None if there is none or ``resources.fabric`` is ``none``.

    Raises UserError if the requested fabric is not available on the nodes.
    """
    if request.nodes < 2 or options.fabric == "none" or not request.gpus_per_node:
        return None
    offered = dict(facts.devices or ())
    machines = {request.instance_type, *(value for _, value in facts.labels or ())}
    for row in tables.pod_fabrics():
        if options.fabric == "auto" and row.machine not in {None, *machines}:
            continue
        if options.fabric in ("auto", row.fabric) and (found := _used(row, offered, facts)) is not None:
            return found
    if options.fabric not in ("auto", "efa") and facts.devices is not None:
        available = ", ".join(name for name in offered if _is_fabric(name)) or "none"
        rows = [row for row in tables.pod_fabrics() if row.fabric == options.fabric]
        rows.sort(key=lambda row: row.network == "multus")
        requested = " and no ".join(
            "Multus network device" if row.network == "multus" else row.resource for row in rows
        )
        raise UserError(
            f"resources.fabric {options.fabric}: the nodes offer no {requested} (available: {available}).",
            "Install its device plugin, or use --fabric auto.",
        )
    return None


def unused_devices(facts: ClusterFacts) -> tuple[str, ...]:
    """Return devices of the nodes that look like network devices, for a step that uses no fabric."""
    offered = [name for name, count in facts.devices or () if count and _is_fabric(name)]
    return tuple(name for name in offered if _NETWORK.search(name))


def describe_unused(devices: tuple[str, ...]) -> tuple[str, str]:
    """Return (problem, advice) for network devices that the step does not use."""
    return (
        f"the nodes offer {', '.join(devices)}, which no known fabric uses here: NCCL will use TCP",
        "add a NetworkAttachmentDefinition for them to the namespace or to default, "
        "or set them in resources.pod_template",
    )


def _used(row: PodFabric, offered: dict[str, int], facts: ClusterFacts) -> UsedFabric | None:
    """Return the devices and annotations that a pod requests for a fabric; None if the nodes do not offer it.

    ``offered``: minimum count of each device over the nodes.
    """
    names = [name for name in sorted(offered) if fnmatchcase(name, row.resource) and _is_fabric(name)]
    networks: list[Network] = []
    if row.network == "multus":
        plugins = re.compile(row.plugin or ".*")
        networks = [net for net in facts.networks if net.resource in names and plugins.fullmatch(net.plugin)]
        names = [network.resource for network in networks]
    names = [name for name in dict.fromkeys(names) if offered[name]]
    if not names:
        return None
    counts = {name: _count(row, name, offered[name]) for name in names}
    annotations: dict[str, str] = {}
    if row.network == "multus":  # the network is repeated once per device
        annotations[MULTUS] = ",".join(net.name for net in networks for _ in range(counts[net.resource]))
    elif row.network == "gke":
        interfaces = [{"interfaceName": "eth0", "network": "default"}]
        for number, name in enumerate(names, row.first_interface):
            interfaces.append({"interfaceName": f"eth{number}", "network": name.partition("/")[2]})
        annotations |= {GKE_DEFAULT: "eth0", GKE_INTERFACES: json.dumps(interfaces)}
    requested = tuple((name, count) for name, count in counts.items() if count)
    return UsedFabric(row=row, resources=requested, annotations=tuple(annotations.items()))


def _count(row: PodFabric, name: str, offered: int) -> int:
    if row.count == "none":
        return 0
    return 1 if row.count == "shared" and name.startswith(SHARED) else offered


def _is_fabric(name: str) -> bool:
    return "/" in name and not any(fnmatchcase(name, pattern) for pattern in _NO_FABRIC)
