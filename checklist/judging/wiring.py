"""Links and network of a run, from its facts: the input of the expected bandwidth."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from checklist.analysis.expectation import Wiring, nvlink_sharp
from checklist.measurements import Facts, Measurements, RdmaPort
from estimator import hardware
from estimator.errors import UserError
from estimator.hardware import Gpu, Instance

_PORTS = re.compile(r"(\d+)x(\d+)")  # "IB NDR 8x400 + 80 Ethernet"
_PLAIN = ("ENA", "gVNIC", "Ethernet")  # fabrics of machine types without RDMA
_EFA = re.compile(r"EFA x(\d+)")
NOMINAL_SHARE = 0.94  # NVLink's nominal rate / the signaling rate that NVML reports (H100: 25 of 26.562 GB/s)
_Network = tuple[str, int, float]  # fabric, ports of a node, Gbit/s of a port


def wiring_of(run: Measurements, leaders: Sequence[Facts]) -> Wiring:
    """Derive the wiring of a run; ``leaders``: the facts of each node's first rank."""
    cuda = run.device == "cuda"
    gpus = run.gpus_per_node_asked if cuda else 1  # without GPUs a pair of nodes uses one socket
    hosts = len({fact.node for fact in leaders})
    racks = Counter(fact.nvlink_domain for fact in leaders)
    # GPUs of hosts under one NVLink switch form one domain
    joined = None not in racks and len(racks) < hosts
    domains = len(racks) if joined else hosts
    per_domain = min(racks.values()) if joined else 1
    network = _network(run, leaders, gpus) if cuda else _ethernet(leaders)
    link, rate, sharp = _link(run, leaders, gpus * per_domain) if cuda else (None, None, False)
    fabric, ports, gbps = network or (None, None, None)
    return Wiring(
        gpus=gpus * per_domain,
        domains=domains,
        link=link,
        link_gbytes_per_s=rate,
        nvlink_sharp=sharp and run.environment.get("NCCL_NVLS_ENABLE") != "0",
        fabric=fabric,
        ports=None if ports is None else ports * per_domain,
        port_gbps=gbps,
    )


# ---- links between the GPUs of a domain


def _link(run: Measurements, leaders: Sequence[Facts], gpus: int) -> tuple[str | None, float | None, bool]:
    """Return kind and rate (GB/s, one direction) of a GPU's link, and whether NVLS is supported."""
    names = {name for fact in leaders for name in fact.gpu_names}
    models = [hardware.find_gpu_by_nvml_name(name) for name in sorted(names)]
    with_rate = [model for model in models if model is not None and model.interconnect_gbps is not None]
    if not with_rate or len(with_rate) < len(models):
        return None, None, False
    slowest = min(with_rate, key=lambda model: model.interconnect_gbps or 0)
    kind = _kind(slowest)
    bridges = _bridges(run) if kind == "pcie" and gpus == 2 else None
    if bridges is not None:
        return "nvlink", bridges, False
    sharp = kind == "nvlink" and all(nvlink_sharp(model.architecture) for model in with_rate)
    return kind, (slowest.interconnect_gbps or 0) / 2, sharp  # the table counts both directions


def _kind(gpu: Gpu) -> str:
    name = gpu.interconnect.partition("(")[0]
    return "nvlink" if "NVLink" in name else "xgmi" if "xGMI" in name else "pcie"


def _bridges(run: Measurements) -> float | None:
    """Return the rate of NVLink bridges between two PCIe GPUs as NVML reports it; None without bridges."""
    rates = [
        state.nvlinks_active * state.nvlink_mbytes_per_s / 1000 * NOMINAL_SHARE
        for state in run.health
        if state.nvlinks_active and state.nvlink_mbytes_per_s
    ]
    return min(rates) if rates and len(rates) == len(run.health) else None


# ---- network of a node


def _network(run: Measurements, leaders: Sequence[Facts], gpus: int) -> _Network | None:
    """Return the GPU network of a node: its machine type's, else its RDMA ports, else its Ethernet."""
    machine = machine_of(leaders)
    machine_network = None if machine is None else _of_machine(machine, gpus)
    if machine_network is not None:
        return machine_network
    if machine is not None and has_no_rdma(machine):
        return _plain(machine, leaders)
    ports = _of_ports(leaders, run.environment)
    if ports is not None or any(fact.rdma_ports for fact in leaders):
        return ports
    return _ethernet(leaders)


