"""Limits of the checks at their boundaries: the limit itself, and the value next to it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from checklist.analysis.soundness import sound
from checklist.checks.collectives.speed_judge import peers
from checklist.checks.gpu.gpus_judge import PCIE_REPLAYS_PER_MINUTE
from checklist.judging.comparison import compare
from checklist.judging.thresholds import Key, Span, Table, Threshold
from checklist.measurements import Counters, Measurements, Phase, Repeated
from checklist.verdict import judge
from tests.checklist.clusters import Cluster
from tests.checklist.runs import (
    codes,
    collective,
    cpu_run,
    gpu_run,
    mesh,
    opened,
    verdict_of,
    with_health,
    with_pairs,
    with_states,
)


def row(**changes: Any) -> Threshold:
    base = Threshold(
        system="H100",
        op="all_reduce",
        sizes=Span(),
        algorithm=None,
        gpus=Span(),
        nodes=Span(),
        floor=100.0,
        warn=110.0,
        unit="GB/s",
        kind="published",
        measured=None,
        source="test",
    )
    return dataclasses.replace(base, **changes)


def with_counted(minutes: float, **grown: Any) -> Measurements:
    """Return a run with this duration of load and these counters of GPU 0 grown from zero."""
    run = gpu_run(1)
    zeros = {name: dict.fromkeys(value, 0) if isinstance(value, dict) else 0 for name, value in grown.items()}
    states = {"before": zeros, "after": grown}
    health = [
        dataclasses.replace(state, **states[state.when])
        if state.rank == 0 and state.when in states
        else state
        for state in run.health
    ]
    load = Phase(name="node", status="done", seconds=60 * minutes)
    return dataclasses.replace(run, health=tuple(health), phases=(load,))


@pytest.mark.parametrize(
    ("value", "verdict"), [(95.0, "PASS"), (94.9, "WARN"), (90.0, "WARN"), (89.9, "FAIL"), (105.0, "PASS")]
)
def test_a_measurement_warns_below_95_and_fails_below_90_percent_of_the_peer_median(
    value: float, verdict: str
) -> None:
    assert peers([100.0, 100.0, value]) is None, "too few"
    assert peers([100.0, 100.0, 100.0, value]) == ["PASS", "PASS", "PASS", verdict]


def test_an_outlier_is_beyond_three_and_a_half_deviations() -> None:
    values = [100.0, 101.0, 99.0, 102.0, 98.0, 103.0, 97.0]  # median 100, MAD 2
    assert peers([*values, 100.0, 89.7])[-1:] == ["PASS"]  # type: ignore[index]  # z = -3.47
    assert peers([*values, 100.0, 89.5])[-1:] == ["FAIL"]  # type: ignore[index]  # z = -3.54
    assert peers([100.0, 80.0, 60.0, 90.0, 70.0]) == ["PASS"] * 5, "far below, but so is everybody"


@pytest.mark.parametrize(
    ("value", "verdict"), [(110.0, "PASS"), (109.9, "WARN"), (100.0, "WARN"), (99.9, "FAIL")]
)
def test_a_measurement_equal_to_its_minimum_passes(value: float, verdict: str) -> None:
    outcome = compare(value, row())
    assert (outcome.level, outcome.basis, outcome.expected) == (verdict, "floor", 100.0)


@pytest.mark.parametrize(
    ("span", "inside"),
    [(Span(low=2, high=4), (2, 3, 4)), (Span(low=4), (4, 5)), (Span(high=1), (0, 1)), (Span(), range(6))],
)
def test_a_span_includes_both_ends(span: Span, inside: range | tuple[int, ...]) -> None:
    assert [value for value in range(6) if value in span] == list(inside)
    assert span.bounded == (span != Span())


def test_the_most_specific_threshold_row_is_used() -> None:
    key = Key(systems=("p5.48xlarge", "H100"), op="all_reduce", bytes=2**30, algorithm="ring", nodes=2)
    rows = [
        row(source="GPU, large", sizes=Span(low=2**20)),
        row(source="GPU"),
        row(source="GPU, ring", algorithm="ring"),
        row(source="machine", system="P5.48xlarge"),
        row(source="own", own=True),
    ]
    order = ["own", "machine", "GPU, ring", "GPU, large", "GPU"]
    for dropped in range(len(order)):
        remaining = [each for each in rows if each.source in order[dropped:]]
        matching_row = Table(tuple(remaining)).find(key)
        assert matching_row.source == order[dropped]
    other_rows = ({"algorithm": "tree"}, {"nodes": Span(low=3)}, {"gpus": Span(low=8)}, {"op": "all_gather"})
    assert Table(tuple(row(**change) for change in other_rows)).find(key) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"temperature_c": 89.0}, {"hot": "WARN"}),
        ({"temperature_c": 88.9}, {"hotter": "WARN"}),
        ({"power_limit_w": 693.0}, {}),
        ({"power_limit_w": 692.9}, {"power-cap": "WARN"}),
        ({"pcie_generation": None}, {}),
    ],
)
def test_a_gpu_under_load_counts_as_throttled_only_beyond_its_limits(
    changes: dict[str, Any], expected: dict[str, str]
) -> None:
    assert codes(with_states(gpu_run(2), [3], "loaded", **changes)) == expected


@pytest.mark.parametrize(
    ("minutes", "replays", "expected"),
    [
        (0.1, PCIE_REPLAYS_PER_MINUTE, False),
        (0.1, PCIE_REPLAYS_PER_MINUTE + 1, True),
        (2.0, 2 * PCIE_REPLAYS_PER_MINUTE, False),
        (2.0, 2 * PCIE_REPLAYS_PER_MINUTE + 1, True),
    ],
)
def test_pcie_replays_are_judged_per_minute_over_at_least_one_minute(
    minutes: float, replays: int, expected: bool
) -> None:
    assert ("pcie-replays" in codes(with_counted(minutes, pcie_replays=replays))) == expected
    assert codes(with_health(gpu_run(), 9, pcie_replays=1000)) == {}, "unknown before the load"


@pytest.mark.parametrize(
    ("errors", "verdict"),
    [({"CRC": 6000}, "FAIL"), ({"CRC": 5999}, "WARN"), ({"replay": 1}, "FAIL"), ({"CRC": 0}, None)],
)
def test_nvlink_crc_errors_fail_at_100_per_second(errors: dict[str, int], verdict: str | None) -> None:
    assert codes(with_counted(1.0, nvlink_errors=errors)).get("nvlink-errors") == verdict


@pytest.mark.parametrize(("repetitions", "expected"), [(100, True), (99, False)])
def test_retransmissions_of_a_node_are_reported_from_one_percent(repetitions: int, expected: bool) -> None:
    counted = Counters(node=0, phase="world", tcp_segments=9_900, tcp_retransmitted=repetitions)
    findings = judge(cpu_run(2, counters=(counted,))).findings
    assert [(one.code, one.suspects) for one in findings] == [("loss-world", ("host-0",))] * expected


def test_pairs_without_segments_or_slow_messages_are_no_evidence_of_packet_loss() -> None:
    assert verdict_of(judge(cpu_run(4)), "loss") == "NO-VERDICT"
    slow = tuple(dataclasses.replace(pair, gbytes_per_s_p95=pair.gbytes_per_s) for pair in cpu_run(4).pairs)
    assert verdict_of(judge(cpu_run(4, pairs=slow)), "loss") == "PASS"


@pytest.mark.parametrize(
    ("nodes", "into", "accused"),
    [(4, (1, 2), [("host-1",), ("host-2",)]), (2, (0, 1), [(), ()]), (3, (0, 1, 2), [()])],
)
def test_ports_blocked_between_all_of_several_nodes_name_no_node(
    nodes: int, into: tuple[int, ...], accused: list[tuple[str, ...]]
) -> None:
    ways = opened(nodes)
    blocked = {(one.src, one.dst): one.tried[8:] for one in ways if one.dst in into}
    findings = judge(dataclasses.replace(gpu_run(nodes), open_ports=opened(nodes, blocked))).findings
    assert [fault.nodes for fault in findings if fault.check == "open-ports"] == accused


@pytest.mark.parametrize(("odd", "ranks"), [((1,), (1,)), ((0, 1), (0, 1, 2, 3))])
def test_only_a_majority_of_ranks_decides_which_result_is_right(
    odd: tuple[int, ...], ranks: tuple[int, ...]
) -> None:
    repeated = tuple(
        Repeated(rank=rank, whole=True, times=5, differing=0, digest="odd" if rank in odd else "usual")
        for rank in range(4)
    )
    findings = judge(dataclasses.replace(gpu_run(1, 4), repeated=repeated)).findings
    assert [fault.ranks for fault in findings if fault.check == "corruption"] == [ranks]


@pytest.mark.parametrize(
    ("size", "check", "other"), [(4096, "latency", "bandwidth"), (4097, "bandwidth", "latency")]
)
def test_a_message_of_4_kib_counts_for_latency_and_a_larger_one_for_bandwidth(
    size: int, check: str, other: str
) -> None:
    one = collective("all_reduce", size, 1e-3, 16, 2)
    result = judge(gpu_run(collectives=(one,)))
    checks = [result.check(name) for name in (check, other)]
    assert [each is not None and each.measured for each in checks] == [True, False]
    broken = dataclasses.replace(one, seconds_median=-1.0)
    (unsound,) = sound(gpu_run(collectives=(broken,))).unsound
    assert unsound.check == check


def test_the_mesh_reports_its_slowest_connection() -> None:
    probes = [dataclasses.replace(probe, seconds=0.1 * number) for number, probe in enumerate(mesh(3), 1)]
    probes[0] = dataclasses.replace(probes[0], seconds=None)
    check = judge(gpu_run(3, probes=tuple(probes))).check("mesh")
    assert [figure.value for figure in check.figures] == [pytest.approx(0.6)]


@pytest.mark.parametrize(("share", "crowded"), [(1.0, False), (0.81, False), (0.7, True)])
def test_paths_between_leaves_count_as_congested_below_the_limit(share: float, crowded: bool) -> None:
    leaves = tuple(
        dataclasses.replace(fact, network_nodes=("spine", f"leaf-{fact.node // 4}", fact.hostname))
        for fact in gpu_run(8).facts
    )
    cluster = Cluster(nodes=8, path=lambda src, dst: 45.0 * (1.0 if src // 4 == dst // 4 else share))
    run = with_pairs(dataclasses.replace(gpu_run(8), facts=leaves), cluster)
    findings = judge(run, thresholds=Table(())).findings
    crowding = [("crowded", "WARN", (), ())] if crowded else []
    assert [(one.code, one.verdict, one.nodes, one.suspects) for one in findings] == crowding
