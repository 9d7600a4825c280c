"""Measurements of healthy simulated runs, to be modified by tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from checklist.analysis.baseline import Record
from checklist.analysis.busbw import OPS, busbw
from checklist.analysis.paths import Paths
from checklist.measurements import (
    NOT_REQUESTED,
    PHASES,
    Collective,
    Facts,
    GpuHealth,
    Local,
    Measurements,
    Nic,
    OpenPorts,
    Phase,
    Probe,
    Repeated,
    Transport,
)
from checklist.result import Result
from checklist.verdict import judge
from tests.checklist.clusters import Cluster

H100 = "NVIDIA H100 80GB HBM3"
VERSIONS: dict[str, str | None] = {"torch": "2.8.0", "cuda": "12.8", "nccl": "2.27.3", "driver": "570.1"}
GIB = 2**30
WHEN = ("before", "loaded", "after")
SETTINGS = {
    "cpu": "Intel(R) Xeon(R) Platinum 8488C",
    "kernel release": "6.8.0-1021-aws",
    "kernel parameters": "read",
    "kernel parameter iommu": "pt",
    "CPU governor": "performance",
    "net.core.rmem_max": "16777216",
    "net.core.somaxconn": "4096",
    "transparent huge pages, enabled": "madvise",
    "ulimit nofile": "1048576",
    "firmware of mlx5_core": "28.39.1002",
}


def facts(rank: int, gpus: int, **changes: Any) -> Facts:
    node = rank // gpus
    reported = Facts(
        rank=rank,
        node=node,
        local_rank=rank % gpus,
        hostname=f"host-{node}",
        boot_id=f"boot-{node}",
        addresses=(f"10.0.0.{node + 1}",),
        nic="eth0",
        nics=(
            Nic(name="eth0", addresses=(f"10.0.0.{node + 1}",), up=True),
            Nic(name="lo", addresses=("127.0.0.1",)),
        ),
        gpu_uuids=tuple(f"GPU-{node}-{index}" for index in range(gpus)),
        gpu_names=(H100,) * gpus,
        versions=dict(VERSIONS),
        shm_bytes=64 * GIB,
        memlock_bytes=-1,
        clock_offset_s=0.001,
        clock_offset_error_s=0.001,
        zone="us-east-1a",
        instance_type="p5.48xlarge" if gpus == 8 else None,
        resolves_own_hostname=True,
        hostname_address=f"10.0.0.{node + 1}",
        hostname_seconds=0.001,
        cpus=192.0,
        memory_bytes=2048 * GIB,
        efa_devices=32 if gpus == 8 else 0,
        ib_devices=(),
        settings=dict(SETTINGS) if rank % gpus == 0 else {},
    )
    return dataclasses.replace(reported, **changes)


def gpu_run(nodes: int = 2, gpus: int = 8, **changes: Any) -> Measurements:
    """A healthy run on p5.48xlarge (8 GPUs) or machines of no known type."""
    ranks = nodes * gpus
    size = 16 * GIB
    seconds = 2 * size / 480e9
    run = Measurements(
        started_unix=1_000.0,
        seconds=60.0,
        profile="standard",
        device="cuda",
        backend="nccl",
        nodes_asked=nodes,
        gpus_per_node_asked=gpus,
        facts=tuple(facts(rank, gpus) for rank in range(ranks)),
        health=tuple(healthy_gpu(rank, gpus, when) for rank in range(ranks) for when in WHEN),
        probes=mesh(nodes),
        open_ports=opened(nodes),
        locals=tuple(
            Local(rank=rank, what=measurement, value=value * (1 + 0.002 * (rank % 3)), unit=unit)
            for rank in range(ranks)
            for measurement, value, unit in (("gemm_bf16", 760.0, "TFLOPS"), ("hbm_copy", 2850.0, "GB/s"))
        ),
        repeated=tuple(
            Repeated(
                rank=rank,
                whole=whole_node,
                times=50,
                differing=0,
                digest=f"{'whole' if whole_node else rank}",
            )
            for rank in range(ranks)
            for whole_node in (False, True)
        ),
        collectives=(
            *(collective(op, 1024, 70e-6, ranks, nodes) for op in OPS),
            collective("all_reduce", size, seconds, ranks, nodes),
        ),
        pairs=Cluster(nodes=nodes, speed=45).first_pass() if nodes > 1 else (),
        phases=tuple(
            Phase(name=name, status="skipped", reason=NOT_REQUESTED)
            if name == "diag"
            else Phase(name=name, status="done", seconds=1)
            for name in PHASES
        ),
        transport=Transport(
            backend="nccl", nodes_seen=nodes, ranks_seen=ranks, network="efa", gpu_direct=True
        ),
    )
    return dataclasses.replace(run, **changes)


def cpu_run(nodes: int = 2, **changes: Any) -> Measurements:
    """A healthy run over gloo on separate hosts without GPUs."""
    run = gpu_run(nodes, 1)
    return dataclasses.replace(
        run,
        **{
            "device": "cpu",
            "backend": "gloo",
            "profile": "quick",
            "facts": tuple(
                dataclasses.replace(fact, gpu_uuids=(), gpu_names=(), versions={"torch": "2.13.0"})
                for fact in run.facts
            ),
            "health": (),
            "locals": tuple(
                Local(rank=rank, what="gemm_fp32", value=0.2, unit="TFLOPS") for rank in range(nodes)
            ),
            "transport": None,
            **changes,
        },
    )


def healthy_gpu(rank: int, gpus: int, when: Any) -> GpuHealth:
    state = GpuHealth(
        rank=rank,
        uuid=f"GPU-{rank // gpus}-{rank % gpus}",
        when=when,
        ecc_uncorrected=0,
        remap_pending=False,
        remap_failed=False,
        throttle_reasons=("software power cap",),
        xids=(),
    )
    if when != "loaded":
        return state
    return dataclasses.replace(
        state,
        sm_clock_mhz=1700 + 15 * (rank % 3),
        power_w=690.0,
        power_limit_w=700.0,
        power_default_w=700.0,
        temperature_c=60.0 + rank % 5,
        slowdown_c=89.0,
        pcie_generation=5,
        pcie_generation_most=5,
    )


def collective(op: str, size: int, seconds: float, ranks: int, nodes: int, **changes: Any) -> Collective:
    entry = Collective(
        op=op,
        dtype="fp32",
        bytes=0 if op == "barrier" else size,
        ranks=ranks,
        nodes=nodes,
        seconds_median=seconds,
        seconds_p95=seconds * 1.1,
        busbw_gbytes_per_s=None if op == "barrier" else busbw(op, size, seconds, ranks),
        correct=True,
        iterations=20,
    )
    return dataclasses.replace(entry, **changes)


def mesh(
    nodes: int, cut: tuple[tuple[int, int], ...] = (), stalled: tuple[tuple[int, int], ...] = ()
) -> tuple[Probe, ...]:
    return tuple(
        Probe(
            src=src,
            dst=dst,
            connected=(src, dst) not in cut,
            bulk_ok=None if (src, dst) in cut else (src, dst) not in stalled,
            seconds=0.01,
            error="connection refused" if (src, dst) in cut else None,
        )
        for src in range(nodes)
        for dst in range(nodes)
        if src != dst
    )


def opened(
    nodes: int, blocked: Mapping[tuple[int, int], Collection[int]] | None = None
) -> tuple[OpenPorts, ...]:
    """Ports that each node found open on the next two nodes; ``blocked`` on some paths."""
    tried = tuple(range(33_650, 61_000, 1_764))
    return tuple(
        OpenPorts(
            src=src,
            dst=dst,
            address=f"10.0.0.{dst + 1}",
            low=32_768,
            high=60_999,
            tried=tried,
            blocked=tuple(port for port in tried if port in (blocked or {}).get((src, dst), ())),
        )
        for dst in range(nodes)
        for src in dict.fromkeys((dst + away) % nodes for away in (1, 2))
        if src != dst
    )


def with_pairs(run: Measurements, cluster: Cluster, *, again: bool = True) -> Measurements:
    """Return the run with the pair measurements of that cluster, including the second pass."""
    from checklist.analysis.diagnosis import PASSES, diagnose

    pairs = cluster.first_pass()
    paths = Paths.from_facts(run.facts, cluster.nodes)
    for _ in range(PASSES if again else 0):
        pairs += cluster.second_pass(diagnose(pairs, cluster.nodes, paths=paths).again)
    return dataclasses.replace(run, pairs=pairs)


def with_facts(run: Measurements, rank: int, **changes: Any) -> Measurements:
    """Return the run with the facts of one rank changed."""
    reported = tuple(
        dataclasses.replace(fact, **changes) if fact.rank == rank else fact for fact in run.facts
    )
    return dataclasses.replace(run, facts=reported)


def all_with(run: Measurements, **changes: Any) -> Measurements:
    """Return the run with the facts of all ranks changed."""
    return dataclasses.replace(run, facts=tuple(dataclasses.replace(fact, **changes) for fact in run.facts))


def with_states(run: Measurements, ranks: Collection[int], when: str, **changes: Any) -> Measurements:
    """Return the run with the health reports of some GPUs at that time changed."""
    health = tuple(
        dataclasses.replace(state, **changes) if state.rank in ranks and state.when == when else state
        for state in run.health
    )
    return dataclasses.replace(run, health=health)


def with_health(run: Measurements, rank: int, **changes: Any) -> Measurements:
    """Return the run with 18 NVLinks and 16 PCIe lanes per GPU, except for one GPU after the load."""
    usual = tuple(dataclasses.replace(state, nvlinks_active=18, pcie_width=16) for state in run.health)
    return with_states(dataclasses.replace(run, health=usual), (rank,), "after", **changes)


def with_share(
    run: Measurements, share: float, ranks: Collection[int] | None = None, measurement: str | None = None
) -> Measurements:
    """Return the run with measurements of one kind scaled by a share, for some ranks or all (None)."""
    figures = tuple(
        dataclasses.replace(local, value=(local.value or 0.0) * share)
        if (ranks is None or local.rank in ranks) and measurement in (None, local.what)
        else local
        for local in run.locals
    )
    return dataclasses.replace(run, locals=figures)


def records_of_runs(result: Result, runs: int = 3, **changes: Any) -> list[Record]:
    """Return the records of a result as if it had been repeated."""
    return [
        dataclasses.replace(record, unix=record.unix + number, **changes)
        for record in result.records
        for number in range(runs)
    ]


def codes(run: Measurements, **changes: Any) -> dict[str, str]:
    """Return the findings of a run: code to verdict."""
    return {finding.code: finding.verdict for finding in judge(run, **changes).findings}


def slow_world(factor: float, gpus: int = 8) -> Measurements:
    run = gpu_run(2, gpus)
    last = run.collectives[-1]
    slower = collective("all_reduce", last.bytes, float(last.seconds_median or 0) * factor, 2 * gpus, 2)
    return dataclasses.replace(run, collectives=(*run.collectives[:-1], slower))


def verdict_of(result: Result, check: str) -> str:
    check_result = result.check(check)
    return "skipped" if check_result is None else check_result.verdict
