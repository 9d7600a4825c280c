"""Terminal tables of the catalogue. Unknown figures are "?"."""

from __future__ import annotations

from datetime import date
from typing import TYPE_CHECKING, Literal

from estimator.formatting import format_bytes
from estimator.hardware.catalogue import Gpu, Instance
from estimator.plan import GIB, MIB

if TYPE_CHECKING:
    from rich.table import Table

    from estimator.hardware.cluster import Cluster


def gpu_table(gpus: tuple[Gpu, ...]) -> Table:
    """Build a table of GPUs."""
    table = _table("GPU", "memory", "architecture", ">bf16 TFLOPS", ">bandwidth GB/s", "interconnect")
    for gpu in gpus:
        table.add_row(
            gpu.name,
            _memory(gpu),
            gpu.architecture or "?",
            _figure(dict(gpu.peak_tflops).get("bf16")),
            _figure(gpu.bandwidth_gbps),
            gpu.interconnect or "?",
        )
    return table


def _memory(gpu: Gpu) -> str:
    """Format the memory of a GPU: usable and reported size, or the marketed size, labeled as marketed."""
    if gpu.driver_bytes:
        return f"{format_bytes(gpu.usable_bytes)} of {gpu.vram_bytes // MIB:,} MiB"
    if gpu.vram_reported:
        return f"{format_bytes(gpu.vram_bytes)} ({gpu.vram_bytes // MIB:,} MiB)"
    return f"{format_bytes(gpu.vram_bytes)} (label: {gpu.label_gb:g} GB)"


def instance_table(machines: tuple[Instance, ...], today: date) -> Table:
    """Build a table of instance types, with the age of the prices in days on ``today``."""
    table = _table(
        *("cloud", "type", "GPUs", ">vCPU", ">RAM GiB", ">Gbit/s", "fabric"),
        *(">$/h", ">spot $/h", "region", ">age", ">source"),
    )
    sources = price_sources(machines)
    for item in machines:
        days = item.price_age_days(today)
        age = f"{days} days" if days is not None else f"of {item.price_day or '?'}"
        priced = item.usd_per_hour is not None or item.spot_usd_per_hour is not None
        table.add_row(
            item.cloud,
            item.name,
            f"{item.gpu_count}x {item.gpu}" if item.gpu_count else f"a share of {item.gpu}",
            _figure(item.vcpu),
            "?" if item.ram_bytes is None else _figure(item.ram_bytes / GIB),
            _figure(item.network_gbps),
            item.fabric or "?",
            "?" if item.usd_per_hour is None else f"{item.usd_per_hour:,.2f}",
            "?" if item.spot_usd_per_hour is None else f"{item.spot_usd_per_hour:,.2f}",
            (item.region or "?") if priced else "",
            age if priced else "",
            str(sources.index(item.price_source) + 1) if item.price_source else "",
        )
    return table


def price_sources(machines: tuple[Instance, ...]) -> list[str]:
    """Return the sources of the prices; the table of instance types refers to them by number, from 1."""
    return list(dict.fromkeys(item.price_source for item in machines if item.price_source))


def cluster_table(cluster: Cluster) -> Table:
    """Build a table of the GPU nodes of a cluster, one line per kind of node."""
    table = _table(
        *(">nodes", "type", "GPUs per node", "memory per GPU", ">cores", ">memory GiB", ">disk GiB"),
        *(">EFA", "spot", "zones", "taints", ">free GPUs per node", ">can be added", "added by"),
    )
    for group in cluster.nodes:
        table.add_row(
            str(group.count),
            group.instance.name,
            f"{group.instance.gpu_count}x {group.gpu.name}",
            format_bytes(group.gpu.vram_bytes),
            f"{group.cpu:.1f}",
            f"{group.memory_bytes / GIB:,.0f}",
            "?" if group.ephemeral_bytes is None else f"{group.ephemeral_bytes / GIB:,.0f}",
            str(group.efa),
            "?" if group.spot is None else "yes" if group.spot else "no",
            " ".join(group.zones) or "?",
            " ".join(group.taints),
            "?" if group.free is None else str(group.free_gpus),
            "any number" if group.max_new_nodes is None else str(group.max_new_nodes),
            group.added_by + (" (a guess)" if group.guessed else ""),
        )
    return table


def _table(*names: str) -> Table:
    """Build a table with these columns; ">" marks right-aligned ones."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in names:
        justify: Literal["right", "left"] = "right" if name.startswith(">") else "left"
        table.add_column(name.removeprefix(">"), justify=justify, no_wrap=True)
    return table


def _figure(value: float | None) -> str:
    return "?" if value is None else f"{value:,.6g}"
