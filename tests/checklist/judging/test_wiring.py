"""Simulated runs of real clusters: healthy ones pass, slow ones warn or fail with the right cause."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest

from checklist.analysis.baseline import DAY_S, Record
from checklist.analysis.busbw import bus_factor
from checklist.measurements import Measurements, Nic, Pair, RdmaPort
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
    "A10G": "NVIDIA A10G",
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


@dataclass(frozen=True)
class Case:
    """A run of ``nodes`` x ``gpus``, and the expected verdict on its largest collective."""

    name: str
    nodes: int
    busbw: float
    verdict: str = ""
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
    known_facts = {"efa_devices": 0, "ib_devices": (), **case.facts}
    run = all_with(run, instance_type=case.machine, gpu_names=names, **known_facts)
    seconds = case.size / 1e9 / case.busbw * bus_factor(case.op, ranks)
    item = collective(case.op, case.size, seconds, ranks, case.nodes)
    assert run.transport is not None
    transport = dataclasses.replace(run.transport, network=case.network)  # type: ignore[arg-type]
    return dataclasses.replace(
        run, collectives=(item,), transport=transport, environment=case.environment, pairs=(), locals=()
    )


def judge_case(case: Case) -> Result:
    return judge(crafted(case), checks=ONLY)


CASES = (
    Case("4x8 H100 NDR", 4, 369, "PASS", facts=NDR),
    Case("64x8 H100 NDR", 64, 365, "PASS", facts=NDR),
    Case("2x8 H100 NDR by tree", 2, 470, "PASS", facts=NDR),
    Case("8x8 A100 HDR", 8, 185, "PASS", facts=HDR, gpu="A100"),
    Case("16x8 H100 RoCE", 16, 360, "PASS", facts=ROCE),
    Case("4x8 B200 XDR", 4, 640, "PASS", facts=XDR, gpu="B200"),
    Case("8 p5", 8, 340, "PASS", machine="p5.48xlarge"),
    Case("4 p4d", 4, 42, "PASS", machine="p4d.24xlarge", gpu="A100"),
    Case("4 p6-b200", 4, 380, "PASS", machine="p6-b200.48xlarge", gpu="B200"),
    Case("8 a3-mega", 8, 130, "PASS", machine="a3-megagpu-8g"),
    Case("4 Azure NDv5", 4, 370, "PASS", machine="Standard_ND96isr_H100_v5"),
    Case("4x1 over 25 Gbit/s", 4, 2.9, "PASS", gpus=1, facts=ETH_25, gpu="V100"),
    Case("2x8 over 100 Gbit/s", 2, 5, "PASS", facts=ETH_100, gpu="V100"),
    Case("all-gather NDR", 4, 350, "PASS", facts=NDR, op="all_gather"),
    Case("all-to-all p5", 8, 51, "PASS", machine="p5.48xlarge", op="all_to_all"),
    Case("one node by NVLS", 1, 478, "PASS"),
    Case("one node by ring", 1, 365, "PASS", environment={"NCCL_NVLS_ENABLE": "0"}),
    Case("TCP beside NDR", 4, 14, "FAIL", "speed-of-tcp", facts=NDR),
    Case("half of NDR", 16, 190, "FAIL", "half-speed", facts=NDR),
    Case("p5 over its Ethernet", 2, 30, "FAIL", "speed-of-tcp", machine="p5.48xlarge", network="socket"),
    Case("one rail of NDR", 8, 46, "FAIL", "speed-of-one-port", facts=NDR),
    Case("one rail of HDR", 8, 23, "FAIL", "speed-of-one-port", facts=HDR),
    Case("three quarters of NDR", 4, 265, "WARN", "below-expected", facts=NDR),
    Case("half of RoCE", 32, 180, "FAIL", "half-speed", facts=ROCE),
    Case("congested RoCE", 32, 250, "WARN", "below-expected", facts=ROCE),
    Case("half of HDR", 4, 95, "FAIL", "half-speed", facts=HDR, gpu="A100"),
    Case("GPUDirect off on B200", 4, 150, "FAIL", "below-expected", machine="p6-b200.48xlarge", gpu="B200"),
    Case("one adapter of p4d", 8, 12, "FAIL", "speed-of-one-port", machine="p4d.24xlarge", gpu="A100"),
    Case("a3-mega without TCPXO", 4, 5, "FAIL", "speed-of-tcp", machine="a3-megagpu-8g"),
    Case("p3.16xlarge in a pod", 4, 2.9, "PASS", gpu="V100", machine="p3.16xlarge"),
    Case("g5.xlarge in a burst", 4, 1.0, "PASS", gpu="A10G", gpus=1, machine="g5.xlarge"),
    Case("p3.16xlarge at a fifth", 4, 0.6, "FAIL", "below-expected", gpu="V100", machine="p3.16xlarge"),
    Case("half of one NDR port", 4, 22, "FAIL", "half-speed", gpus=1, facts=NDR),
    Case("TCP beside one NDR port", 4, 5, "FAIL", "speed-of-tcp", gpus=1, facts=NDR),
    Case("half of XDR", 4, 330, "FAIL", "half-speed", facts=XDR, gpu="B200"),
    Case("half of 25 Gbit/s", 4, 1.4, "FAIL", "half-speed", gpus=1, facts=ETH_25, gpu="V100"),
    Case("all-gather of two rails", 4, 90, "FAIL", "below-expected", facts=NDR, op="all_gather"),
    Case("all-to-all at a third", 8, 18, "FAIL", "below-expected", machine="p5.48xlarge", op="all_to_all"),
    Case("PCIe instead of NVLink", 1, 40, "FAIL", "below-expected"),
    Case("one A100 node, without NVLS", 1, 232, "PASS", gpu="A100"),
    Case("NVLS not used", 1, 365, "WARN", "below-expected"),
    Case("A100 with half its NVLinks", 1, 115, "FAIL", "below-expected", gpu="A100"),
    Case("TCP beside NDR, quick profile", 4, 14, "FAIL", "speed-of-tcp", facts=NDR, size=GIB // 8),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_simulated_run_gets_its_verdict_and_cause(case: Case) -> None:
    result = judge_case(case)
    assert verdict_of(result, "bandwidth") == case.verdict, result.headline
    assert [fault.code for fault in result.findings] == ([case.code] if case.code else [])
    if case.code:
        (fault,) = result.findings
        assert "expected (at least" in fault.title
        assert fault.advice


def test_the_finding_shows_the_calculation_in_one_line() -> None:
    (fault,) = judge_case(CASES[[case.name for case in CASES].index("TCP beside NDR")]).findings
    assert fault.title == (
        "all_reduce fp32 of 8.00 GiB: 14 GB/s of 362 expected (at least 305): 8 ports x 400 Gbit/s "
        "(InfiniBand) = 400 GB/s a node, NVLink 450 GB/s a GPU; about the speed of TCP."
    )


@pytest.mark.parametrize("nodes", [2, 4, 16])
def test_bandwidth_does_not_pass_without_known_ports(nodes: int) -> None:
    run = crafted(Case("", nodes=nodes, busbw=14))
    measured = gpu_run(nodes)
    result = judge(dataclasses.replace(run, locals=measured.locals, pairs=measured.pairs), checks=NO_VALUES)
    assert verdict_of(result, "bandwidth") == "NO-VERDICT"
    assert result.verdict == "NO-VERDICT"
    assert "speed not judged" in result.headline


def test_a_run_faster_than_its_known_links_does_not_pass_by_them() -> None:
    case = Case("half of ports that are not visible", 4, 180, gpus=8, facts=ETH_100)
    result = judge(crafted(case), checks=ONLY)
    assert result.verdict == "NO-VERDICT"
    bandwidth = result.check("bandwidth")
    assert bandwidth is not None
    assert "faster than the known links allow (100 Gbit/s (TCP) = 12.5 GB/s a node" in bandwidth.reason
    expected = judge(crafted(case), checks=ONLY, expect=369)
    assert expected.verdict == "FAIL"


def test_ports_that_are_down_unselected_or_slower_are_not_counted() -> None:
    down = (*ports(8, 400), *ports(2, 800, state="DOWN"), *ports(2, 100, "Ethernet"))
    assert judge_case(Case("", nodes=4, busbw=369, facts={"rdma_ports": down})).verdict == "PASS"
    chosen = Case(
        name="",
        nodes=4,
        busbw=185,
        verdict="",
        facts=NDR,
        environment={"NCCL_IB_HCA": "=mlx5_0,mlx5_1:1,mlx5_2,mlx5_3"},
    )
    assert judge_case(chosen).verdict == "PASS"
    left_out = dataclasses.replace(chosen, environment={"NCCL_IB_HCA": "^mlx5_4,mlx5_5,mlx5_6,mlx5_7"})
    assert judge_case(left_out).verdict == "PASS"
    assert judge_case(dataclasses.replace(chosen, environment={})).verdict == "FAIL"


def test_half_of_the_gpus_of_a_machine_have_half_of_its_network() -> None:
    half = Case("", nodes=4, gpus=4, busbw=170, machine="p5.48xlarge")
    assert judge_case(half).verdict == "PASS"
    assert judge_case(dataclasses.replace(half, gpus=8)).verdict == "FAIL"


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
    assert judge_case(case).verdict == verdict


def test_nvlink_bridges_between_two_pcie_gpus_are_read_from_nvml() -> None:
    case = Case("", nodes=1, gpus=2, busbw=205)
    run = all_with(crafted(case), gpu_names=("NVIDIA A100 80GB PCIe",) * 2)
    by_pcie = judge(run, checks=ONLY)
    assert by_pcie.check("bandwidth").figures[0].basis == "none"  # type: ignore[union-attr]
    bridged = tuple(
        dataclasses.replace(state, nvlinks_active=12, nvlink_mbytes_per_s=26_562) for state in run.health
    )
    judged = judge(dataclasses.replace(run, health=bridged), checks=ONLY).check("bandwidth")
    assert judged is not None
    assert judged.verdict == "PASS"
    assert 195 < (judged.figures[0].expected or 0) < 220


def test_pairs_far_below_their_port_rates_fail_even_if_all_are_equally_slow() -> None:
    run = crafted(Case("", nodes=4, busbw=369, facts=NDR))
    pairs = tuple(
        Pair(src=a, dst=b, round=n, gbytes_per_s=1.7, bytes=4 * GIB)
        for n, (a, b) in enumerate((a, b) for a in range(4) for b in range(4) if a != b)
    )
    slow = judge(dataclasses.replace(run, pairs=pairs), checks=select(only=["pairs"]))
    assert verdict_of(slow, "pairs") == "FAIL"
    well = tuple(dataclasses.replace(pair, gbytes_per_s=350) for pair in pairs)
    assert judge(dataclasses.replace(run, pairs=well), checks=select(only=["pairs"])).verdict == "PASS"


@pytest.mark.parametrize(("busbw", "verdict"), [(190.0, "FAIL"), (265.0, "WARN")])
def test_ten_equally_slow_nights_do_not_become_a_baseline(busbw: float, verdict: str) -> None:
    history: list[Record] = []
    for night in range(10):
        case = Case("", nodes=4, busbw=busbw * (1 + 0.001 * (night % 3)), facts=NDR)
        run = dataclasses.replace(crafted(case), started_unix=night * DAY_S)
        result = judge(run, checks=ONLY, history=history)
        assert verdict_of(result, "bandwidth") == verdict
        assert [figure.basis for figure in result.check("bandwidth").figures] == ["expectation"]  # type: ignore[union-attr]
        assert all(record.verdict == "NO-VERDICT" for record in result.records), "no baseline"
        history += result.records
    well = crafted(Case("", nodes=4, busbw=369, facts=NDR))
    assert judge(well, checks=ONLY, history=history).verdict == "PASS"


def test_a_run_that_contradicts_its_expectation_records_no_network_baseline() -> None:
    run = gpu_run(4)
    slow = crafted(Case("", nodes=4, busbw=100, machine="p5.48xlarge"))
    result = judge(dataclasses.replace(run, collectives=(*run.collectives[:-1], *slow.collectives)))
    verdicts = {record.op: record.verdict for record in result.records}
    assert {verdicts[op] for op in ("pair", "pair, sent", "barrier latency")} == {"NO-VERDICT"}
    assert verdicts["gemm_bf16"] == "PASS", "a GPU's own figures have nothing to do with it"
