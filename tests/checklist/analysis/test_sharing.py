"""Pairs that share an uplink, each of which is fast alone."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from checklist.analysis import sharing
from checklist.measurements import Pair
from checklist.round_robin import Pairs, schedule

Busy = Callable[[np.random.Generator], float]  # what other things leave of a pair that isn't alone
FREE: Busy = lambda noise: 1 - abs(noise.normal(0, 0.02))  # noqa: E731


def at_once(couples: Pairs, number: int, busy: Callable[[], float], uplink: float) -> list[Pair]:
    """Measure pairs of six nodes in both directions, three nodes on either side of a limited uplink."""
    crossing = Counter(a // 3 < b // 3 for a, b in couples)[True]
    pairs = []
    for way in (0, 1):
        for couple in couples:
            src, dst = couple[::-1] if way else couple
            share = min(1.0, uplink / crossing) if src // 3 != dst // 3 else 1.0
            pairs.append(Pair(src=src, dst=dst, round=number + way, gbytes_per_s=24.0 * share * busy()))
    return pairs


def run(uplink: float, busy: Busy = FREE, *, later: float | None = None, seed: int = 0) -> list[Pair]:
    """Return all measurements; ``later`` is the uplink rate when rounds are repeated."""
    noise = np.random.default_rng(seed)
    pairs = []
    for number, couples in enumerate(schedule(6)):
        pairs += at_once(couples, 2 * number, lambda: busy(noise), uplink)
    for number, pair in enumerate(tuple(pairs)):
        value = 24.0 * FREE(noise)
        pairs.append(dataclasses.replace(pair, gbytes_per_s=value, round=100 + number, alone=True))
    repeat = sharing.select_repeat(pairs)
    if repeat is None:
        return pairs
    number = 500
    for _ in range(sharing.REPEATS):
        for kind, couples in (("control", repeat.controls), ("shared", repeat.shared)):
            repetitions = at_once(couples, number, lambda: busy(noise), later or uplink)
            pairs += [dataclasses.replace(pair, repeat=kind) for pair in repetitions]  # type: ignore[arg-type]
            number += 2
    return pairs


@pytest.mark.parametrize("uplink", [1.0, 1.5, 2.0])
def test_pairs_that_share_an_uplink_are_named_with_the_bandwidth_left_to_each(uplink: float) -> None:
    shared = sharing.find(run(uplink))
    assert len(shared.links) == 6, "three couples, both ways"
    assert all(src // 3 != dst // 3 for src, dst in shared.links)
    assert shared.share == pytest.approx(uplink / 3, rel=0.1)


def test_a_full_speed_uplink_gives_no_finding_and_no_repetition() -> None:
    pairs = run(3.0)
    assert sharing.select_repeat(pairs) is None
    assert not any(pair.repeat for pair in pairs)
    assert sharing.find(pairs) is None


def test_a_slowdown_that_does_not_repeat_gives_no_finding() -> None:
    pairs = run(1.0, later=3.0)
    assert any(pair.repeat == "shared" for pair in pairs)
    assert sharing.find(pairs) is None


@pytest.mark.parametrize(("share", "repeated"), [(sharing.TAU, False), (0.99 * sharing.TAU, True)])
def test_two_slow_pairs_are_measured_again_and_a_single_one_is_not(share: float, repeated: bool) -> None:
    slow, well = ((0, 2), (1, 3)), ((0, 1), (2, 3))
    once = [Pair(src=src, dst=dst, round=0, gbytes_per_s=share) for src, dst in slow]
    once += [Pair(src=src, dst=dst, round=1, gbytes_per_s=sharing.TAU) for src, dst in well]
    alone = [dataclasses.replace(pair, round=9, gbytes_per_s=1.0, alone=True) for pair in once]
    assert sharing.select_repeat([*once, *alone]) == (sharing.Repeat(slow, well) if repeated else None)
    assert sharing.select_repeat([*once[1:], *alone]) is None


@pytest.mark.parametrize("slow", [0.1, 0.3, 0.5, 0.8])
def test_hosts_too_busy_for_many_pairs_at_once_give_no_finding(slow: float) -> None:
    """Simulate a machine under load: pairs not measured alone are slow at random."""

    def busy(noise: np.random.Generator) -> float:
        return 0.5 if noise.random() < slow else 1.0

    alarms = sum(sharing.find(run(3.0, busy, seed=seed)) is not None for seed in range(300))
    assert alarms <= 1
