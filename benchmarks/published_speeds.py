"""Published tokens/s of the package's table, as inputs of the speed model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from benchmarks.published import rows
from benchmarks.published.scoring import usual_network
from estimator.hardware.catalogue import Gpu
from estimator.setup import Setup
from estimator.throughput.communication import Times, communication_seconds, links
from estimator.throughput.flops import Work, work


@dataclass(frozen=True)
class Point:
    """One published run."""

    row: rows.PublishedRow
    setup: Setup
    gpu: Gpu
    network_gbps: float | None
    rdma: bool

    @property
    def project(self) -> str:
        return self.row.source.split("@")[0]

    @cached_property
    def load(self) -> Work:
        return work(self.setup)

    @cached_property
    def times(self) -> Times | None:
        """Seconds of communication; None if a link's rate is unknown."""
        wires = links(self.setup, self.gpu, network_gbps=self.network_gbps, rdma=self.rdma)
        return communication_seconds(self.setup, wires)


def points() -> list[Point]:
    """Return the rows of the package's table that can be predicted."""
    points_found = []
    for row in rows.read(rows.TABLE):
        if row.throughput_skip or row.setup is None or row.gpu is None or not row.tps_per_gpu:
            continue
        gbps, rdma = usual_network(row.gpu, row.setup.processes_per_node)
        if row.network_gbps is not None:
            gbps, rdma = row.network_gbps, True
        points_found.append(Point(row, row.setup, row.gpu, gbps, rdma))
    return points_found
