"""Lost packets: the right end is named, and nobody for what passes or what only crowding does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from checklist.analysis.packet_loss import find, suspects
from checklist.measurements import Counters, Pair
from checklist.probes import counters
from checklist.verdict import judge
from tests.checklist.runs import cpu_run

SEGMENTS = 10_000


def pairs(
    nodes: int, lost: Mapping[tuple[int, int], float], alone: Iterable[tuple[int, int]] = ()
) -> list[Pair]:
    """Every ordered pair, with those shares sent again and 0.01 % elsewhere; all equally fast."""

    def pair(src: int, dst: int, *, again: bool) -> Pair:
        return Pair(
            src=src,
            dst=dst,
            round=0,
            gbytes_per_s=1.0,
            gbytes_per_s_p95=0.9,
            bytes=1 << 24,
            segments=SEGMENTS,
            retransmitted=round(lost.get((src, dst), 0.0001) * SEGMENTS),
            alone=again,
        )

    first = [pair(src, dst, again=False) for src in range(nodes) for dst in range(nodes) if src != dst]
    return [*first, *(pair(src, dst, again=True) for src, dst in alone)]


def into(node: int, nodes: int, share: float = 0.02) -> dict[tuple[int, int], float]:
    return {(src, node): share for src in range(nodes) if src != node}


@pytest.mark.parametrize("nodes", [3, 4, 32])
def test_a_host_whose_packets_are_lost_is_named_with_the_direction(nodes: int) -> None:
    (received,) = find(pairs(nodes, into(2, nodes)))
    assert (received.kind, received.node) == ("receive", 2)
    sent = {(dst, src): share for (src, dst), share in into(2, nodes).items()}
    (transmitted,) = find(pairs(nodes, sent))
    assert (transmitted.kind, transmitted.node, round(transmitted.rate, 3)) == ("transmit", 2, 0.02)


def test_a_link_that_loses_packets_is_named_and_neither_end() -> None:
    (lost,) = find(pairs(5, {(1, 3): 0.02, (3, 1): 0.01}))
    assert (lost.kind, lost.node, lost.pairs) == ("link", None, ((1, 3), (3, 1)))


def test_a_host_and_a_link_elsewhere_are_both_named() -> None:
    found = find(pairs(6, {**into(2, 6), (4, 5): 0.03}))
    assert {(one.kind, one.node) for one in found} == {("receive", 2), ("link", None)}


def test_a_host_that_loses_packets_with_one_lucky_pair_is_still_that_host() -> None:
    lost = into(2, 6)
    del lost[0, 2]
    assert [(one.kind, one.node) for one in find(pairs(6, lost))] == [("receive", 2)]


def test_the_little_that_every_network_loses_is_nothing() -> None:
    assert find(pairs(4, {(0, 1): 0.001})) == ()


def test_without_sockets_slow_messages_far_behind_the_best_tell_it() -> None:
    uneven = [
        dataclasses.replace(
            pair, segments=None, retransmitted=None, gbytes_per_s_p95=0.3 if pair.dst == 2 else 0.9
        )
        for pair in pairs(4, {})
    ]
    assert [(one.kind, one.node, one.rate) for one in find(uneven)] == [("receive", 2, 0.0)]


def test_suspects_are_measured_alone_once_and_loss_that_is_then_gone_accuses_nobody() -> None:
    lost = into(2, 4)
    asked = suspects(pairs(4, lost))
    assert set(asked) <= set(lost)
    assert len(asked) == 3
    assert suspects(pairs(4, lost, alone=asked)) == ()

    stays = judge(dataclasses.replace(cpu_run(4), pairs=tuple(pairs(4, lost, alone=asked))))
    assert [(fault.code, fault.verdict, fault.nodes) for fault in stays.findings] == [
        ("loss-node", "FAIL", ("host-2",))
    ]
    assert "2.0% of the segments are sent again" in stays.headline
    assert stays.bad_nodes == ("host-2",)

    crowded = pairs(4, lost) + [
        dataclasses.replace(p, alone=True) for p in pairs(4, {}) if (p.src, p.dst) in asked
    ]
    passes = judge(dataclasses.replace(cpu_run(4), pairs=tuple(crowded)))
    assert passes.findings == ()
    assert passes.check("loss").verdict == "PASS"  # type: ignore[union-attr]


def test_loss_that_was_not_seen_alone_is_a_warning_only() -> None:
    result = judge(dataclasses.replace(cpu_run(4), pairs=tuple(pairs(4, into(2, 4)))))
    assert [(fault.code, fault.verdict) for fault in result.findings] == [("loss-node", "WARN")]
    assert result.bad_nodes == ()


def test_a_node_that_sends_much_again_in_the_world_is_a_suspect_where_no_pair_tells_more() -> None:
    told = (Counters(node=1, phase="world", tcp_segments=10_000, tcp_retransmitted=300),)
    result = judge(dataclasses.replace(cpu_run(4), counters=told))
    assert [(fault.code, fault.suspects) for fault in result.findings] == [("loss-world", ("host-1",))]
    few = (Counters(node=1, phase="world", tcp_segments=10_000, tcp_retransmitted=30),)
    assert judge(dataclasses.replace(cpu_run(4), counters=few)).findings == ()


def test_a_port_that_counts_errors_is_named_and_one_that_went_down_fails() -> None:
    ports = Counters(node=3, phase="pairs", rdma_errors={"mlx5_0/1/port_rcv_errors": 7})
    result = judge(dataclasses.replace(cpu_run(4), counters=(ports,)))
    assert [(fault.verdict, fault.nodes) for fault in result.findings] == [("WARN", ("host-3",))]
    assert "mlx5_0/1/port_rcv_errors +7" in result.findings[0].title
    down = dataclasses.replace(ports, rdma_errors={"mlx5_0/1/link_downed": 1})
    assert judge(dataclasses.replace(cpu_run(4), counters=(down,))).bad_nodes == ("host-3",)


def test_where_nothing_was_counted_there_is_no_verdict() -> None:
    run = cpu_run(4)
    blind = tuple(dataclasses.replace(pair, gbytes_per_s_p95=None) for pair in run.pairs)
    assert judge(dataclasses.replace(run, pairs=blind)).check("loss").verdict == "NO-VERDICT"  # type: ignore[union-attr]


def test_what_ports_count_is_read_by_device_port_and_counter_and_only_growth_is_told(tmp_path: Path) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    for name, value in (
        ("counters/port_rcv_errors", 5),
        ("counters/port_xmit_data", 9),
        ("hw_counters/rx_drops", 1),
    ):
        file = port / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")
    before = counters.rdma(tmp_path)
    assert before == {"mlx5_0/1/port_rcv_errors": 5, "mlx5_0/1/rx_drops": 1}
    (port / "counters" / "port_rcv_errors").write_text("12\n")
    both = [
        {"tcp_segments": 10, "tcp_retransmitted": None, "rdma_errors": reading}
        for reading in (before, counters.rdma(tmp_path))
    ]
    grown = counters.growth(*both)
    assert grown == {
        "tcp_segments": 0,
        "tcp_retransmitted": None,
        "rdma_errors": {"mlx5_0/1/port_rcv_errors": 7},
    }
    assert counters.rdma(tmp_path / "none") is None


def test_this_hosts_own_segments_are_counted() -> None:
    sent, again = counters.tcp(Path("/proc/self/net/snmp"))
    assert sent is not None
    assert again is not None
    assert counters.tcp(Path("/proc/self/none")) == (None, None)
