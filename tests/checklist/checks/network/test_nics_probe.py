"""The interfaces that NCCL and gloo select, and the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from checklist.checks.network import nics_probe
from checklist.checks.network.nics_probe import rate
from checklist.measurements import Nic
from decorators.backends import tables

HOST = (
    Nic(name="docker0", addresses=("172.17.0.1",), up=True),
    Nic(name="eth0", addresses=("10.0.0.5", "fe80::1"), up=True),
    Nic(name="eth1", addresses=("10.1.0.5",), up=True),
    Nic(name="lo", addresses=("127.0.0.1",), up=True),
)


@pytest.mark.parametrize(
    ("expected_name", "expected_interfaces"),
    [
        ("eth", "eth0"),
        ("=eth1", "eth1"),
        ("^docker,lo", "eth0"),
        ("eth1,eth0", "eth0"),
        ("docker0", "docker0"),
    ],
)
def test_the_nccl_interface_variable_is_parsed_like_nccl(
    expected_name: str, expected_interfaces: str
) -> None:
    choice = nics_probe.choose("nccl", HOST, "10.0.0.1", {"NCCL_SOCKET_IFNAME": expected_name})
    assert (choice.nic, choice.usable) == (expected_interfaces, True)


def test_an_exclusion_skips_interfaces_that_nccl_cannot_use() -> None:
    """Interfaces of multi-node containers on AWS Batch, with the variable that they are given."""
    host = (
        Nic(name="dummy0", addresses=(), up=True),
        Nic(name="ecs-eth0", addresses=("169.254.172.2",), up=True),
        Nic(name="eth0", addresses=("10.0.0.5",), up=True),
        Nic(name="lo", addresses=("127.0.0.1",), up=True),
    )
    [variable] = [row for row in tables.variables() if row.name == "NCCL_SOCKET_IFNAME"]
    choice = nics_probe.choose("nccl", host, "10.0.0.1", {variable.name: variable.value})
    assert (choice.nic, choice.address, choice.usable) == ("eth0", "10.0.0.5", True)
    assert (
        nics_probe.choose("nccl", host, "10.0.0.1", {}).nic == "ecs-eth0"
    )  # which is what the variable is for
    excluded = nics_probe.choose("nccl", host, "10.0.0.1", {variable.name: "^eth,ecs,lo,dummy"})
    assert not excluded.usable
    assert "leaves no interface of this host" in excluded.reason


def test_a_missing_interface_is_named_with_the_existing_ones() -> None:
    choice = nics_probe.choose("gloo", HOST, "10.0.0.1", {"GLOO_SOCKET_IFNAME": "ib0"})
    assert not choice.usable
    assert "GLOO_SOCKET_IFNAME=ib0 names no interface of this host" in choice.reason
    assert "eth1" in choice.reason


def test_loopback_is_usable_only_if_rank_0_is_on_the_same_host() -> None:
    variable = {"GLOO_SOCKET_IFNAME": "lo"}
    assert not nics_probe.choose("gloo", HOST, "10.0.0.1", variable).usable
    assert nics_probe.choose("gloo", HOST, "127.0.0.1", variable).usable


def test_a_host_name_that_does_not_resolve_leaves_gloo_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nics_probe, "own_address", lambda: None)
    choice = nics_probe.choose("gloo", HOST, "10.0.0.1", {})
    assert (choice.nic, choice.usable) == ("lo", False)
    assert "cannot be resolved" in choice.reason


def test_an_interface_without_a_link_speed_has_no_rate(tmp_path: Path) -> None:
    for name in ("eth0", "veth0", "bond0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text("10000\n")
    assert rate(tmp_path / "veth0") is None, "a veth says 10 Gbit/s whatever carries it"
    (tmp_path / "eth0" / "device").mkdir()
    assert rate(tmp_path / "eth0") == 10.0
    (tmp_path / "bond0" / "lower_eth0").symlink_to(tmp_path / "eth0")
    assert rate(tmp_path / "bond0") == 10.0
    (tmp_path / "eth0" / "speed").write_text("-1\n")
    assert rate(tmp_path / "eth0") is None
