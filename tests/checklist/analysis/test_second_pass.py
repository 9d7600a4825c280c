"""Second pass: slow nodes are named by group measurements, and congested groups name none."""

from __future__ import annotations

import dataclasses

import pytest

from checklist.analysis.second_pass import MAX_RERUNS, batches, measure_again
from checklist.measurements import Pair
from checklist.verdict import judge
from tests.checklist.clusters import Cluster, Measured, slow_nodes
from tests.checklist.runs import gpu_run

NIGHTLY = (pytest.mark.slow, pytest.mark.nightly)


@pytest.mark.parametrize("count", [*(pytest.param(count, marks=NIGHTLY) for count in (16, 32, 64)), 128])
def test_all_slow_nodes_among_a_thousand_are_named_within_the_time_limit(count: int) -> None:
    slow = slow_nodes(1024, count)
    measured = Measured(Cluster(nodes=1024, transmit=slow, receive=slow))
    diagnosis = measured.diagnosed()
    assert set(diagnosis.bad_nodes) == set(slow)
    assert not diagnosis.with_status("suspect")
    # Half an hour of the phase's hour, at 5.5 s for each round (benchmarks/diagnosis.py)
    assert measured.rounds <= 330


def test_a_suspect_that_was_not_measured_again_is_not_healthy() -> None:
    slow = slow_nodes(40, 3)
    cluster = Cluster(nodes=40, speed=45, transmit=slow)
    result = judge(dataclasses.replace(gpu_run(40), pairs=cluster.first_pass()))
    names = {f"host-{node}" for node in slow}
    assert result.bad_nodes == ()
    assert names.isdisjoint(result.healthy_nodes)


def test_nodes_behind_a_congested_uplink_are_not_named_as_slow() -> None:
    rack = range(64, 128)
    measured = Measured(Cluster(nodes=256), rack)
    repetitions = [(a, (a + 128) % 256) for a in rack for _ in (0, 1)]
    repetitions = list(dict.fromkeys([*repetitions, *((b, a) for a, b in repetitions)]))
    assert len(repetitions) > MAX_RERUNS
    assert measure_again(repetitions, 256, measured.alone, measured.group, measured.accept)
    alone: list[Pair] = [pair for pair in measured.pairs if pair.alone]
    assert 0 < len(alone) <= MAX_RERUNS + 1, "the groups don't count, so pairs were measured one at a time"
    assert all((pair.gbytes_per_s or 0) > 23 for pair in alone)


def test_a_few_suspects_are_measured_one_at_a_time() -> None:
    measured = Measured(Cluster(nodes=64, transmit={5: 0.5}))
    assert measured.diagnosed().bad_nodes == (5,)
    assert not any(pair.repeat for pair in measured.pairs)


def test_the_second_pass_ends_at_the_time_limit_of_the_phase() -> None:
    many = [(a, b) for a in range(20) for b in range(20, 40)]
    nothing: dict[tuple[int, int], float] = {}
    for pairs in (many, many[:3]):
        assert not measure_again(pairs, 40, nothing.get, lambda _: nothing, nothing.fromkeys)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_each_batch_has_a_node_once_and_each_pair_appears_once(size: int) -> None:
    pairs = [(a, b) for a in range(6) for b in range(12) if a != b]
    packed = batches(pairs, size)
    assert sorted(pair for batch in packed for pair in batch) == sorted(pairs)
    for batch in packed:
        assert len(batch) <= size
        assert len({node for pair in batch for node in pair}) == 2 * len(batch)
