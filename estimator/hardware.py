"""GPUs and cloud machines: two tables of facts, each row with its source. Blank in the table is None here.

To add a GPU or a machine, add a row to ``data/gpus.csv`` or ``data/instances.csv``.
"""

from __future__ import annotations

import csv
import difflib
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from estimator.errors import UserError
from estimator.plan import GIB, MIB

DATA = Path(__file__).with_name("data")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One accelerator. Rates are dense (no sparsity)."""

    name: str
    vendor: str
    vram_bytes: int  # as clouds report it; where none does, the label's GB taken as 10^9 bytes
    vram_reported: bool
    bandwidth_gbps: float | None  # memory, GB/s
    interconnect: str
    interconnect_gbps: float | None  # GB/s, both directions together
    peak_tflops: tuple[tuple[str, float], ...]  # dense, by dtype; a dtype without a figure is left out
    architecture: str | None
    compute_capability: str | None
    dtypes: tuple[str, ...]  # that its matrix units take
    form_factor: str
    aliases: tuple[str, ...]
    source: str
    notes: str

    def peak_flops(self, dtype: str) -> float | None:
        """Dense FLOP/s in that dtype ("bf16", "fp32"...), None where it is not sourced."""
        value = dict(self.peak_tflops).get(dtype)
        return None if value is None else value * 1e12

    @property
    def bf16(self) -> bool:
        return "bf16" in self.dtypes


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """One cloud machine type."""

    cloud: str  # lower case: "aws", "gcp"...
    name: str
    gpu: str
    gpu_count: int  # 0: only a share of one GPU, which training can't use
    vcpu: int | None
    ram_bytes: int | None
    network_gbps: float | None  # gigabits a second, of the fabric that GPUs talk over
    fabric: str
    usd_per_hour: float | None  # on demand
    spot_usd_per_hour: float | None
    region: str | None  # of the price
    price_date: str | None
    price_source: str
    source: str
    notes: str


def gpu(name: str) -> Gpu:
    """The GPU of that table name, alias or NVML product name; raises UserError with the nearest names."""
    found = find_gpu_by_nvml_name(name)
    if found is None:
        table = _gpu_index()
        near = [key for key in table if _normal(name) and key.startswith(_normal(name))]
        near += difflib.get_close_matches(_normal(name), table, n=4, cutoff=0.5)
        offered = list(dict.fromkeys(table[key].name for key in near))[:4]
        raise UserError(
            f"There is no GPU {name!r} in the GPU table.",
            f"Did you mean {', '.join(offered)}?" if offered else "`estimator/data/gpus.csv` lists them.",
        )
    return found


def find_gpu_by_nvml_name(name: str) -> Gpu | None:
    """The GPU that a driver or a node label calls ``name``, or None."""
    return _gpu_index().get(_normal(name))


@lru_cache(maxsize=1)
def gpus() -> tuple[Gpu, ...]:
    """All rows of the GPU table."""
    with (DATA / "gpus.csv").open(newline="", encoding="utf-8") as file:
        return tuple(_gpu(row) for row in csv.DictReader(file))


@lru_cache(maxsize=1)
def instances() -> tuple[Instance, ...]:
    """All rows of the machine table; their GPUs by the GPU table's names."""
    with (DATA / "instances.csv").open(newline="", encoding="utf-8") as file:
        return tuple(_instance(row) for row in csv.DictReader(file))


def instance(name: str) -> Instance:
    """The machine type of that name; raises UserError with the nearest names."""
    table = {item.name.lower(): item for item in instances()}
    found = table.get(name.strip().lower())
    if found is None:
        near = difflib.get_close_matches(name.strip().lower(), table, n=3, cutoff=0.5)
        raise UserError(
            f"There is no instance type {name!r} in the instance table.",
            f"Did you mean {', '.join(table[key].name for key in near)}?" if near else "",
        )
    return found


def clouds() -> tuple[str, ...]:
    return tuple(dict.fromkeys(item.cloud for item in instances()))


@lru_cache(maxsize=1)
def _gpu_index() -> dict[str, Gpu]:
    index: dict[str, Gpu] = {}
    for item in gpus():
        for key in (item.name, *item.aliases):
            if index.setdefault(_normal(key), item) is not item:
                raise ValueError(f"gpus.csv: {key} names two GPUs")
    return index


def _normal(name: str) -> str:
    """Letters and digits only, without the vendor, so that every spelling of one product is one key."""
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("nvidia")


def _gpu(row: dict[str, str]) -> Gpu:
    reported = _number(row["vram_reported_MiB"])
    label = re.match(r"\d+", row["vram_GB"])  # "16 or 32": the smaller
    if reported is None and label is None:
        raise ValueError(f"gpus.csv: {row['gpu']} has no memory size")
    size = int(reported * MIB) if reported is not None else int(label.group()) * 10**9 if label else 0
    rates = {
        "bf16": row["bf16_TFLOPS_dense"],
        "fp16": row["fp16_TFLOPS_dense"],
        "fp8": row["fp8_TFLOPS_dense"],
        "tf32": row["tf32_TFLOPS_dense"],
        "fp32": row["fp32_TFLOPS"],
    }
    return Gpu(
        name=row["gpu"],
        vendor=row["vendor"],
        vram_bytes=size,
        vram_reported=reported is not None,
        bandwidth_gbps=_number(row["mem_bw_GBps"]),
        interconnect=row["interconnect"],
        interconnect_gbps=_number(row["interconnect_GBps_bidir"]),
        peak_tflops=tuple((dtype, float(value)) for dtype, value in rates.items() if value),
        architecture=row["architecture"] or None,
        compute_capability=row["compute_capability"] or None,
        dtypes=tuple(row["tensor_dtypes"].split()),
        form_factor=row["form_factor"],
        aliases=tuple(row["aliases"].split(";")) if row["aliases"] else (),
        source=row["source"],
        notes=row["notes"],
    )


def _instance(row: dict[str, str]) -> Instance:
    ram, known = _number(row["ram_GiB"]), find_gpu_by_nvml_name(row["gpu"])
    # Where a faster fabric's rate is not sourced, the Ethernet's says nothing about the GPUs' traffic
    network = None if "rate not sourced" in row["fabric"] else _number(row["network_Gbps"])
    if known is None:
        raise ValueError(f"instances.csv: {row['instance_type']} has a GPU that gpus.csv lacks: {row['gpu']}")
    return Instance(
        cloud=row["cloud"].lower(),
        name=row["instance_type"],
        gpu=known.name,
        gpu_count=0 if "/" in row["gpu_count"] else int(row["gpu_count"]),
        vcpu=int(row["vcpu"]) if row["vcpu"] else None,
        ram_bytes=None if ram is None else int(ram * GIB),
        network_gbps=network,
        fabric=row["fabric"],
        usd_per_hour=_number(row["on_demand_usd_h"]),
        spot_usd_per_hour=_number(row["spot_usd_h"]),
        region=row["price_region"] or None,
        price_date=row["price_date"] or None,
        price_source=row["price_source"],
        source=row["spec_source"],
        notes=row["notes"],
    )


def _number(text: str) -> float | None:
    """The figure, or None where the cell is blank or holds words ("24 Ethernet + IB")."""
    try:
        return float(text)
    except ValueError:
        return None
