"""Connection and round trip from one node to another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from checklist.checks.network import mesh_probe

CONTEXT: Any = SimpleNamespace(stored={}, node=1, progress=SimpleNamespace(begin=lambda: None))


def test_a_node_is_reached_over_a_socket() -> None:
    port = mesh_probe.listen(CONTEXT, "127.0.0.1")
    assert mesh_probe.listen(CONTEXT, "127.0.0.1") == port, "one sink for all"
    (probe,) = mesh_probe.reach(CONTEXT, {"0": ("127.0.0.1", port)}, 5.0, 20.0)
    assert (probe["src"], probe["dst"], probe["connected"], probe["bulk_ok"]) == (1, 0, True, True)
    assert 0 < probe["round_trip_s"] < probe["seconds"]


@pytest.mark.parametrize(
    ("connected", "seconds", "bulk_ok", "total_s"),
    [(True, (0.5,), True, 0.75), (True, (), False, None), (False, (), None, None)],
)
def test_the_time_of_a_probe_includes_the_connection(
    monkeypatch: pytest.MonkeyPatch,
    connected: bool,
    seconds: tuple[float, ...],
    bulk_ok: bool | None,
    total_s: float | None,
) -> None:
    sent = SimpleNamespace(
        connected=connected, seconds=seconds, connect_s=0.25, round_trip_s=None, error=None
    )
    monkeypatch.setattr(mesh_probe, "deliver", lambda *_, **__: sent)
    (probe,) = mesh_probe.reach(CONTEXT, {"0": ("127.0.0.1", 1)}, 5.0, 5.0)
    assert (probe.get("bulk_ok"), probe.get("seconds")) == (bulk_ok, total_s)
