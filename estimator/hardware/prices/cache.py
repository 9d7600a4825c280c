"""Prices and machine facts that ``--refresh`` has learned, kept for this user over the shipped table."""

from __future__ import annotations

import contextlib
import csv
import os
import tempfile
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
    """Result of one price provider: a line for the user, and table cells by machine name."""

    line: str
    machines: dict[str, Cells] = field(default_factory=dict)


def path() -> Path:
    """The cache's file, there or not: metaflow-finetune/prices.csv in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    return folder / "metaflow-finetune" / "prices.csv"


def rows(file: Path) -> dict[str, Cells]:
    """The cached cells by machine name; none where there is no file. UserError where it is damaged."""
    if not file.is_file():
        return {}
    return {row.cells["instance_type"]: row.cells for row in read_rows(file) if "instance_type" in row.cells}


def write(file: Path, machines: dict[str, Cells]) -> None:
    """Replace the cache in one step, so that readers see the old file or the new one. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_table(file, COLUMNS, (machines[name] for name in sorted(machines)))


def write_table(file: Path, columns: Sequence[str], lines: Iterable[Cells]) -> None:
    """Replace a CSV file in one step; a cell that a row lacks is blank. Raises OSError."""
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.name, suffix=".part")
    try:
        with os.fdopen(handle, "w", newline="", encoding="utf-8") as out:
            writer = csv.DictWriter(out, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)
        Path(temporary).replace(file)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()
        raise


def overlay(tables: Tables, file: Path) -> tuple[str, ...]:
    """Lay the cached prices and facts over the tables; returns a warning for each thing that cannot be used.

    A price goes in where it is not older than the table's, a fact where the table has none. The cache is
    no one's handwork, so a damaged one is no reason to fail.
    """
    try:
        cached = rows(file)
    except UserError as error:
        return (f"refreshed prices are not used: {error.problem} Delete the file, or --refresh again.",)
    for name, cells in cached.items():
        shipped = tables.instances.get(name.lower())
        if shipped is None or shipped["cloud"].lower() != cells["cloud"].lower():
            continue
        tables.instances[name.lower()] = merged(shipped, cells)
    return ()


def merged(shipped: Cells, cached: Cells) -> Cells:
    """A machine's row with what was learned of it: prices that are not older, facts that the row lacks."""
    missing = {column: cached[column] for column in FACTS if column in cached and column not in shipped}
    if missing:
        missing["spec_source"] = "; ".join(
            row["spec_source"] for row in (shipped, cached) if "spec_source" in row
        )
    return shipped | missing | _prices(shipped, cached)


def _prices(shipped: Cells, cached: Cells) -> Cells:
    """The price cells that change. A date belongs to the on-demand price where there is one."""
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
    """Comparable; of a year alone its first day, of nothing the first of all."""
    return text[:10] if text[4:5] == "-" else f"{text[:4]}-01-01" if text else ""