def port_gbps_of(machine: Instance) -> float | None:
    """Return the rate of one InfiniBand or RoCE port of a cloud's machine type; None without such ports."""
    fabric, _, gbps = _of_machine(machine, machine.gpu_count) or ("", 0, None)
    return gbps if fabric in ("infiniband", "roce") else None  # EFA's driver does not report its true rate


def has_no_rdma(machine: Instance) -> bool:
    """Return whether a cloud's machine type has no network besides its Ethernet, which may burst."""
    return machine.fabric.startswith(_PLAIN)


def _plain(machine: Instance, leaders: Sequence[Facts]) -> _Network | None:
    """Return the network of a cloud's machine type without RDMA; an interface may report more than it has."""
    interface = _ethernet(leaders)
    rates = [machine.network_gbps, None if interface is None else interface[2]]
    known = [rate for rate in rates if rate]
    return ("tcp", 1, min(known)) if known else None


def machine_of(leaders: Sequence[Facts]) -> Instance | None:
    """Return the machine type of all nodes; None for several or unlisted types."""
    kinds = {fact.instance_type for fact in leaders}
    name = kinds.pop() if len(kinds) == 1 else None
    try:
        return None if name is None else hardware.instance(name)
    except UserError:  # a machine type that the table does not have
        return None


def _of_machine(machine: Instance, gpus: int) -> _Network | None:
    """Return the network of a cloud's machine type, scaled to the GPUs in use; None if it is not listed."""
    fabric = machine.fabric
    efa, ports = _EFA.search(fabric), _PORTS.search(fabric)
    if efa is not None and machine.network_gbps is not None:
        count = int(efa[1])
        rate = machine.network_gbps / count
        return _efa(count, rate), _share(count, gpus, machine.gpu_count), rate
    if ports is not None:
        name = "tcpxo" if "TCPXO" in fabric else "tcpx" if "TCPX" in fabric else "infiniband"
        name = "roce" if "RoCE" in fabric else name
        return name, _share(int(ports[1]), gpus, machine.gpu_count), float(ports[2])
    if "RoCE" in fabric and machine.network_gbps is not None and machine.gpu_count:
        return "roce", gpus, machine.network_gbps / machine.gpu_count
    return None


def _share(ports: int, gpus: int, total: int) -> int:
    """Return the ports next to the GPUs in use."""
    return max(1, round(ports * min(1.0, gpus / total))) if total else ports


def _of_ports(leaders: Sequence[Facts], environment: Mapping[str, str]) -> _Network | None:
    """Return the network of the fastest active RDMA ports that NCCL may use, as most nodes have it."""
    networks: Counter[_Network] = Counter()
    for fact in leaders:
        active = [
            port
            for port in fact.rdma_ports or ()
            if port.state in (None, "ACTIVE") and port.gbps and _chosen(port, environment.get("NCCL_IB_HCA"))
        ]
        if active:
            rate = max(port.gbps or 0 for port in active)
            at_rate = [port for port in active if port.gbps == rate]
            networks[_fabric(fact, at_rate, rate), len(at_rate), rate] += 1
    return networks.most_common(1)[0][0] if networks else None


def _fabric(fact: Facts, ports: Sequence[RdmaPort], rate: float) -> str:
    if fact.efa_devices:
        return _efa(len(ports), rate)
    return "infiniband" if ports[0].layer == "InfiniBand" else "roce"


def _efa(ports: int, rate: float) -> str:
    """Return the generation of EFA: v1 and v2 have ports of 100 Gbit/s, v2 32 of them in a p5."""
    if rate >= 400:
        return "efa4"
    return "efa3" if rate >= 200 else "efa2" if ports > 4 else "efa1"


def _chosen(port: RdmaPort, setting: str | None) -> bool:
    """Return whether NCCL_IB_HCA allows a port: names or prefixes, ``=`` exact ones, ``^`` all but these."""
    if not setting:
        return True
    exclude, names = setting.startswith("^"), setting.lstrip("^")
    exact, names = names.startswith("="), names.lstrip("=")
    device, _, number = port.name.partition("/")
    for name in filter(None, names.split(",")):
        device_name, _, port_number = name.partition(":")
        matches = device == device_name if exact else device.startswith(device_name)
        if matches and port_number in ("", number):
            return not exclude
    return exclude


def _ethernet(leaders: Sequence[Facts]) -> _Network | None:
    """Return the interface that plain sockets use; None if its rate is unknown on any node."""
    rates = [nic.gbps for fact in leaders for nic in fact.nics if nic.name == fact.nic and nic.gbps]
    return ("tcp", 1, min(rates)) if rates and len(rates) == len(leaders) else None
