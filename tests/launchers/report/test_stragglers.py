"""Who holds a training up, from crafted paces."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from launchers.report.stragglers import Stragglers, describe, late_lines
from launchers.report.telemetry import Pace, Straggling

SOON = 20  # steps within which a straggler is named


def paces(step: int, own: dict[int, float], per_node: int, noise: float = 0.0) -> list[Pace]:
    """One synchronous step: each rank works ``own`` seconds and waits for the slowest."""
    spent = {rank: seconds * random.lognormvariate(0, noise) for rank, seconds in own.items()}
    took = max(spent.values()) + 0.01
    return [
        Pace(
            rank=rank,
            local_rank=rank % per_node,
            node=rank // per_node,
            host=f"h{rank // per_node}",
            step=step,
            dt=took,
            in_collectives=took - seconds,
        )
        for rank, seconds in spent.items()
    ]


def follow(
    count: int, per_node: int, own: Callable[[int, int], float], *, steps: int, noise: float = 0.0
) -> list[Straggling]:
    """What is said over a training whose rank works ``own(rank, step)`` seconds."""
    random.seed(7)
    watch, said = Stragglers(count, per_node), []
    for step in range(1, steps + 1):
        of_step = paces(step, {rank: own(rank, step) for rank in range(count)}, per_node, noise)
        random.shuffle(of_step)
        said += [each for pace in of_step for each in watch.add(pace)]
    return said


@pytest.mark.parametrize("count", [2, 3, 16])
def test_the_rank_that_the_others_wait_for_is_named_soon(count: int) -> None:
    said = follow(count, 1, lambda rank, _: 1.3 if rank == 1 else 1.0, steps=SOON, noise=0.02)
    assert [(each.rank, each.host, each.over) for each in said] == [(1, "h1", False)]
    assert said[0].step <= SOON
    assert said[0].share == pytest.approx(0.3 / 1.31, abs=0.05)


def test_one_gpu_of_a_node_is_named_and_of_a_late_node_the_node() -> None:
    gpu = follow(16, 8, lambda rank, _: 1.5 if rank == 11 else 1.0, steps=SOON)
    assert late_lines(gpu, on_gpus=True) == [
        "rank 11 (GPU 3 of node 1, h1) is late: it delays the others by 33% of each step since step 3"
    ]
    node = follow(16, 8, lambda rank, _: 1.5 if rank >= 8 else 1.0, steps=SOON)
    assert late_lines(node, on_gpus=True) == [
        "node 1 (h1) is late: it delays the others by 33% of each step since step 3"
    ]


def test_noise_and_ranks_that_are_late_in_turn_name_nobody() -> None:
    assert follow(2, 1, lambda *_: 1.0, steps=2000, noise=0.3) == []
    assert follow(64, 8, lambda *_: 1.0, steps=300, noise=0.1) == []
    assert follow(4, 1, lambda rank, step: 3.0 if step % 4 == rank else 1.0, steps=400) == []


def test_one_long_step_names_nobody() -> None:
    def own(rank: int, step: int) -> float:
        return 600.0 if (rank, step) == (1, 9) else 1.0

    assert follow(4, 2, own, steps=60) == []


def test_many_short_steps_are_not_enough() -> None:
    def own(rank: int, step: int) -> float:
        return 0.03 if rank == 1 and step < 100 else 0.01  # 3 s of it

    assert follow(2, 1, own, steps=100) == []


def test_more_than_half_late_is_nobody_and_who_comes_back_is_told() -> None:
    assert follow(8, 2, lambda rank, _: 1.5 if rank < 5 else 1.0, steps=60) == []

    def own(rank: int, step: int) -> float:
        return 1.5 if rank == 2 and step < 40 else 1.0

    first, last = follow(4, 1, own, steps=80)
    assert (first.rank, first.over, last.rank, last.over) == (2, False, 2, True)
    assert "on time again" in describe(last, on_gpus=False)
    assert 40 <= last.step <= 40 + SOON


def test_a_step_that_a_rank_never_tells_is_forgotten() -> None:
    watch = Stragglers(2, 1)
    for step in range(1, 1000):
        of_step = paces(step, {0: 1.0, 1: 1.0}, 1)
        for pace in of_step[: 1 if step % 2 else 2]:
            watch.add(pace)
    assert len(watch._steps) <= 1
