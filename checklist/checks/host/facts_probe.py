"""Phase 0: facts of a rank about host, devices and software, collected without torch and without load."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import socket
import time
from pathlib import Path
from typing import Any

from checklist.checks.gpu import gpus_probe
from checklist.checks.host import cgroup, cloud, settings_probe
from checklist.checks.host.physical_host import physical_host
from checklist.checks.network import efa_probe, lldp_probe, nics_probe, rdma_probe
from checklist.measurements import Facts, to_dict
from checklist.probing.context import Context
from checklist.probing.kernel_files import read_text

HOST_ID = "CHECKLIST_HOST_ID"  # replaces the kernel's boot id if one kernel simulates several hosts
_IMAGE_VARIABLES = ("CHECKLIST_IMAGE", "CONTAINER_IMAGE", "IMAGE_NAME")


def gather(context: Context, backend: str, route_to: str) -> dict[str, Any]:
    """Collect the rank's Facts. ``route_to``: rank 0's address."""
    gpus = gpus_probe.list_gpus()
    uuid = gpus.uuids[context.local_rank] if context.local_rank < len(gpus.uuids) else None
    interfaces = nics_probe.interfaces()
    choice = nics_probe.choose(backend, interfaces, route_to)
    start = time.perf_counter()
    resolved = nics_probe.own_address()
    resolved_s = time.perf_counter() - start
    cpu_limits = cgroup.limits()
    cloud_place = cloud.place()
    facts = Facts(
        rank=context.rank,
        node=context.node,
        local_rank=context.local_rank,
        hostname=socket.gethostname(),
        boot_id=os.environ.get(HOST_ID) or read_text(Path("/proc/sys/kernel/random/boot_id")),
        uptime_s=_uptime_s() if context.local_rank == 0 else None,
        node_name=os.environ.get("NODE_NAME") or cloud_place.instance or socket.gethostname(),
        addresses=tuple(address for nic in interfaces for address in nic.addresses),
        nic=choice.nic,
        nic_reason=choice.reason,
        nics=interfaces,
        gpu_uuids=gpus.uuids,
        gpu_names=gpus.names,
        versions=_versions(gpus.driver),
        shm_bytes=_shared_memory(),
        memlock_bytes=_memlock(),
        clock_unix=time.time(),
        zone=cloud_place.zone,
        instance_type=cloud_place.instance_type,
        placement_group=cloud_place.placement_group,
        network_nodes=cloud_place.network_nodes,
        switches=lldp_probe.switches() if context.local_rank == 0 else (),
        physical_host=(cloud_place.physical_host or physical_host()) if context.local_rank == 0 else None,
        nvlink_domain=gpus.nvlink_domain,
        resolves_own_hostname=resolved is not None,
        hostname_address=resolved,
        hostname_seconds=resolved_s,
        cpus=cpu_limits.cpus,
        load_per_cpu=cgroup.load_per_cpu(),
        memory_bytes=cpu_limits.memory_bytes,
        efa_devices=efa_probe.devices(),
        ib_devices=_devices(),
        rdma_ports=rdma_probe.ports() if context.local_rank == 0 else None,
        gpu_processes=None if uuid is None else (gpus.busy or {}).get(uuid, 0),
        settings=settings_probe.read(interfaces, choice.nic) if context.local_rank == 0 else {},
    )
    return {"facts": to_dict(facts), "address": choice.address, "usable": choice.usable}


def _versions(driver: str | None) -> dict[str, str | None]:
    """Read versions from files and package metadata, because importing torch takes seconds and may fail."""
    nccl = next(
        (
            distribution.version
            for distribution in importlib.metadata.distributions()
            if (distribution.name or "").startswith("nvidia-nccl")
        ),
        None,
    )
    return {
        "torch": _package("torch"),
        "cuda": _torch_cuda(),
        "nccl": nccl,
        "driver": driver,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "efa-installer": _efa_installer(),
        "image": next((os.environ[name] for name in _IMAGE_VARIABLES if name in os.environ), None),
    }


def _efa_installer() -> str | None:
    """Return the version of AWS's EFA installer (libfabric, aws-ofi-nccl); None without its package list."""
    match = re.search(
        r"EFA installer version:\s*(\S+)", read_text(Path("/opt/amazon/efa_installed_packages")) or ""
    )
    return match.group(1) if match else None


def _package(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_cuda() -> str | None:
    """Read torch's build versions from its version.py."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = read_text(Path(spec.origin).with_name("version.py")) or ""
    match = re.search(r"^cuda\b[^=]*=\s*'([^']+)'", text, re.MULTILINE)
    return match.group(1) if match else None


def _uptime_s() -> float | None:
    text = read_text(Path("/proc/uptime"))
    return None if text is None else float(text.split()[0])


def _shared_memory() -> int | None:
    try:
        filesystem = os.statvfs("/dev/shm")  # noqa: S108 - only its size is read
    except OSError:
        return None
    return filesystem.f_frsize * filesystem.f_blocks


def _memlock() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return -1 if soft == resource.RLIM_INFINITY else soft


def _devices() -> tuple[str, ...]:
    try:
        return tuple(sorted(os.listdir("/sys/class/infiniband")))  # noqa: PTH208 - only names are needed
    except OSError:
        return ()
