"""Judging of facts about the job, its software and its hosts."""

from __future__ import annotations

import dataclasses

import pytest

from checklist.measurements import Measurements
from checklist.verdict import judge
from tests.checklist.runs import all_with, codes, gpu_run, with_facts

FAULTS: list[tuple[str, Measurements, str, str]] = [
    ("a lost rank", dataclasses.replace(gpu_run(), facts=gpu_run().facts[:-1]), "ranks-missing", "FAIL"),
    ("separate jobs", dataclasses.replace(gpu_run(1, 4), nodes_asked=2), "ranks-separate", "FAIL"),
    ("one host", with_facts(gpu_run(2, 1), 1, boot_id="boot-0"), "nodes-share-host", "FAIL"),
    ("another driver", with_facts(gpu_run(), 9, versions={"driver": "535.1"}), "versions-differ", "FAIL"),
    ("another kernel", with_facts(gpu_run(), 9, versions={"kernel": "6.1"}), "", ""),
    ("64 MB /dev/shm", with_facts(gpu_run(), 8, shm_bytes=64 * 2**20), "shm-small", "FAIL"),
    ("memlock", with_facts(gpu_run(), 8, memlock_bytes=65536), "memlock-low", "FAIL"),
    ("clock", with_facts(gpu_run(), 8, clock_offset_s=5.0), "clock-skew", "WARN"),
    ("zones", with_facts(gpu_run(), 8, zone="us-east-1b"), "zones-differ", "WARN"),
    ("placement groups", with_facts(gpu_run(), 8, placement_group="other"), "groups-differ", "WARN"),
    ("torch that hangs", all_with(gpu_run(), versions={"torch": "2.7.0+cu126"}), "torch-hang", "WARN"),
    ("torch that is mended", all_with(gpu_run(), versions={"torch": "2.7.1+cu126"}), "", ""),
    ("torch from before", all_with(gpu_run(), versions={"torch": "2.6.0"}), "", ""),
]  # fmt: skip


@pytest.mark.parametrize(("description", "run", "code", "level"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_each_fault_of_a_host_is_reported_with_its_code(
    description: str, run: Measurements, code: str, level: str
) -> None:
    assert codes(run) == ({code: level} if code else {})


def test_shared_network_layers_of_the_nodes_are_reported() -> None:
    run = with_facts(
        all_with(gpu_run(), network_nodes=("nn-1", "nn-2", "nn-3")), 8, network_nodes=("nn-1", "nn-2", "nn-9")
    )
    placed = judge(run).check("placement")
    assert (placed.verdict, placed.reason) == (
        "PASS",
        "All nodes are in us-east-1a and share 2 of 3 layers of the network.",
    )


def test_a_wrong_clock_of_rank_0_is_named_instead_of_all_others() -> None:
    late = with_facts(all_with(gpu_run(4), clock_offset_s=-1_800.0), 0, clock_offset_s=0.0)
    (fault,) = judge(late).findings
    assert (fault.verdict, fault.suspects) == ("FAIL", ("host-0",))
    assert fault.title == "The clock of host-0 differs by +1800.0 s from those of its peers."


def test_both_of_two_hosts_with_different_clocks_are_suspects() -> None:
    (fault,) = judge(with_facts(gpu_run(), 8, clock_offset_s=5.0)).findings
    assert fault.title == "The clocks of host-0 and host-1 are 5.0 s apart."
    assert fault.suspects == ("host-0", "host-1")


def test_a_node_with_a_different_number_of_ranks_gives_a_warning() -> None:
    run = gpu_run(3, 1)
    extra_rank = dataclasses.replace(run.facts[2], rank=3, local_rank=1, gpu_uuids=("GPU-2-0", "GPU-2-1"))
    (fault,) = [
        fault
        for fault in judge(dataclasses.replace(run, facts=(*run.facts, extra_rank))).findings
        if fault.check == "ranks"
    ]
    assert (fault.code, fault.verdict, fault.suspects) == ("ranks-unequal", "WARN", ("host-2",))
    assert fault.title == "The nodes' ranks are unequal: 1 on host-0, host-1; 2 on host-2."
