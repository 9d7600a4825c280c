"""Cache of prices and instance facts from ``--refresh``, which override the shipped table for this user."""

from __future__ import annotations

import contextlib
import csv
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from estimator.errors import UserError
from estimator.hardware.catalogue.csv_files import Cells, read_rows
from estimator.hardware.catalogue.tables import Tables

COLUMNS = (
    "cloud",
    "instance_type",
    "gpu",
    "gpu_count",
    "vcpu",
    "ram_GiB",
    "network_Gbps",
    "fabric",
    "on_demand_usd_h",
    "spot_usd_h",
    "price_region",
    "price_date",
    "price_source",
    "spec_source",
)
FACTS = ("vcpu", "ram_GiB", "network_Gbps", "fabric")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProviderAnswer:
    """Result of one price provider: a line for the user, and table cells by instance type."""

    line: str
    machines: dict[str, Cells] = field(default_factory=dict)


def path() -> Path:
    """Return the path of the cache: metaflow-finetune/prices.csv in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    return folder / "metaflow-finetune" / "prices.csv"


def rows(file: Path) -> dict[str, Cells]:
    """Read the cached cells by instance type; empty without a file. Raises UserError if it is damaged."""
    if not file.is_file():
        return {}
    return {row.cells["instance_type"]: row.cells for row in read_rows(file) if "instance_type" in row.cells}


def write(file: Path, machines: dict[str, Cells]) -> None:
    """Replace the cache atomically. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_table(file, COLUMNS, (machines[name] for name in sorted(machines)))


def write_table(file: Path, columns: Sequence[str], lines: Iterable[Cells]) -> None:
    """Replace a CSV file atomically; missing cells are blank. Raises OSError."""
    import tempfile  # 5 ms, and few commands write a table

    descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.name, suffix=".part")
    try:
        with os.fdopen(descriptor, "w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)
        Path(temporary).replace(file)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()
        raise


def overlay(tables: Tables, file: Path) -> tuple[str, ...]:
    """Merge the cached prices and facts into the tables; returns warnings.

    A price is used if it is not older than that of the table, a fact if the table has none. A damaged cache
    is a warning only, as it can be written again.
    """
    try:
        cached = rows(file)
    except UserError as error:
        return (f"Refreshed prices are ignored: {error.problem} Delete the file, or use --refresh.",)
    for name, cells in cached.items():
        shipped = tables.instances.get(name.lower())
        if shipped is None or shipped["cloud"].lower() != cells["cloud"].lower():
            continue
        tables.instances[name.lower()] = merged(shipped, cells)
    return ()


def merged(shipped: Cells, cached: Cells) -> Cells:
    """Merge a cached row into a shipped one: prices that are not older, facts that are missing."""
    missing = {column: cached[column] for column in FACTS if column in cached and column not in shipped}
    if missing:
        missing["spec_source"] = "; ".join(
            row["spec_source"] for row in (shipped, cached) if "spec_source" in row
        )
    return shipped | missing | _prices(shipped, cached)


def _prices(shipped: Cells, cached: Cells) -> Cells:
    """Return the changed price cells. The date belongs to the on-demand price if there is one."""
    if _day(cached.get("price_date", "")) < _day(shipped.get("price_date", "")):
        return {}
    if "on_demand_usd_h" in cached or "on_demand_usd_h" not in shipped:
        priced = {"on_demand_usd_h", "spot_usd_h"} & cached.keys()
        return {
            column: cached[column]
            for column in (*priced, *(("price_region", "price_date", "price_source") if priced else ()))
            if column in cached
        }
    if "spot_usd_h" not in cached:
        return {}
    origin = " ".join(cached.get(column, "") for column in ("price_source", "price_region", "price_date"))
    return {
        "spot_usd_h": cached["spot_usd_h"],
        "price_source": f"{shipped.get('price_source', '')}; spot: {origin}",
    }


def _day(text: str) -> str:
    """Return a comparable date: for a year its first day, for none the minimum."""
    return text[:10] if text[4:5] == "-" else f"{text[:4]}-01-01" if text else ""
