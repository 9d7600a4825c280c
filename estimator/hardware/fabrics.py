"""Shares of a link's line rate that collectives of healthy clusters reach, by kind of link or network.

``data/fabric_shares.csv`` has one row a kind. ``python -m benchmarks.busbw`` derives it from the published
figures in checklist/data/busbw.csv.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from estimator.data import load_rows, parse_row

TABLE = Path(__file__).parents[1] / "data" / "fabric_shares.csv"
RDMA = "rdma"  # InfiniBand, RoCE and EFA together
FAST_TCP_GBPS = 32  # above this, NCCL's socket threads rather than the line limit a node (NVIDIA/nccl#209)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """Shares of a line rate that healthy clusters reach at large messages.

    Attributes
    ----------
    low:
        Lowest share that counts as healthy: the lowest published one, less a margin.
    typical:
        Median of the published shares. An algorithm that sends less than a ring may exceed 1.
    sources:
        Number of sources of the published figures.
    """

    low: float
    typical: float
    sources: int


@cache
def fabric_shares() -> Mapping[str, Shares]:
    """Read the shares by kind of link or network."""
    return {row["kind"]: Shares(**parse_row(Shares, row)) for row in load_rows(TABLE)}


def tcp_kind(gbps: float) -> str:
    """Return the kind of a node's TCP network with this line rate."""
    return "tcp-fast" if gbps > FAST_TCP_GBPS else "tcp"
