"""Interfaces, RDMA and host names: a fault in them is found under its name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from checklist.measurements import Measurements, Nic
from checklist.verdict import judge
from tests.checklist.runs import codes, gpu_run, spoil


def nic(**changes: Any) -> Nic:
    return dataclasses.replace(Nic(name="eth0", addresses=(), mtu=9001, gbps=100.0, up=True), **changes)


def with_nic(run: Measurements) -> Measurements:
    told = tuple(
        dataclasses.replace(fact, nics=(nic(addresses=(f"10.0.0.{fact.node}",)),)) for fact in run.facts
    )
    return dataclasses.replace(run, facts=told)


SLOW, SMALL = nic(addresses=("10.0.0.3",), gbps=10.0), nic(addresses=("10.0.0.3",), mtu=1500)
SAME = nic(addresses=("10.0.0.0",))
FAULTS: list[tuple[str, Measurements, str, str]] = [
    ("loopback", spoil(gpu_run(), 8, nic="lo"), "nic-wrong", "FAIL"),
    ("no such interface", spoil(gpu_run(), 8, nic="eth9"), "nic-wrong", "FAIL"),
    ("a slower interface", spoil(with_nic(gpu_run(4)), 24, nics=(SLOW,)), "nic-rate", "WARN"),
    ("another MTU", spoil(with_nic(gpu_run(4)), 24, nics=(SMALL,)), "mtu-differs", "WARN"),
    ("one address twice", spoil(with_nic(gpu_run()), 8, nics=(SAME,)), "address-duplicate", "FAIL"),
    ("no EFA", spoil(gpu_run(), 8, efa_devices=0), "rdma-missing", "FAIL"),
    ("hostname", spoil(gpu_run(), 8, resolves_own_hostname=False), "hostname-unresolved", "FAIL"),
    ("hostname on loopback", spoil(gpu_run(), 8, hostname_address="127.0.1.1"), "hostname-loopback", "WARN"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "run", "code", "level"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_a_fault_is_found_under_its_name(what: str, run: Measurements, code: str, level: str) -> None:
    assert codes(run) == ({code: level} if code else {})


def test_a_duplicate_address_names_both_hosts_and_a_bridge_of_each_is_none() -> None:
    run = spoil(with_nic(gpu_run()), 8, nics=(SAME,))
    (fault,) = judge(run).findings
    assert fault.title == "Duplicate address: host-0 and host-1 both have 10.0.0.0."
    assert fault.suspects == ("host-0", "host-1")
    bridge = Nic(name="docker0", addresses=("172.17.0.1",), up=True)
    bridged = tuple(dataclasses.replace(fact, nics=(*fact.nics, bridge)) for fact in gpu_run().facts)
    assert judge(gpu_run(facts=bridged)).findings == ()
