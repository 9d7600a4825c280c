"""Interfaces, RDMA and host names: a fault in them is found under its name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from checklist.measurements import Measurements, Nic
from tests.checklist.runs import all_with, codes, gpu_run, spoil


def nic(**changes: Any) -> Nic:
    return dataclasses.replace(
        Nic(name="eth0", addresses=("10.0.0.9",), mtu=9001, gbps=100.0, up=True), **changes
    )


def with_nic(run: Measurements) -> Measurements:
    return all_with(run, nics=(nic(),))


FAULTS: list[tuple[str, Measurements, str, str]] = [
    ("loopback", spoil(gpu_run(), 8, nic="lo"), "nic-wrong", "FAIL"),
    ("no such interface", spoil(gpu_run(), 8, nic="eth9"), "nic-wrong", "FAIL"),
    ("a slower interface", spoil(with_nic(gpu_run(4)), 24, nics=(nic(gbps=10.0),)), "nic-rate", "WARN"),
    ("another MTU", spoil(with_nic(gpu_run(4)), 24, nics=(nic(mtu=1500),)), "mtu-differs", "WARN"),
    ("no EFA", spoil(gpu_run(), 8, efa_devices=0), "rdma-missing", "FAIL"),
    ("hostname", spoil(gpu_run(), 8, resolves_own_hostname=False), "hostname-unresolved", "FAIL"),
    ("hostname on loopback", spoil(gpu_run(), 8, hostname_address="127.0.1.1"), "hostname-loopback", "WARN"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "run", "code", "level"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_a_fault_is_found_under_its_name(what: str, run: Measurements, code: str, level: str) -> None:
    assert codes(run) == ({code: level} if code else {})
