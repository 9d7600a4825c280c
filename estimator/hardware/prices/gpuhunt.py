"""Prices from gpuhunt's published catalogues, if it is installed.

gpuhunt has no time limits on downloads, so it runs in a child process that can be killed.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from estimator.hardware.catalogue import Catalogue, Instance, day_of
from estimator.hardware.catalogue.csv_files import Cells
from estimator.hardware.prices.cache import ProviderAnswer

CLOUDS = {
    "aws": "aws",
    "gcp": "gcp",
    "azure": "azure",
    "lambda": "lambdalabs",
}  # cloud of the catalogue -> provider of gpuhunt


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """One price in gpuhunt's catalogue."""

    provider: str
    name: str
    region: str
    usd_per_hour: float
    spot: bool
    gpu_count: int
    version: str  # of the provider's catalogue; begins with its date


def fetch(catalogue: Catalogue, deadline: float, today: date) -> ProviderAnswer:
    """Read prices of the catalogue's instance types from gpuhunt, in the region of the table's price.

    Runs gpuhunt in a child process that is killed at ``deadline`` (of time.monotonic()). Instance types
    without a region use the most frequent region of their cloud.
    """
    if importlib.util.find_spec("gpuhunt") is None:
        return ProviderAnswer(line="not queried: it is not installed (pip install gpuhunt)")
    names: dict[str, list[str]] = {provider: [] for provider in CLOUDS.values()}
    for item in catalogue.instances:
        if item.cloud in CLOUDS:
            names[CLOUDS[item.cloud]].append(item.name.lower())
    package_root = str(Path(__file__).parents[3])
    paths = [package_root, *(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path)]
    try:
        process = subprocess.run(
            [sys.executable, "-m", "estimator.hardware.prices.gpuhunt"],
            input=json.dumps(names),
            capture_output=True,
            text=True,
            timeout=max(deadline - time.monotonic(), 1),
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ProviderAnswer(line="time limit reached, nothing changed")
    if process.returncode != 0:
        last = (process.stderr.strip() or "no error message").splitlines()[-1]
        return ProviderAnswer(line=f"nothing changed: {re.sub(r'^[A-Za-z_.]+: ', '', last)}")
    offers = [Offer(**entry) for entry in json.loads(process.stdout)]
    machines = {
        item.name: cells
        for item in catalogue.instances
        if item.cloud in CLOUDS and (cells := _cells(item, _region(item, catalogue), offers, today))
    }
    clouds = Counter(cells["cloud"] for cells in machines.values())
    counts = ", ".join(f"{count} of {cloud}" for cloud, count in clouds.items())
    return ProviderAnswer(
        line=f"prices of {counts}" if counts else "no instance type of the table", machines=machines
    )


def _region(item: Instance, catalogue: Catalogue) -> str | None:
    """Return the region of the price, otherwise the most frequent region of its cloud; None: any."""
    if item.region is not None:
        return None if item.region == "all" else item.region
    regions = Counter(
        instance.region
        for instance in catalogue.instances
        if instance.cloud == item.cloud and instance.region
    )
    return regions.most_common(1)[0][0] if regions else None


def _cells(item: Instance, region: str | None, offers: list[Offer], today: date) -> Cells:
    matching = [
        offer
        for offer in offers
        if offer.provider == CLOUDS[item.cloud]
        and offer.name.lower() == item.name.lower()
        and offer.gpu_count == item.gpu_count
        and region in (None, offer.region)
    ]
    cells: Cells = {}
    for column, spot in (("on_demand_usd_h", False), ("spot_usd_h", True)):
        prices = [offer.usd_per_hour for offer in matching if offer.spot is spot]
        if prices:
            cells[column] = f"{min(prices):.10g}"
    if not cells:
        return {}
    version = matching[0].version
    day = re.sub(r"^(\d{4})-?(\d\d)-?(\d\d).*$", r"\1-\2-\3", version)
    return {
        "cloud": item.cloud,
        "instance_type": item.name,
        **cells,
        "price_region": region or "all",
        "price_date": str(day_of(day) or today),
        "price_source": f"gpuhunt catalogue {version}",
    }


def _main() -> None:
    """Run the child process: names by provider on standard input, offers on standard output, as JSON."""
    gpuhunt: Any = importlib.import_module("gpuhunt")
    names: dict[str, list[str]] = json.load(sys.stdin)
    catalog = gpuhunt.Catalog(auto_reload=False)
    catalog.load()
    listed = [name for name in names if name in catalog.catalog]
    offers = [
        {
            "provider": item.provider,
            "name": item.instance_name,
            "region": item.location,
            "usd_per_hour": item.price,
            "spot": item.spot,
            "gpu_count": item.gpu_count,
            "version": catalog.catalog[item.provider].version,
        }
        for item in catalog.query(provider=listed, min_gpu_count=1)
        if item.instance_name.lower() in names[item.provider]
    ]
    json.dump(offers, sys.stdout)


if __name__ == "__main__":
    _main()
