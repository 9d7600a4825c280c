"""Start-up: minutes from the request of nodes to the first step.

Three parts, from ``data/start_up.csv``: a new node boots, the image is pulled, and each node writes the
weights, 2 bytes per parameter, at the slower rate of network and disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from estimator.data import load_rows
from estimator.models import ModelSpec
from estimator.plan import MIB, StartUp
from estimator.planning.places import Place

TABLE = Path(__file__).parents[1] / "data" / "start_up.csv"
BYTES_OF_A_PARAMETER = 2  # in the model's files


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Start-up times of one cloud."""

    machine_minutes: float
    image_minutes: float
    disk_bytes_per_second: float


def start_up(place: Place, nodes: int, model: ModelSpec) -> StartUp:
    """Return the minutes before the first step; present nodes need no boot.

    All nodes start concurrently, so their number does not matter. If the network bandwidth is unknown, the
    disk rate is used.
    """
    rates = rates_of(place.cloud)
    speed = rates.disk_bytes_per_second
    if place.network_gbps is not None:
        speed = min(speed, place.network_gbps * 1e9 / 8)
    return StartUp(
        machine_minutes=0.0 if nodes <= place.free_nodes else rates.machine_minutes,
        image_minutes=rates.image_minutes,
        weights_minutes=BYTES_OF_A_PARAMETER * model.stored_parameters / speed / 60,
    )


@lru_cache(maxsize=8)
def rates_of(cloud: str | None) -> Rates:
    """Return the rates of a cloud from the table, otherwise its default row (``*``)."""
    rows = {(row["what"], row["cloud"]): float(row["value"]) for row in load_rows(TABLE)}

    def value(name: str) -> float:
        return rows.get((name, cloud or "*"), rows[(name, "*")])

    return Rates(
        machine_minutes=value("machine"),
        image_minutes=value("image"),
        disk_bytes_per_second=value("disk") * MIB,
    )
