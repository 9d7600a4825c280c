"""Packet loss: the faulty node or link is named; transient loss and congestion name none."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from checklist.analysis.packet_loss import find, stall, suspects
from checklist.checks.host import counters
from checklist.measurements import Counters, Pair
from checklist.verdict import judge
from tests.checklist.runs import cpu_run

SEGMENTS = 10_000
# Healthy runs' least share of a pair's best rate and the longest that a message was held up, at loads of 1,
# 14 and 28 on two cores (python -m benchmarks.network_faults --only healthy)
HEALTHY = [(0.941, 0.01), (0.742, 0.04), (0.694, 0.028)]


def pairs(
    nodes: int, lost: Mapping[tuple[int, int], float], alone: Iterable[tuple[int, int]] = ()
) -> list[Pair]:
    """Return every ordered pair with the given retransmission rates, 0.01 % elsewhere; all equally fast."""

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
def test_a_host_that_loses_packets_is_named_with_the_direction(nodes: int) -> None:
    (received,) = find(pairs(nodes, into(2, nodes)))
    assert (received.kind, received.node) == ("receive", 2)
    sent = {(dst, src): share for (src, dst), share in into(2, nodes).items()}
    (transmitted,) = find(pairs(nodes, sent))
    assert (transmitted.kind, transmitted.node, round(transmitted.rate, 3)) == ("transmit", 2, 0.02)


def test_suspects_are_measured_alone_once_and_loss_that_disappears_is_not_a_failure() -> None:
    lost = into(2, 4)
    first_suspects = suspects(pairs(4, lost))
    assert set(first_suspects) <= set(lost)
    assert len(first_suspects) == 3
    assert suspects(pairs(4, lost, alone=first_suspects)) == ()

    stays = judge(dataclasses.replace(cpu_run(4), pairs=tuple(pairs(4, lost, alone=first_suspects))))
    assert [(fault.code, fault.verdict, fault.nodes) for fault in stays.findings] == [
        ("loss-node", "FAIL", ("host-2",))
    ]
    assert "2.0% of the segments are retransmitted" in stays.headline
    assert stays.bad_nodes == ("host-2",)

    crowded = pairs(4, lost) + [
        dataclasses.replace(p, alone=True) for p in pairs(4, {}) if (p.src, p.dst) in first_suspects
    ]
    passes = judge(dataclasses.replace(cpu_run(4), pairs=tuple(crowded)))
    assert [(fault.code, fault.verdict) for fault in passes.findings] == [("loss-intermittent", "WARN")]
    assert passes.bad_nodes == ()

    little = pairs(4, into(2, 4, 0.005)) + crowded[-3:]
    assert judge(dataclasses.replace(cpu_run(4), pairs=tuple(little))).findings == ()


def test_a_port_that_counts_errors_is_named_and_one_that_went_down_fails() -> None:
    ports = Counters(node=3, phase="pairs", rdma_errors={"mlx5_0/1/port_rcv_errors": 7})
    result = judge(dataclasses.replace(cpu_run(4), counters=(ports,)))
    assert [(fault.verdict, fault.nodes) for fault in result.findings] == [("WARN", ("host-3",))]
    assert "mlx5_0/1/port_rcv_errors +7" in result.findings[0].title
    down = dataclasses.replace(ports, rdma_errors={"mlx5_0/1/link_downed": 1})
    assert judge(dataclasses.replace(cpu_run(4), counters=(down,))).bad_nodes == ("host-3",)


def test_port_counters_are_read_per_device_and_port_and_only_growth_is_reported(tmp_path: Path) -> None:
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
    nothing = {"tcp_segments": 10, "tcp_retransmitted": None, "carrier_changes": 4, "port_errors": {}}
    nothing |= {"cpu_periods": None, "cpu_throttled": None}
    grown = counters.growth(
        {**nothing, "rdma_errors": before},
        {**nothing, "rdma_errors": counters.rdma(tmp_path), "carrier_changes": 6},
    )
    assert grown == {
        "tcp_segments": 0,
        "tcp_retransmitted": None,
        "carrier_changes": 2,
        "port_errors": {},
        "rdma_errors": {"mlx5_0/1/port_rcv_errors": 7},
        "cpu_periods": None,
        "cpu_throttled": None,
    }
    assert counters.rdma(tmp_path / "none") is None


def stalled(run: list[Pair], src: int, dst: int, held_s: float, *, alone: bool = False) -> list[Pair]:
    """Return the pairs with one delayed message in one direction."""
    best_s = (1 << 24) / 1e9

    def slow(pair: Pair) -> Pair:
        hit = (pair.src, pair.dst, pair.alone) == (src, dst, alone)
        return dataclasses.replace(pair, gbytes_per_s_p95=best_s / (best_s + held_s)) if hit else pair

    return [slow(pair) for pair in run]


def test_a_delayed_message_is_a_stall_even_with_few_retransmissions() -> None:
    (stalled_pair,) = find(stalled(pairs(4, {}), 0, 2, 3.0))
    assert (stalled_pair.kind, stalled_pair.pairs, stalled_pair.stall_s) == (
        "link",
        ((0, 2),),
        pytest.approx(3.0, rel=0.01),
    )
    assert stalled_pair.comes_and_goes
    assert suspects(stalled(pairs(4, {}), 0, 2, 3.0)) == ((0, 2),)
    assert find(stalled(pairs(4, {}), 0, 2, 0.19)) == (), "shorter than TCP's shortest timeout"


@pytest.mark.parametrize(("share", "held_up_s"), HEALTHY)
def test_the_slowest_messages_of_healthy_runs_are_not_stalls(share: float, held_up_s: float) -> None:
    size = round(held_up_s * 1e9 / (1 / share - 1))
    slow = Pair(src=0, dst=1, round=0, gbytes_per_s=1.0, gbytes_per_s_p95=share, bytes=size)
    assert stall(slow) == 0.0


def test_a_stall_that_does_not_recur_alone_is_a_warning_with_its_time() -> None:
    clean = stalled(pairs(4, {}, alone=[(0, 2)]), 0, 2, 3.0)
    result = judge(dataclasses.replace(cpu_run(4), pairs=tuple(clean), started_unix=1_000_000.0))
    (fault,) = result.findings
    assert (fault.code, fault.verdict, fault.suspects) == ("loss-intermittent", "WARN", ("host-0", "host-2"))
    assert fault.title == (
        "Packets from host-0 to host-2 were lost for a while: a message was delayed by 3.0 s, not when "
        "measured alone. Seen on 1 of 1 nights (1970-01-12)."
    )
    assert (result.verdict, result.bad_nodes) == ("WARN", ())


def test_lasting_packet_loss_is_named_even_if_messages_stall_too() -> None:
    lost = {(1, 3): 0.03}
    run = stalled(pairs(4, lost, alone=[(1, 3)]), 1, 3, 1.0)
    assert [one.lasts for one in find(run)] == [True]
    result = judge(dataclasses.replace(cpu_run(4), pairs=tuple(run)))
    assert [(fault.code, fault.verdict) for fault in result.findings] == [("loss-link", "FAIL")]


def test_packet_loss_only_under_combined_load_is_attributed_to_no_node() -> None:
    lost = {(0, 1): 0.02, (2, 3): 0.02, (4, 5): 0.015}
    run = pairs(6, lost) + [
        dataclasses.replace(p, alone=True) for p in pairs(6, {}) if (p.src, p.dst) in lost
    ]
    result = judge(dataclasses.replace(cpu_run(6), pairs=tuple(run)))
    assert [(f.code, f.verdict, f.nodes, f.suspects) for f in result.findings] == [
        ("loss-crowded", "WARN", (), ())
    ]


def test_a_carrier_that_changed_fails_and_damaged_frames_warn() -> None:
    reported = Counters(node=3, phase="pairs", carrier_changes=2, port_errors={"rx_crc_errors": 9})
    result = judge(dataclasses.replace(cpu_run(4), counters=(reported,)))
    assert [(fault.code, fault.verdict, fault.nodes) for fault in result.findings] == [
        ("carrier", "FAIL", ("host-3",)),
        ("port-errors", "WARN", ("host-3",)),
    ]
    assert "(eth0) went down in phase pairs: its carrier changed 2 times" in result.headline
    hardware = Counters(node=3, phase="pairs", carrier_changes=0, port_errors={"link_down_events_phy": 1})
    assert judge(dataclasses.replace(cpu_run(4), counters=(hardware,))).bad_nodes == ("host-3",)
    quiet = Counters(node=3, phase="pairs", carrier_changes=0, port_errors={})
    assert judge(dataclasses.replace(cpu_run(4), counters=(quiet,))).findings == ()


ETHTOOL = """NIC statistics:
     rx_packets: 1048576
     rx_out_of_buffer: 12
     rx_discards_phy: 40
     rx_crc_errors_phy: 3
     rx_symbol_err_phy: 0
     link_down_events_phy: 2
     ch0_events: 88
"""


def test_only_error_counters_of_an_ethernet_port_are_read(tmp_path: Path) -> None:
    (tmp_path / "statistics").mkdir()
    assert counters.ethernet(tmp_path, "") == {}
    (tmp_path / "statistics" / "rx_crc_errors").write_text("7\n")
    assert counters.ethernet(tmp_path, ETHTOOL) == {
        "rx_crc_errors": 7,
        "rx_crc_errors_phy": 3,
        "rx_symbol_err_phy": 0,
        "link_down_events_phy": 2,
    }
