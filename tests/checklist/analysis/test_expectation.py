"""Published measurements of healthy clusters pass and those of broken ones fail, without their source too."""

from __future__ import annotations

import dataclasses
import datetime

import pytest

from benchmarks import busbw
from checklist.analysis.expectation import (
    GATE,
    JUDGED,
    PAIR,
    SMALLEST_BYTES,
    Wiring,
    expect,
    published,
    ranges_of,
)
from estimator.hardware.fabrics import fabric_shares

GIB = 2**30
H100S = Wiring(
    gpus=8,
    domains=4,
    link="nvlink",
    link_gbytes_per_s=450,
    nvlink_sharp=True,
    fabric="infiniband",
    ports=8,
    port_gbps=400,
)


@pytest.fixture(scope="module")
def scored() -> list[busbw.Scored]:
    return busbw.scores(published())


def test_every_published_measurement_has_a_source_a_date_and_a_judged_size() -> None:
    rows = published()
    assert len(rows) >= 60
    for row in rows:
        assert row.source.startswith("https://"), row
        assert datetime.date.fromisoformat(row.date) < datetime.date(2027, 1, 1), row
        assert row.bytes >= SMALLEST_BYTES
        assert row.op in JUDGED
    keys = [dataclasses.astuple(row) for row in rows]
    assert len(set(map(str, keys))) == len(keys)


def test_all_published_measurements_get_the_right_verdict(scored: list[busbw.Scored]) -> None:
    assert [one.row for one in scored if not one.right(one.shipped)] == []


def test_a_published_measurement_is_judged_right_or_not_at_all_without_its_own_source(
    scored: list[busbw.Scored],
) -> None:
    wrong = [one.row for one in scored if one.held_out != busbw.NONE and not one.right(one.held_out)]
    assert wrong == []
    # Slow Ethernet and xGMI have one source each
    unjudged = {one.row.wiring.fabric or one.row.wiring.link for one in scored if one.held_out == busbw.NONE}
    assert unjudged == {"tcp", "xgmi"}


def test_the_committed_page_matches_the_data(scored: list[busbw.Scored]) -> None:
    assert busbw.FILE.read_text() == busbw.page(scored)


def test_the_committed_shares_follow_from_the_published_measurements() -> None:
    derived = ranges_of(published())
    assert derived.keys() == fabric_shares().keys()
    for kind, shares in fabric_shares().items():
        assert shares.low == pytest.approx(derived[kind].low, abs=1e-4)
        assert shares.typical == pytest.approx(derived[kind].typical, abs=1e-4)
        assert shares.sources == derived[kind].sources


def test_no_healthy_measurement_exceeds_the_upper_bound(scored: list[busbw.Scored]) -> None:
    for one in scored:
        if one.expectation is not None and one.row.condition != GATE:
            # 1.1: links and ports carry a little more than their nominal rate
            assert one.row.busbw_gbytes_per_s <= 1.1 * one.expectation.maximum, one.row


@pytest.mark.parametrize("op", [*JUDGED, PAIR])
def test_the_expected_range_grows_with_the_message_and_stays_below_the_bound(op: str) -> None:
    ranges = [expect(H100S, op, size) for size in (GIB // 8, GIB, 8 * GIB)]
    known_ranges = [one for one in ranges if one is not None]
    assert len(known_ranges) == 3
    assert [one.low for one in known_ranges] == sorted(one.low for one in known_ranges)
    for one in known_ranges:
        assert one.fail_below <= one.low < one.typical < one.maximum


def test_the_expectation_names_ports_and_rates() -> None:
    expected = expect(H100S, "all_reduce", 8 * GIB)
    assert expected is not None
    assert expected.arithmetic == "8 ports x 400 Gbit/s (InfiniBand) = 400 GB/s a node, NVLink 450 GB/s a GPU"
    assert 340 < expected.typical < 400


def test_at_most_one_infiniband_port_per_gpu_is_counted() -> None:
    """A DGX has ports for storage at the same rate."""
    twelve_ports = dataclasses.replace(H100S, ports=12)
    assert twelve_ports.network_gbytes_per_s == H100S.network_gbytes_per_s == 400
    assert dataclasses.replace(H100S, gpus=4).network_gbytes_per_s == 200
    assert dataclasses.replace(H100S, fabric="efa2", ports=32, port_gbps=100).network_gbytes_per_s == 400


@pytest.mark.parametrize(
    ("change", "op", "size"),
    [
        ({"ports": None}, "all_reduce", GIB),
        ({"port_gbps": None}, "all_reduce", GIB),
        ({"domains": 1, "link": None}, "all_reduce", GIB),
        ({}, "broadcast", GIB),
        ({}, "all_reduce", GIB // 32),
    ],
    ids=["ports", "rate", "link of one node", "operation without figures", "small message"],
)
def test_unknown_hardware_has_no_expectation(change: dict[str, object], op: str, size: int) -> None:
    assert expect(dataclasses.replace(H100S, **change), op, size) is None


def test_without_a_known_gpu_link_the_expectation_is_limited_by_the_network() -> None:
    expected = expect(dataclasses.replace(H100S, link=None, link_gbytes_per_s=None), "all_reduce", 8 * GIB)
    assert expected is not None
    assert expected.low < 400
