"""The shipped hardware tables, and files that override their rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from estimator.data import load_rows
from estimator.hardware.catalogue import Catalogue, Gpu, Instance, normalize
from estimator.hardware.catalogue.csv_files import (
    Cells,
    HardwareRow,
    aliases_of,
    check_sizes,
    number,
    read_rows,
)
from estimator.names import did_you_mean
from estimator.plan import GIB, MIB

PRICES = {"on_demand_usd_h", "spot_usd_h"}
SIZES = {"vram_GB", "vram_reported_MiB"}
PRICED = ("price_date", "price_source")  # replaced with a new price


@dataclass(kw_only=True, slots=True)
class Tables:
    """GPU and instance tables while they are merged: rows by normalized name, in order."""

    gpus: dict[str, Cells]
    instances: dict[str, Cells]

    def gpu_key(self, name: str) -> str | None:
        """Return the key of the GPU with this name or alias, or None."""
        normalized = normalize(name)
        if normalized in self.gpus:
            return normalized
        return next(
            (key for key, cells in self.gpus.items() if normalized in map(normalize, aliases_of(cells))), None
        )


def shipped(folder: Path) -> Tables:
    """Read the shipped tables without checks, as tests check them."""

    def table(name: str) -> list[Cells]:
        return [{key: text for key, text in row.items() if text} for row in load_rows(folder / name)]

    return Tables(
        gpus={normalize(cells["gpu"]): cells for cells in table("gpus.csv")},
        instances={cells["instance_type"].lower(): cells for cells in table("instances.csv")},
    )


def overlay(tables: Tables, file: Path) -> None:
    """Merge a user's file into the tables. Raises UserError that names file, line, column, value and rule."""
    rows = read_rows(file)
    for row in rows:
        if row.kind == "gpu":
            _overlay_gpu(tables, row)
    for row in rows:
        if row.kind == "instance":
            _overlay_instance(tables, row)


def build(tables: Tables, warnings: tuple[str, ...] = ()) -> Catalogue:
    """Convert the rows to GPUs and instance types. Raises UserError for duplicate names."""
    gpus = tuple(_gpu(cells) for cells in tables.gpus.values())
    names = {normalize(name): item.name for item in gpus for name in (item.name, *item.aliases)}
    return Catalogue(
        gpus=gpus,
        instances=tuple(_instance(cells, names) for cells in tables.instances.values()),
        warnings=warnings,
    )


def _overlay_gpu(tables: Tables, row: HardwareRow) -> None:
    """Change the GPU that the row names, or add it. Raises UserError.

    Aliases are added to those of the table. A row that changes the size removes the table's CUDA size.
    """
    name = row.cells["gpu"]
    key = tables.gpu_key(name)
    cells = dict(row.cells)
    if key is not None:
        base = tables.gpus[key]
        cells["gpu"] = base["gpu"]
        cells["aliases"] = ";".join(dict.fromkeys([*aliases_of(base), *aliases_of(row.cells)]))
        cells.setdefault("source", f"{base.get('source', '')}; {row.file}")
        inherited = dict(base)
        if SIZES & row.cells.keys():
            inherited.pop("vram_cuda_GiB", None)  # belongs to the size in the table
        cells = inherited | cells
        check_sizes(HardwareRow(file=row.file, line=row.line, kind="gpu", cells=cells))
    else:
        spellings = _gpu_names(tables)
        suggestion = did_you_mean(normalize(name), spellings, shown=spellings)
        for column in ("vendor", "vram_GB"):
            if column not in cells and not (column == "vram_GB" and "vram_reported_MiB" in cells):
                raise row.cell_error(
                    column, f"is missing, which a new GPU needs: no table has {name!r}", suggestion
                )
        cells.setdefault("source", str(row.file))
    if not cells.get("aliases"):
        cells.pop("aliases", None)
    for alias in aliases_of(row.cells):
        other_key = tables.gpu_key(alias)
        if other_key not in (None, key):
            raise row.cell_error("aliases", f"has {alias!r}, which is {tables.gpus[str(other_key)]['gpu']}")
    tables.gpus[key or normalize(name)] = cells


