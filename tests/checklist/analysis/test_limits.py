"""Limits of the analyses at their boundaries: the limit itself, and the value next to it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from checklist.analysis import packet_loss, recurrence, sharing
from checklist.analysis.baseline import (
    DAY_S,
    LEAST,
    MAX_RUNS,
    OWN_PAST,
    STEADY_NIGHTS,
    Record,
    Setting,
    baseline,
    compare_with_past,
    worse_parts,
)
from checklist.analysis.busbw import LARGE_BYTES, SMALL_BYTES, fit
from checklist.analysis.ceilings import Ceilings
from checklist.analysis.diagnosis import diagnose, without_lost
from checklist.analysis.packet_loss import Loss
from checklist.analysis.paths import Paths
from checklist.analysis.recurrence import WITHIN_DAYS, Sightings
from checklist.analysis.screening import slow_pairs
from checklist.analysis.second_pass import MAX_RERUNS, RERUNS, RERUNS_ABOVE, Alone, best_of
from checklist.analysis.soundness import why_impossible
from checklist.measurements import Pair
from checklist.round_robin import ALL_PAIRS_UP_TO
from tests.checklist.clusters import Cluster

SETTING = Setting(hardware="8x H100", driver="570", library="nccl 2.27", image=None, nodes=2, ranks=16)


def pair(src: int = 0, dst: int = 1, value: float | None = 1.0, number: int = 0, **changes: Any) -> Pair:
    return Pair(src=src, dst=dst, round=number, gbytes_per_s=value, **changes)


def record(value: float, unix: float, verdict: Any = "PASS", **changes: Any) -> Record:
    return Record(
        unix=unix, verdict=verdict, setting=SETTING, op="x", bytes=None, value=value, unit="GB/s", **changes
    )


def records(*values: float) -> list[Record]:
    return [record(value, day * DAY_S) for day, value in enumerate(values)]


@pytest.mark.parametrize(
    ("segments", "repetitions", "is_lost"),
    [(5_000, 10, True), (5_000, 9, False), (100, 5, True), (100, 4, False)],
)
def test_packet_loss_needs_a_minimum_rate_and_five_retransmitted_segments(
    segments: int, repetitions: int, is_lost: bool
) -> None:
    assert bool(packet_loss.find([pair(segments=segments, retransmitted=repetitions)])) == is_lost


def test_without_socket_counters_messages_below_half_the_best_rate_count_as_slow() -> None:
    assert packet_loss.find([pair(gbytes_per_s_p95=0.5)]) == ()
    (loss,) = packet_loss.find([pair(gbytes_per_s_p95=0.49)])
    assert (loss.kind, loss.rate) == ("link", 0.0)


def test_a_stall_is_below_a_tenth_of_the_best_rate_and_as_long_as_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = 1 << 28
    assert packet_loss.stall(pair(value=2.0, gbytes_per_s_p95=0.2, bytes=size)) == 0
    stalled = pair(value=2.0, gbytes_per_s_p95=0.125, bytes=size)
    held = packet_loss.stall(stalled)
    assert held == pytest.approx(size / 1e9 * (8 - 0.5))
    for limit, expected in ((held, held), (math.nextafter(held, 9), 0.0)):
        monkeypatch.setattr(packet_loss, "STALL_S", limit)
        assert packet_loss.stall(stalled) == expected


@pytest.mark.parametrize(
    ("rate", "stall_s", "alone", "lasts", "comes_and_goes"),
    [
        (0.01, 1.0, True, True, False),
        (0.0099, 1.0, True, False, True),
        (0.0099, 0.0, True, True, False),
        (0.01, 0.0, False, False, True),
        (0.0099, 0.0, False, False, False),
        (0.01, 0.0, None, False, False),
    ],
)
def test_an_isolated_measurement_decides_whether_packet_loss_is_lasting_or_intermittent(
    rate: float, stall_s: float, alone: bool | None, lasts: bool, comes_and_goes: bool
) -> None:
    loss = Loss(kind="link", pairs=((0, 1),), node=None, rate=rate, alone=alone, stall_s=stall_s)
    assert (loss.lasts, loss.comes_and_goes) == (lasts, comes_and_goes)


@pytest.mark.parametrize(("nodes", "kinds"), [(4, ["transmit"]), (5, ["link", "link"])])
def test_loss_on_two_thirds_of_the_pairs_of_a_node_is_attributed_to_the_node(
    nodes: int, kinds: list[str]
) -> None:
    bad = {(0, 1), (0, 2)}
    measured = [
        pair(a, b, segments=1000, retransmitted=50 * ((a, b) in bad))
        for a in range(nodes)
        for b in range(nodes)
        if a != b
    ]
    assert [loss.kind for loss in packet_loss.find(measured)] == kinds


def test_sightings_count_for_fourteen_days_and_not_if_dated_in_the_future() -> None:
    now = 100 * DAY_S
    ages = (0.0, 1.0, WITHIN_DAYS * DAY_S - 1, WITHIN_DAYS * DAY_S, -1.0)
    looks = [Sightings(unix=now - age, nodes=("a",)) for age in ages]
    assert recurrence.recent(looks, now) == tuple(looks[:3])


def test_a_pair_needs_more_isolated_measurements_in_a_large_run() -> None:
    assert Alone([], ALL_PAIRS_UP_TO).enough == RERUNS
    assert Alone([], ALL_PAIRS_UP_TO + 1).enough == RERUNS_ABOVE
    twice = Alone([pair(), pair(), pair(1, 0)], 4)
    assert twice.settled([(0, 1), (1, 0)], 1)
    assert not twice.settled([(0, 1), (1, 0)], 2)


def test_the_best_measurement_of_a_pair_keeps_its_first_round() -> None:
    measured = [pair(number=1), pair(value=2.0, number=2), pair(value=2.0, number=3), pair(value=None)]
    assert best_of(measured) == {(0, 1): (2.0, 2)}


def test_pairs_that_failed_in_the_round_of_a_lost_node_are_ignored() -> None:
    kept_pairs = [pair(0, 1, None, 2, error="reset"), pair(1, 3, 5.0, 1), pair(0, 2, 5.0, 1)]
    lost = [pair(0, 3, None, 1, error="lost"), pair(1, 2, None, 1, error="reset")]
    assert without_lost([*kept_pairs, *lost], [3]) == tuple(kept_pairs)


def test_a_suspect_node_is_measured_again_before_a_slower_link() -> None:
    cluster = Cluster(nodes=8, transmit={1: 0.5}, receive={1: 0.5}, links={(3, 4): 0.1, (4, 3): 0.1})
    second_pass = diagnose(cluster.first_pass(), 8).again
    assert len(second_pass) <= MAX_RERUNS
    assert next(n for n, ends in enumerate(second_pass) if 1 in ends) < second_pass.index((3, 4))


def test_a_class_of_paths_names_its_node_kinds_in_both_directions() -> None:
    paths = Paths(kinds=(0, 0, 1, 1), leaves=(-1,) * 4, domains=(-1,) * 4, names=("A100", "H100"))
    src, dst = np.array([0, 2, 1, 2]), np.array([1, 3, 2, 1])
    numbers = paths.classes(src, dst).tolist()
    assert numbers[2] == numbers[3]
    assert [paths.one_kind(number) for number in numbers] == [True, True, False, False]
    assert [paths.describe(number).partition(", ")[2] for number in numbers[:3]] == [
        "A100",
        "H100",
        "A100 and H100",
    ]


def test_screening_suspects_pairs_below_87_percent_of_both_nodes() -> None:
    rate = np.full((8, 8), 100.0)
    np.fill_diagonal(rate, np.nan)
    rate[0, 1], rate[2, 3], rate[4, 5] = 87.0, 86.9, 50.0
    assert slow_pairs(rate) == [(4, 5), (2, 3)]


@pytest.mark.parametrize(
    ("value", "verdict"), [(95.0, "PASS"), (94.9, "WARN"), (90.0, "WARN"), (89.9, "FAIL"), (110.0, "PASS")]
)
def test_exactly_five_and_ten_percent_below_the_baseline_are_within_the_limits(
    value: float, verdict: str
) -> None:
    past = compare_with_past(records(*[100.0] * LEAST), SETTING, "x", None, value)
    assert (past.verdict, past.runs) == (verdict, LEAST)
    assert past.change == pytest.approx(value / 100 - 1)


def test_a_baseline_needs_three_runs_and_keeps_the_first_ten() -> None:
    assert compare_with_past(records(*[100.0] * (LEAST - 1)), SETTING, "x", None, 1.0) is None
    level_found = baseline(records(*[100.0 + n for n in range(MAX_RUNS)], 50.0))
    assert level_found.values == tuple(100.0 + n for n in range(MAX_RUNS))


@pytest.mark.parametrize(
    ("level", "moved"),
    [
        ((94.0,) * STEADY_NIGHTS, True),
        ((95.1,) * STEADY_NIGHTS, False),
        ((94.0,) * (STEADY_NIGHTS - 1), False),
    ],
)
def test_a_new_baseline_needs_five_nights_at_the_warning_level(level: tuple[float, ...], moved: bool) -> None:
    level_found = baseline(records(*[100.0] * MAX_RUNS, *level))
    assert (level_found.median, level_found.before) == (
        level[0] if moved else 100.0,
        100.0 if moved else None,
    )


@pytest.mark.parametrize(("last", "moved"), [(50.98, True), (51.02, False)])
def test_a_new_baseline_needs_nights_within_two_percent(last: float, moved: bool) -> None:
    level_found = baseline(records(*[100.0] * MAX_RUNS, 50.0, 50.5, 50.5, 50.5, last))
    assert (level_found.median == 50.5) == moved


@pytest.mark.parametrize(("value", "names"), [(95.0, set()), (94.9, {"a"})])
def test_a_gpu_or_node_is_worse_below_95_percent_of_its_own_history(value: float, names: set[str]) -> None:
    past = [record(100.0, day * DAY_S, parts={"a": 100.0, "b": 100.0}) for day in range(LEAST)]
    assert set(worse_parts(past, {"a": value, "b": 100.0}, OWN_PAST)) == names
    assert worse_parts(past, {"a": 50.0}, OWN_PAST) == {}, "more than half of the parts"


def test_a_shared_uplink_needs_two_pairs_slow_in_both_repeats_and_healthy_controls() -> None:
    links = [(0, 1), (2, 3)]
    alone = [pair(*link, 10.0, alone=True) for link in [*links, (4, 5)]]

    def repeated(first: float, second: float, control: float = 8.0) -> list[Pair]:
        shared = [
            pair(*link, value, 10 + time, repeat="shared")
            for time in range(2)
            for link, value in zip(links, (first, second), strict=True)
        ]
        return [*alone, *shared, pair(4, 5, control, 20, repeat="control")]

    sharing_found = sharing.find(repeated(7.9, 5.9))
    assert (sharing_found.links, sharing_found.share) == (tuple(links), pytest.approx(0.69))
    assert sharing.find(repeated(7.9, 8.0)) is None
    assert sharing.find(repeated(7.9, 5.9, control=7.9)) is None
    assert sharing.find([one for one in repeated(7.9, 5.9) if one.round != 11]) is None


def test_the_boundary_sizes_of_a_fit_count_as_small_and_large() -> None:
    points = [(SMALL_BYTES, 1.0), (SMALL_BYTES + 1, 9.0), (LARGE_BYTES - 1, 5.0)]
    fitted = fit([*points, (LARGE_BYTES, 2.0), (2 * LARGE_BYTES, 3.0)])
    assert (fitted.alpha_s, fitted.beta_from_bytes) == (1.0, LARGE_BYTES)
    assert fitted.beta_gbytes_per_s == pytest.approx(LARGE_BYTES / 1e9)
    assert fitted.seconds(LARGE_BYTES) == pytest.approx(2.0)


def test_a_measurement_may_reach_its_ceiling_and_a_duration_may_not_be_zero() -> None:
    ceilings = Ceilings(gpus={0: "NVIDIA H100 80GB HBM3"}, lines={0: 50.0, 1: 25.0})
    ceiling = ceilings.pair(0, 1)
    assert ceiling.value == 100.0
    assert [why_impossible(value, "GB/s", ceiling) is None for value in (100.0, 100.1, 0.0, math.nan)] == [
        True,
        False,
        False,
        False,
    ]
    assert [why_impossible(value) for value in (0.0, -1.0, 1e-9, None)] == [
        "no time at all",
        "negative",
        None,
        None,
    ]
    copies = ceilings.local(0, "hbm_copy")
    assert copies.value == pytest.approx(1.5 * 3350, rel=0.01)
