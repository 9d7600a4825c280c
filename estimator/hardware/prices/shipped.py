"""Update the prices of the shipped instance table, each with date and source (for maintainers).

    AWS_REGION=us-east-1 python -m estimator.hardware.prices.shipped

queries the providers of ``finetune gpus --refresh``, replaces older on-demand and spot prices in
``data/instances.csv``, and fills blank cells. Prices of another region than that of the row are ignored.
"""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Mapping
from datetime import date
from pathlib import Path

from estimator.hardware import DATA
from estimator.hardware.catalogue import tables
from estimator.hardware.catalogue.csv_files import Cells
from estimator.hardware.prices import cache, refresh
from estimator.terminal import print

TABLE = "instances.csv"


def update(folder: Path = DATA, *, today: date | None = None) -> list[str]:
    """Query prices and write them into the instance table of ``folder``; returns lines for the user.

    Ignores the user's cache and tables. Raises OSError if the table cannot be written.
    """
    shipped_tables = tables.shipped(folder)
    lines, updates = refresh.query_providers(tables.build(shipped_tables), today=today)
    new, changed, elsewhere = dict(shipped_tables.instances), 0, Counter[str]()
    for name, cells in updates.items():
        row = shipped_tables.instances[name.lower()]
        region = row.get("price_region")
        if region is not None and cells.get("price_region", region) != region:
            elsewhere[f"{row['cloud']}: {cells['price_region']} is not the table's {region}"] += 1
            continue
        new[name.lower()] = cache.merged(row, cells)
        changed += new[name.lower()] != row
    lines += [f"left: {count} of {text}" for text, count in elsewhere.items()]
    if changed:
        _write(folder / TABLE, new)
    return [*lines, f"{changed} of {len(new)} machine types changed in {folder / TABLE}"]


def _write(file: Path, machines: Mapping[str, Cells]) -> None:
    """Write the table with its columns in their order."""
    with file.open(newline="", encoding="utf-8") as stream:
        columns = next(csv.reader(stream))
    cache.write_table(file, columns, machines.values())


if __name__ == "__main__":
    print("\n".join(update()), file=sys.stderr)
