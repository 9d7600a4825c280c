"""Crafted runs of real clusters: healthy ones pass, slow ones warn or fail, with the cause that fits."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest

from checklist.analysis.baseline import DAY_S, Record
from checklist.analysis.busbw import bus_factor
from checklist.measurements import GpuHealth, Measurements, Nic, Pair, RdmaPort
from checklist.registry import select
from checklist.result import Result
from checklist.verdict import judge
from tests.checklist.runs import all_with, collective, gpu_run, verdict_of

GIB = 2**30
H100 = "NVIDIA H100 80GB HBM3"
GPUS = {
    "H100": H100,
    "A100": "NVIDIA A100-SXM4-80GB",
    "B200": "NVIDIA B200",
    "GB200": "NVIDIA GB200",
    "V100": "Tesla V100-SXM2-32GB",
}
ONLY = select(only=["bandwidth"])
NO_VALUES = select(skip=["correctness"])  # crafted runs have one operation


def ports(count: int, gbps: float, layer: str = "InfiniBand", state: str = "ACTIVE") -> tuple[RdmaPort, ...]:
    return tuple(
        RdmaPort(name=f"mlx5_{n}/1", state=state, physical="LinkUp", gbps=gbps, layer=layer)
        for n in range(count)
    )


NDR = {"rdma_ports": ports(8, 400)}
HDR = {"rdma_ports": ports(8, 200)}
ROCE = {"rdma_ports": ports(8, 400, "Ethernet")}
XDR = {"rdma_ports": ports(8, 800)}
ETH_25 = {"nics": (Nic(name="eth0", addresses=("10.0.0.1",), up=True, gbps=25),)}
ETH_100 = {"nics": (Nic(name="eth0", addresses=("10.0.0.1",), up=True, gbps=100),)}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run of ``nodes`` x ``gpus``, and what is to be said of its largest collective."""

    name: str
    nodes: int
    busbw: float
    verdict: str
    code: str = ""
    gpu: str = "H100"
    gpus: int = 8
    machine: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    op: str = "all_reduce"
    size: int = 8 * GIB
    network: str | None = "ib"
    environment: dict[str, str] = field(default_factory=dict)


def crafted(case: Case) -> Measurements:
    run = gpu_run(case.nodes, case.gpus)
    ranks = case.nodes * case.gpus
    names = (GPUS[case.gpu],) * case.gpus
    known = {"efa_devices": 0, "ib_devices": (), **case.facts}
    run = all_with(run, instance_type=case.machine, gpu_names=names, **known)
    seconds = case.size / 1e9 / case.busbw * bus_factor(case.op, ranks)
    item = collective(case.op, case.size, seconds, ranks, case.nodes)
    assert run.transport is not None
    transport = dataclasses.replace(run.transport, network=case.network)  # type: ignore[arg-type]
    return dataclasses.replace(
        run, collectives=(item,), transport=transport, environment=case.environment, pairs=(), locals=()
    )


def say(case: Case) -> Result:
    return judge(crafted(case), checks=ONLY)


