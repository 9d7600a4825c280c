"""Open ports across the port range of a host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from checklist.checks.network import open_ports_probe


def test_each_part_of_the_port_range_has_an_open_port_until_closed() -> None:
    context: Any = SimpleNamespace(stored={}, node=1, progress=SimpleNamespace(begin=lambda: None))
    opened = open_ports_probe.open_some(context, "127.0.0.1", "::1")
    low, step = opened["low"], (opened["high"] - opened["low"] + 1) / open_ports_probe.TRIED
    assert [int((port - low) / step) for port in opened["ports"]] == list(range(16))
    assert [int((port - low) / step) for port in opened["others"]] == [8]
    assert open_ports_probe.open_some(context, "127.0.0.1", None)["others"] == []
    limits = {"low": low, "high": opened["high"], "tried": opened["ports"]}
    target = {"dst": 0, "address": "127.0.0.1", **limits}
    assert [one["blocked"] for one in open_ports_probe.knock(context, [target], 2.0)] == [()]
    open_ports_probe.close(context)
    (record,) = open_ports_probe.knock(context, [target], 2.0)
    assert (record["src"], record["blocked"]) == (1, tuple(opened["ports"]))