def _overlay_instance(tables: Tables, row: HardwareRow) -> None:
    name = row.cells["instance_type"]
    cells = dict(row.cells)
    base = tables.instances.get(name.lower())
    if base is not None:
        if cells.setdefault("cloud", base["cloud"]).lower() != base["cloud"].lower():
            raise row.cell_error("cloud", f"is wrong: {name} is of {base['cloud']}", "Leave it blank.")
        cells.setdefault("spec_source", f"{base.get('spec_source', '')}; {row.file}")
        inherited = (
            {column: text for column, text in base.items() if column not in PRICED}
            if _priced(cells)
            else base
        )
        cells = inherited | cells
    else:
        for column in ("cloud", "gpu", "gpu_count"):
            if column not in cells:
                suggestion = did_you_mean(name, [item["instance_type"] for item in tables.instances.values()])
                raise row.cell_error(
                    column, f"is missing, which a new instance needs: no table has {name!r}", suggestion
                )
        cells.setdefault("spec_source", str(row.file))
    if _priced(row.cells):
        cells.setdefault("price_source", str(row.file))
    if tables.gpu_key(cells["gpu"]) is None:
        spellings = _gpu_names(tables)
        suggestion = did_you_mean(normalize(cells["gpu"]), spellings, shown=spellings)
        raise row.cell_error("gpu", "is an unknown GPU", suggestion or "Add a row for it.")
    tables.instances[name.lower()] = cells


def _priced(cells: Cells) -> bool:
    return bool(PRICES & cells.keys())


def _gpu_names(tables: Tables) -> dict[str, str]:
    """Map every normalized name and alias of a GPU to its name in the table."""
    return {
        normalize(name): item["gpu"]
        for item in tables.gpus.values()
        for name in (item["gpu"], *aliases_of(item))
    }


def _gpu(cells: Cells) -> Gpu:
    reported, label = number(cells, "vram_reported_MiB"), number(cells, "vram_GB")
    offered = number(cells, "vram_cuda_GiB")
    memory = int(reported * MIB) if reported is not None else int((label or 0) * 10**9)
    driver = None if reported is not None and offered is None else 0
    if offered is not None:
        driver = max(memory - int(offered * GIB), 0) if reported is not None else 0
        memory = memory if reported is not None else int(offered * GIB)
    rates = {
        dtype: number(cells, f"{dtype}_TFLOPS" + ("" if dtype == "fp32" else "_dense"))
        for dtype in ("bf16", "fp16", "fp8", "tf32", "fp32")
    }
    peaks = tuple((dtype, value) for dtype, value in rates.items() if value is not None)
    # Matrix units support the dtypes with a rate; the fp32 rate is that of the ordinary cores
    implied = " ".join(dtype for dtype, _ in peaks if dtype != "fp32")
    return Gpu(
        name=cells["gpu"],
        vendor=cells["vendor"].lower(),
        vram_bytes=memory,
        vram_reported=reported is not None or offered is not None,
        label_gb=label,
        driver_bytes=driver,
        measured_tflops=number(cells, "matmul_TFLOPS_measured"),
        bandwidth_gbps=number(cells, "mem_bw_GBps"),
        interconnect=cells.get("interconnect", ""),
        interconnect_gbps=number(cells, "interconnect_GBps_bidir"),
        peak_tflops=peaks,
        architecture=cells.get("architecture"),
        compute_capability=cells.get("compute_capability"),
        dtypes=tuple(cells.get("tensor_dtypes", implied).lower().split()),
        form_factor=cells.get("form_factor", ""),
        aliases=tuple(aliases_of(cells)),
        source=cells["source"],
        notes=cells.get("notes", ""),
    )


def _instance(cells: Cells, gpu_names: Mapping[str, str]) -> Instance:
    fabric, ram, vcpu = cells.get("fabric", ""), number(cells, "ram_GiB"), number(cells, "vcpu")
    gpu, count = gpu_names.get(normalize(cells["gpu"])), cells["gpu_count"]
    if gpu is None:
        raise ValueError(f"{cells['instance_type']} has a GPU that gpus.csv lacks: {cells['gpu']}")
    return Instance(
        cloud=cells["cloud"].lower(),
        name=cells["instance_type"],
        gpu=gpu,
        gpu_count=0 if "/" in count else int(float(count)),
        vcpu=None if vcpu is None else int(vcpu),
        ram_bytes=None if ram is None else int(ram * GIB),
        # If the rate of a faster fabric is unknown, that of the Ethernet does not apply to GPU traffic
        network_gbps=None if "rate not sourced" in fabric else number(cells, "network_Gbps"),
        fabric=fabric,
        usd_per_hour=number(cells, "on_demand_usd_h"),
        spot_usd_per_hour=number(cells, "spot_usd_h"),
        region=cells.get("price_region"),
        price_date=cells.get("price_date"),
        price_source=cells.get("price_source", ""),
        source=cells.get("spec_source", ""),
        notes=cells.get("notes", ""),
    )