CASES = (
    # healthy
    Case(name="4x8 H100 NDR", nodes=4, busbw=369, verdict="PASS", facts=NDR),
    Case(name="64x8 H100 NDR", nodes=64, busbw=365, verdict="PASS", facts=NDR),
    Case(name="2x8 H100 NDR by tree", nodes=2, busbw=470, verdict="PASS", facts=NDR),
    Case(name="8x8 A100 HDR", nodes=8, busbw=185, verdict="PASS", facts=HDR, gpu="A100"),
    Case(name="16x8 H100 RoCE", nodes=16, busbw=360, verdict="PASS", facts=ROCE),
    Case(name="4x8 B200 XDR", nodes=4, busbw=640, verdict="PASS", facts=XDR, gpu="B200"),
    Case(name="8 p5", nodes=8, busbw=340, verdict="PASS", machine="p5.48xlarge"),
    Case(name="4 p4d", nodes=4, busbw=42, verdict="PASS", machine="p4d.24xlarge", gpu="A100"),
    Case(name="4 p6-b200", nodes=4, busbw=380, verdict="PASS", machine="p6-b200.48xlarge", gpu="B200"),
    Case(name="8 a3-mega", nodes=8, busbw=130, verdict="PASS", machine="a3-megagpu-8g"),
    Case(name="4 Azure NDv5", nodes=4, busbw=370, verdict="PASS", machine="Standard_ND96isr_H100_v5"),
    Case(name="4x1 over 25 Gbit/s", nodes=4, gpus=1, busbw=2.9, verdict="PASS", facts=ETH_25, gpu="V100"),
    Case(name="2x8 over 100 Gbit/s", nodes=2, busbw=5, verdict="PASS", facts=ETH_100, gpu="V100"),
    Case(name="all-gather NDR", nodes=4, busbw=350, verdict="PASS", facts=NDR, op="all_gather"),
    Case(name="all-to-all p5", nodes=8, busbw=51, verdict="PASS", machine="p5.48xlarge", op="all_to_all"),
    Case(name="one node by NVLS", nodes=1, busbw=478, verdict="PASS"),
    Case(
        name="one node by ring",
        nodes=1,
        busbw=365,
        verdict="PASS",
        environment={"NCCL_NVLS_ENABLE": "0"},
    ),
    # known faults
    Case(name="TCP beside NDR", nodes=4, busbw=14, verdict="FAIL", code="speed-of-tcp", facts=NDR),
    Case(name="half of NDR", nodes=16, busbw=190, verdict="FAIL", code="half-speed", facts=NDR),
    Case(
        name="p5 over its Ethernet",
        nodes=2,
        busbw=30,
        verdict="FAIL",
        code="speed-of-tcp",
        machine="p5.48xlarge",
        network="socket",
    ),
    Case(name="one rail of NDR", nodes=8, busbw=46, verdict="FAIL", code="speed-of-one-port", facts=NDR),
    Case(name="one rail of HDR", nodes=8, busbw=23, verdict="FAIL", code="speed-of-one-port", facts=HDR),
    Case(name="three quarters of NDR", nodes=4, busbw=265, verdict="WARN", code="below-expected", facts=NDR),
    Case(name="half of RoCE", nodes=32, busbw=180, verdict="FAIL", code="half-speed", facts=ROCE),
    Case(name="congested RoCE", nodes=32, busbw=250, verdict="WARN", code="below-expected", facts=ROCE),
    Case(name="half of HDR", nodes=4, busbw=95, verdict="FAIL", code="half-speed", facts=HDR, gpu="A100"),
    Case(
        name="GPUDirect off on B200",
        nodes=4,
        busbw=150,
        verdict="FAIL",
        code="below-expected",
        machine="p6-b200.48xlarge",
        gpu="B200",
    ),
    Case(
        name="one adapter of p4d",
        nodes=8,
        busbw=12,
        verdict="FAIL",
        code="speed-of-one-port",
        machine="p4d.24xlarge",
        gpu="A100",
    ),
    Case(
        name="a3-mega without TCPXO",
        nodes=4,
        busbw=5,
        verdict="FAIL",
        code="speed-of-tcp",
        machine="a3-megagpu-8g",
    ),
    Case(name="half of XDR", nodes=4, busbw=330, verdict="FAIL", code="half-speed", facts=XDR, gpu="B200"),
    Case(
        name="half of 25 Gbit/s",
        nodes=4,
        gpus=1,
        busbw=1.4,
        verdict="FAIL",
        code="half-speed",
        facts=ETH_25,
        gpu="V100",
    ),
    Case(
        name="all-gather of two rails",
        nodes=4,
        busbw=90,
        verdict="FAIL",
        code="below-expected",
        facts=NDR,
        op="all_gather",
    ),
    Case(
        name="all-to-all at a third",
        nodes=8,
        busbw=18,
        verdict="FAIL",
        code="below-expected",
        machine="p5.48xlarge",
        op="all_to_all",
    ),
    Case(name="PCIe instead of NVLink", nodes=1, busbw=40, verdict="FAIL", code="below-expected"),
    Case(name="NVLS not used", nodes=1, busbw=365, verdict="WARN", code="below-expected"),
    Case(
        name="A100 with half its NVLinks",
        nodes=1,
        busbw=115,
        verdict="FAIL",
        code="below-expected",
        gpu="A100",
    ),
    Case(
        name="TCP beside NDR, quick profile",
        nodes=4,
        busbw=14,
        verdict="FAIL",
        code="speed-of-tcp",
        facts=NDR,
        size=GIB // 8,
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_crafted_run_gets_its_verdict_and_cause(case: Case) -> None:
    result = say(case)
    assert verdict_of(result, "bandwidth") == case.verdict, result.headline
    assert [fault.code for fault in result.findings] == ([case.code] if case.code else [])
    if case.code:
        (fault,) = result.findings
        assert "expected (at least" in fault.title
        assert fault.advice


def test_the_finding_has_the_arithmetic_in_one_line() -> None:
    (fault,) = say(CASES[[case.name for case in CASES].index("TCP beside NDR")]).findings
    assert fault.title == (
        "all_reduce fp32 of 8192 MiB: 14 GB/s of 362 expected (at least 305): 8 ports x 400 Gbit/s "
        "(InfiniBand) = 400 GB/s a node, NVLink 450 GB/s a GPU; about the speed of TCP."
    )


@pytest.mark.parametrize("nodes", [2, 4, 16])
def test_without_known_ports_there_is_no_pass(nodes: int) -> None:
    run = crafted(Case(name="", nodes=nodes, busbw=14, verdict=""))
    measured = gpu_run(nodes)
    result = judge(dataclasses.replace(run, locals=measured.locals, pairs=measured.pairs), checks=NO_VALUES)
    assert verdict_of(result, "bandwidth") == "NO-VERDICT"
    assert result.verdict == "NO-VERDICT"
    assert "speed not judged" in result.headline


def test_ports_that_are_down_or_not_chosen_or_slower_are_not_counted() -> None:
    down = (*ports(8, 400), *ports(2, 800, state="DOWN"), *ports(2, 100, "Ethernet"))
    assert say(Case(name="", nodes=4, busbw=369, verdict="", facts={"rdma_ports": down})).verdict == "PASS"
    chosen = Case(
        name="",
        nodes=4,
        busbw=185,
        verdict="",
        facts=NDR,
        environment={"NCCL_IB_HCA": "=mlx5_0,mlx5_1:1,mlx5_2,mlx5_3"},
    )
    assert say(chosen).verdict == "PASS"
    left_out = dataclasses.replace(chosen, environment={"NCCL_IB_HCA": "^mlx5_4,mlx5_5,mlx5_6,mlx5_7"})
    assert say(left_out).verdict == "PASS"
    assert say(dataclasses.replace(chosen, environment={})).verdict == "FAIL"


def test_half_of_a_machines_gpus_have_half_of_its_network() -> None:
    half = Case(name="", nodes=4, gpus=4, busbw=170, verdict="", machine="p5.48xlarge")
    assert say(half).verdict == "PASS"
    assert say(dataclasses.replace(half, gpus=8)).verdict == "FAIL"


@pytest.mark.parametrize(("busbw", "verdict"), [(830, "PASS"), (300, "FAIL")])
def test_hosts_of_one_nvlink_domain_are_judged_by_its_links(busbw: float, verdict: str) -> None:
    case = Case(
        name="",
        nodes=18,
        gpus=4,
        busbw=busbw,
        verdict="",
        gpu="GB200",
        facts={"nvlink_domain": "rack-1", "rdma_ports": ports(4, 400)},
    )
    assert say(case).verdict == verdict


def test_bridges_between_two_pcie_gpus_are_read_from_nvml() -> None:
    case = Case(name="", nodes=1, gpus=2, busbw=205, verdict="")
    run = all_with(crafted(case), gpu_names=("NVIDIA A100 80GB PCIe",) * 2)
    by_pcie = judge(run, checks=ONLY)
    assert by_pcie.check("bandwidth").figures[0].expected < 30  # type: ignore[union-attr]
    bridged = tuple(
        dataclasses.replace(state, nvlinks_active=12, nvlink_mbytes_per_s=26_562) for state in run.health
    )
    judged = judge(dataclasses.replace(run, health=bridged), checks=ONLY).check("bandwidth")
    assert judged is not None
    assert judged.verdict == "PASS"
    assert 195 < (judged.figures[0].expected or 0) < 220


def test_pairs_far_below_their_ports_fail_without_a_slower_peer() -> None:
    run = crafted(Case(name="", nodes=4, busbw=369, verdict="", facts=NDR))
    pairs = tuple(
        Pair(src=a, dst=b, round=n, gbytes_per_s=1.7, bytes=4 * GIB)
        for n, (a, b) in enumerate((a, b) for a in range(4) for b in range(4) if a != b)
    )
    slow = judge(dataclasses.replace(run, pairs=pairs), checks=select(only=["pairs"]))
    assert verdict_of(slow, "pairs") == "FAIL"
    well = tuple(dataclasses.replace(pair, gbytes_per_s=350) for pair in pairs)
    assert judge(dataclasses.replace(run, pairs=well), checks=select(only=["pairs"])).verdict == "PASS"


@pytest.mark.parametrize(("busbw", "verdict"), [(190.0, "FAIL"), (265.0, "WARN")])
def test_ten_nights_that_begin_slow_stay_slow(busbw: float, verdict: str) -> None:
    history: list[Record] = []
    for night in range(10):
        case = Case(name="", nodes=4, busbw=busbw * (1 + 0.001 * (night % 3)), verdict="", facts=NDR)
        run = dataclasses.replace(crafted(case), started_unix=night * DAY_S)
        result = judge(run, checks=ONLY, history=history)
        assert verdict_of(result, "bandwidth") == verdict
        assert [figure.basis for figure in result.check("bandwidth").figures] == ["expectation"]  # type: ignore[union-attr]
        assert all(record.verdict == "NO-VERDICT" for record in result.records), "no baseline"
        history += result.records
    well = crafted(Case(name="", nodes=4, busbw=369, verdict="", facts=NDR))
    assert judge(well, checks=ONLY, history=history).verdict == "PASS"


def test_in_a_contradicted_run_no_figure_of_the_network_counts_for_a_baseline() -> None:
    run = gpu_run(4)
    slow = crafted(Case(name="", nodes=4, busbw=100, verdict="", machine="p5.48xlarge"))
    result = judge(dataclasses.replace(run, collectives=(*run.collectives[:-1], *slow.collectives)))
    verdicts = {record.op: record.verdict for record in result.records}
    assert {verdicts[op] for op in ("pair", "pair, sent", "barrier latency")} == {"NO-VERDICT"}
    assert verdicts["gemm_bf16"] == "PASS", "a GPU's own figures have nothing to do with it"


def test_health_of_no_gpu_tells_of_no_bridges() -> None:
    run = crafted(Case(name="", nodes=1, gpus=2, busbw=25, verdict=""))
    some = (GpuHealth(rank=0, uuid="GPU-0-0", when="before", nvlinks_active=12, nvlink_mbytes_per_s=26_562),)
    partly = dataclasses.replace(run, health=(*some, *run.health[1:]))
    judged = judge(all_with(partly, gpu_names=("NVIDIA A100 80GB PCIe",) * 2), checks=ONLY).check("bandwidth")
    assert judged is not None
    assert (judged.figures[0].expected or 0) < 30
