"""Filtering of the catalogue, and output as JSON or as CSV for ``--hardware``."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any

from estimator.errors import UserError
from estimator.hardware.catalogue import Catalogue, Gpu, Instance, normalize
from estimator.hardware.catalogue.columns import GPU, INSTANCE
from estimator.plan import GIB, MIB

if TYPE_CHECKING:
    from estimator.hardware.cluster import Cluster

RATES = ("bf16", "fp16", "fp8", "tf32", "fp32")


@dataclass(frozen=True, kw_only=True, slots=True)
class Filters:
    """Filter of GPUs and instance types; None: no filter.

    Raises UserError for an invalid size or price; names are checked by :func:`choose`.
    """

    min_vram: float | None = None  # marketed size in GB (Gpu.has_memory_gb)
    architecture: str | None = None
    cloud: str | None = None
    gpu: str | None = None
    max_usd_per_hour: float | None = None  # of a complete instance
    spot: bool = False  # only instance types with a spot price; prices are spot prices

    def __post_init__(self) -> None:
        if self.min_vram is not None and not self.min_vram > 0:
            raise UserError(f"--min-vram {self.min_vram:g}: a card has more than 0 GiB.")
        if self.max_usd_per_hour is not None and not self.max_usd_per_hour >= 0:
            raise UserError(f"--max-price {self.max_usd_per_hour:g}: a price cannot be negative.")

    @property
    def of_machines(self) -> bool:
        """Whether it filters instance types: then GPUs without a matching one are omitted."""
        return self.cloud is not None or self.max_usd_per_hour is not None or self.spot

    def price(self, item: Instance) -> float | None:
        """Return the spot or on-demand price in USD per hour, or None."""
        return item.spot_usd_per_hour if self.spot else item.usd_per_hour


def choose(catalogue: Catalogue, filters: Filters) -> tuple[tuple[Gpu, ...], tuple[Instance, ...]]:
    """Return the matching GPUs and instance types. Raises UserError for an unknown name.

    Filters on instance types also exclude GPUs without a matching one. Instance types are sorted by GPU, then
    by price.
    """
    architectures = None if filters.architecture is None else catalogue.architecture(filters.architecture)
    cloud = None if filters.cloud is None else catalogue.cloud(filters.cloud)
    named_gpus = None if filters.gpu is None else _gpus_matching(catalogue, filters.gpu)
    gpus = [
        gpu
        for gpu in catalogue.gpus
        if (named_gpus is None or gpu in named_gpus)
        and (filters.min_vram is None or gpu.has_memory_gb(filters.min_vram))
        and (architectures is None or gpu.architecture in architectures)
    ]
    order = {gpu.name: place for place, gpu in enumerate(gpus)}
    machines = []
    for item in catalogue.instances:
        price = filters.price(item)
        priced = filters.max_usd_per_hour is not None or filters.spot
        if item.gpu not in order or cloud not in (None, item.cloud) or (priced and price is None):
            continue
        if item.gpu_count == 0 and filters.min_vram is not None:
            continue  # a share of a card has a share of its memory
        if filters.max_usd_per_hour is None or price is None or price <= filters.max_usd_per_hour:
            machines.append(item)
    machines.sort(key=lambda item: (order[item.gpu], filters.price(item) is None, filters.price(item) or 0))
    if filters.of_machines:
        gpu_names = {item.gpu for item in machines}
        gpus = [gpu for gpu in gpus if gpu.name in gpu_names]
    return tuple(gpus), tuple(machines)


def _gpus_matching(catalogue: Catalogue, name: str) -> tuple[Gpu, ...]:
    """Return the GPUs of a name ("a100": four), otherwise all whose name begins with it ("rtx4")."""
    try:
        return catalogue.gpus_called(name)
    except UserError:
        key = normalize(name)
        matches = tuple(gpu for gpu in catalogue.gpus if key and normalize(gpu.name).startswith(key))
        if not matches:
            raise
        return matches


def gpu_record(gpu: Gpu) -> dict[str, Any]:
    """Convert a GPU to plain values for JSON, units in the keys; None: unknown."""
    return {
        "name": gpu.name,
        "vendor": gpu.vendor,
        "architecture": gpu.architecture,
        "vram_bytes": gpu.vram_bytes,
        "vram_gib": round(gpu.vram_gib, 3),
        "vram_reported": gpu.vram_reported,
        "usable_bytes": gpu.usable_bytes,
        "label_gb": gpu.label_gb,
        "memory_bandwidth_gigabytes_per_s": gpu.bandwidth_gbps,
        "interconnect": gpu.interconnect or None,
        "interconnect_gigabytes_per_s_both_ways": gpu.interconnect_gbps,
        **{f"{dtype}_tflops_dense": dict(gpu.peak_tflops).get(dtype) for dtype in RATES},
        "matmul_tflops_measured": gpu.measured_tflops,
        "compute_capability": gpu.compute_capability,
        "tensor_dtypes": list(gpu.dtypes),
        "form_factor": gpu.form_factor or None,
        "aliases": list(gpu.aliases),
        "source": gpu.source,
        "notes": gpu.notes or None,
    }


def instance_record(item: Instance, today: date) -> dict[str, Any]:
    """Convert an instance type to plain values for JSON, units in the keys; None: unknown."""
    return {
        "cloud": item.cloud,
        "name": item.name,
        "gpu": item.gpu,
        "gpu_count": item.gpu_count,
        "vcpu": item.vcpu,
        "ram_bytes": item.ram_bytes,
        "ram_gib": None if item.ram_bytes is None else round(item.ram_bytes / GIB, 3),
        "network_gigabits_per_s": item.network_gbps,
        "fabric": item.fabric or None,
        "on_demand_usd_per_hour": item.usd_per_hour,
        "spot_usd_per_hour": item.spot_usd_per_hour,
        "price_region": item.region,
        "price_date": item.price_date,
        "price_age_days": item.price_age_days(today),
        "price_source": item.price_source or None,
        "source": item.source,
        "notes": item.notes or None,
    }


def cluster_record(cluster: Cluster) -> dict[str, Any]:
    """Convert the GPU nodes of a cluster, and the skipped nodes with reasons, to plain values for JSON."""
    return {
        "context": cluster.context,
        "nodes": [
            {
                "instance": group.instance.name,
                "gpu": group.gpu.name,
                "vram_bytes": group.gpu.vram_bytes,
                "count": group.count,
                "allocatable_gpus": group.instance.gpu_count,
                "allocatable_cpu_cores": group.cpu,
                "allocatable_memory_bytes": group.memory_bytes,
                "allocatable_ephemeral_storage_bytes": group.ephemeral_bytes,
                "allocatable_efa_interfaces": group.efa,
                "spot": group.spot,
                "zones": list(group.zones),
                "taints": list(group.taints),
                "free_gpus": None if group.free is None else group.free_gpus,
                "max_new_nodes": group.max_new_nodes,
                "added_by": group.added_by or None,
                "guessed": group.guessed,
                "names": list(group.names),
            }
            for group in cluster.nodes
        ],
        "skipped": [{"reason": skipped.reason, "names": list(skipped.names)} for skipped in cluster.skipped],
        "nodes_without_gpu": cluster.nodes_without_gpu,
        "unknown": list(cluster.unknown),
    }


def as_csv(gpus: tuple[Gpu, ...], machines: tuple[Instance, ...]) -> str:
    """Format GPUs and instance types as one CSV table with a column ``kind``, as input for ``--hardware``."""
    columns = ["kind", *dict.fromkeys([*GPU, *INSTANCE])]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({"kind": "gpu"} | _gpu_cells(gpu) for gpu in gpus)
    writer.writerows({"kind": "instance"} | _instance_cells(item) for item in machines)
    return text.getvalue()


def _gpu_cells(gpu: Gpu) -> dict[str, str]:
    rates = dict(gpu.peak_tflops)
    return {
        "gpu": gpu.name,
        "vendor": gpu.vendor,
        "vram_GB": _cell(gpu.label_gb),
        "vram_reported_MiB": _cell(gpu.vram_bytes / MIB) if gpu.vram_reported else "",
        "vram_cuda_GiB": _cell(gpu.usable_bytes / GIB)
        if gpu.vram_reported and gpu.driver_bytes is not None
        else "",
        "mem_bw_GBps": _cell(gpu.bandwidth_gbps),
        "interconnect": gpu.interconnect,
        "interconnect_GBps_bidir": _cell(gpu.interconnect_gbps),
        **{f"{dtype}_TFLOPS_dense": _cell(rates.get(dtype)) for dtype in RATES if dtype != "fp32"},
        "fp32_TFLOPS": _cell(rates.get("fp32")),
        "matmul_TFLOPS_measured": _cell(gpu.measured_tflops),
        "architecture": gpu.architecture or "",
        "compute_capability": gpu.compute_capability or "",
        "tensor_dtypes": " ".join(gpu.dtypes),
        "form_factor": gpu.form_factor,
        "source": gpu.source,
        "notes": gpu.notes,
        "aliases": ";".join(gpu.aliases),
    }


def _instance_cells(item: Instance) -> dict[str, str]:
    return {
        "cloud": item.cloud,
        "instance_type": item.name,
        "gpu": item.gpu,
        "gpu_count": str(item.gpu_count) if item.gpu_count else "",
        "vcpu": _cell(item.vcpu),
        "ram_GiB": "" if item.ram_bytes is None else _cell(item.ram_bytes / GIB),
        "network_Gbps": _cell(item.network_gbps),
        "fabric": item.fabric,
        "on_demand_usd_h": _cell(item.usd_per_hour),
        "spot_usd_h": _cell(item.spot_usd_per_hour),
        "price_region": item.region or "",
        "price_date": item.price_date or "",
        "price_source": item.price_source,
        "spec_source": item.source,
        "notes": item.notes,
    }


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.10g}"
