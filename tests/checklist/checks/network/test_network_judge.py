"""Judging of interfaces, RDMA and host names."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from checklist.measurements import Measurements, Nic
from checklist.verdict import judge
from tests.checklist.runs import codes, gpu_run, with_facts


def nic(**changes: Any) -> Nic:
    return dataclasses.replace(Nic(name="eth0", addresses=(), mtu=9001, gbps=100.0, up=True), **changes)


def with_nic(run: Measurements) -> Measurements:
    reported = tuple(
        dataclasses.replace(fact, nics=(nic(addresses=(f"10.0.0.{fact.node}",)),)) for fact in run.facts
    )
    return dataclasses.replace(run, facts=reported)


SLOW, SMALL = nic(addresses=("10.0.0.3",), gbps=10.0), nic(addresses=("10.0.0.3",), mtu=1500)
SAME = nic(addresses=("10.0.0.0",))
FAULTS: list[tuple[str, Measurements, str, str]] = [
    ("loopback", with_facts(gpu_run(), 8, nic="lo"), "nic-wrong", "FAIL"),
    ("no such interface", with_facts(gpu_run(), 8, nic="eth9"), "nic-wrong", "FAIL"),
    ("a slower interface", with_facts(with_nic(gpu_run(4)), 24, nics=(SLOW,)), "nic-rate", "WARN"),
    ("another MTU", with_facts(with_nic(gpu_run(4)), 24, nics=(SMALL,)), "mtu-differs", "WARN"),
    ("one address twice", with_facts(with_nic(gpu_run()), 8, nics=(SAME,)), "address-duplicate", "FAIL"),
    ("no EFA", with_facts(gpu_run(), 8, efa_devices=0), "rdma-missing", "FAIL"),
    ("hostname", with_facts(gpu_run(), 8, resolves_own_hostname=False), "hostname-unresolved", "FAIL"),
    ("name on loopback", with_facts(gpu_run(), 8, hostname_address="127.0.1.1"), "hostname-loopback", "WARN"),
]  # fmt: skip


@pytest.mark.parametrize(("description", "run", "code", "level"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_each_network_fault_is_reported_with_its_code(
    description: str, run: Measurements, code: str, level: str
) -> None:
    assert codes(run) == ({code: level} if code else {})


def test_a_duplicate_address_names_both_hosts_and_bridge_addresses_are_ignored() -> None:
    run = with_facts(with_nic(gpu_run()), 8, nics=(SAME,))
    (fault,) = judge(run).findings
    assert fault.title == "Duplicate address: host-0 and host-1 both have 10.0.0.0."
    assert fault.suspects == ("host-0", "host-1")
    bridge = Nic(name="docker0", addresses=("172.17.0.1",), up=True)
    bridged = tuple(dataclasses.replace(fact, nics=(*fact.nics, bridge)) for fact in gpu_run().facts)
    assert judge(gpu_run(facts=bridged)).findings == ()


def test_a_duplicate_address_is_named_even_if_its_hosts_were_lost_early() -> None:
    callers = {0: "10.0.0.1", 1: "10.0.0.2", 2: "10.0.0.2"}
    hosts = {node: f"host-{node}" for node in range(3)}
    run = dataclasses.replace(gpu_run(3), callers=callers, hosts=hosts)
    for reported in (8, 16):  # of ranks: host-2 was lost, or both were
        part = dataclasses.replace(run, facts=run.facts[:reported])
        (fault,) = (one for one in judge(part).findings if one.code == "address-duplicate")
        assert fault.title == "Duplicate address: host-1 and host-2 both have 10.0.0.2."
        assert "separate jobs" not in judge(part).headline


def test_hosts_that_join_through_one_gateway_have_no_duplicate_address() -> None:
    through = dict.fromkeys((1, 2), "192.0.2.1")
    hosts = {node: f"host-{node}" for node in range(3)}
    run = dataclasses.replace(gpu_run(3), callers={0: "10.0.0.1", **through}, hosts=hosts)
    assert judge(run).findings == ()
    lost = dataclasses.replace(run, facts=run.facts[:16])
    assert "address-duplicate" not in {fault.code for fault in judge(lost).findings}


def test_two_hosts_with_one_name_give_a_warning() -> None:
    (fault,) = judge(with_facts(gpu_run(3, 1), 2, hostname="host-1")).findings
    assert (fault.verdict, fault.suspects) == ("WARN", ("host-1 (node 1)", "host-1 (node 2)"))
    assert (
        fault.title
        == "Duplicate host name: different hosts are called host-1: host-1 (node 1), host-1 (node 2)."
    )
    named = with_facts(with_facts(gpu_run(3, 1), 1, node_name="rack"), 2, node_name="rack")
    assert [one.code for one in judge(named).findings] == ["hostname-duplicate"]
    one_host = with_facts(gpu_run(3, 1), 2, hostname="host-1", boot_id="boot-1")
    assert [one.code for one in judge(one_host).findings] == ["nodes-share-host"]


@pytest.mark.parametrize(("seconds", "expected"), [(1.0, {}), (1.1, {"hostname-slow": "WARN"})])
def test_slow_name_resolution_gives_a_warning(seconds: float, expected: dict[str, str]) -> None:
    assert codes(with_facts(gpu_run(), 8, hostname_seconds=seconds)) == expected
