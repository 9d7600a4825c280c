"""Switches are read from the output of lldpd; missing output gives no switch."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from checklist.checks.network import lldp_probe


def neighbor(port: str, **chassis: str) -> dict[str, object]:
    reported = {key: [{"value": value}] for key, value in chassis.items()}
    return {
        "name": port,
        "chassis": [reported],
        "port": [{"id": [{"type": "ifname", "value": "Ethernet1/3"}]}],
    }


def test_switches_are_listed_once_by_name_or_else_by_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = [
        neighbor("eth0", id="00:1c:73:00:00:01", name="leaf-2"),
        neighbor("eth1", id="00:1c:73:00:00:01", name="leaf-2"),
        neighbor("eth2", id="00:1c:73:00:00:09"),
    ]
    (tmp_path / "answer").write_text(json.dumps({"lldp": [{"interface": ports}]}))
    tool = tmp_path / lldp_probe.TOOL
    tool.write_text(f'#!/bin/sh\n[ "$*" = "-f json0" ] && cat {tmp_path}/answer\n')
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert lldp_probe.switches() == ("00:1c:73:00:00:09", "leaf-2")


@pytest.mark.parametrize("text", ["", "{}", '{"lldp": [{}]}', '{"lldp": [{"interface": [{}]}]}'])
def test_no_switch_is_reported_without_neighbors_or_with_an_unknown_format(text: str) -> None:
    assert lldp_probe.parse(text) == ()
