"""Detection of stragglers, from simulated step times."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from launchers.report.stragglers import MIN_STEPS, WARM_UP, Stragglers, describe, lags, late_lines
from launchers.report.telemetry import StepTiming, Straggling

SOON = 20  # steps within which a straggler is named


def pace(rank: int, step: int, in_collectives: float, dt: float = 1.0, per_node: int = 2) -> StepTiming:
    node, times = rank // per_node, {"dt": dt, "in_collectives": in_collectives}
    return StepTiming(rank=rank, local_rank=rank % per_node, node=node, host=f"h{node}", step=step, **times)


def paces(step: int, base_paces: dict[int, float], per_node: int, noise: float = 0.0) -> list[StepTiming]:
    """Simulate one synchronous step: each rank works its seconds and waits for the slowest."""
    spent = {rank: seconds * random.lognormvariate(0, noise) for rank, seconds in base_paces.items()}
    took = max(spent.values()) + 0.01
    return [pace(rank, step, took - seconds, took, per_node) for rank, seconds in spent.items()]


def follow(
    count: int, per_node: int, node_pace: Callable[[int, int], float], *, steps: int, noise: float = 0.0
) -> list[Straggling]:
    """Return the events of a run in which each rank works the seconds of a function of rank and step."""
    random.seed(7)
    watch, events = Stragglers(count, per_node), []
    for step in range(1, steps + 1):
        of_step = paces(step, {rank: node_pace(rank, step) for rank in range(count)}, per_node, noise)
        random.shuffle(of_step)
        events += [each for pace in of_step for each in watch.add(pace)]
    return events


@pytest.mark.parametrize("count", [2, 16])
def test_a_straggler_is_named_within_a_few_steps(count: int) -> None:
    events = follow(count, 1, lambda rank, _: 1.3 if rank == 1 else 1.0, steps=SOON, noise=0.02)
    assert [(each.rank, each.host, each.over) for each in events] == [(1, "h1", False)]
    assert events[0].step <= SOON
    assert events[0].share == pytest.approx(0.3 / 1.31, abs=0.05)


def test_a_late_gpu_is_named_and_a_node_with_all_ranks_late_is_named_as_a_node() -> None:
    gpu = follow(16, 8, lambda rank, _: 1.5 if rank == 11 else 1.0, steps=SOON)
    assert late_lines(gpu, on_gpus=True) == [
        "rank 11 (GPU 3 of node 1, h1) is late: it delays the others by 33% of each step since step 3"
    ]
    node = follow(16, 8, lambda rank, _: 1.5 if rank >= 8 else 1.0, steps=SOON)
    assert late_lines(node, on_gpus=True) == [
        "node 1 (h1) is late: it delays the others by 33% of each step since step 3"
    ]


def test_noise_single_long_steps_and_alternating_ranks_report_no_straggler() -> None:
    assert follow(4, 2, lambda rank, step: 600.0 if (rank, step) == (1, 9) else 1.0, steps=60) == []
    assert follow(2, 1, lambda *_: 1.0, steps=2000, noise=0.3) == []
    assert follow(64, 8, lambda *_: 1.0, steps=300, noise=0.1) == []
    assert follow(4, 1, lambda rank, step: 3.0 if step % 4 == rank else 1.0, steps=400) == []


def test_no_straggler_is_named_if_more_than_half_are_late_and_a_recovery_is_reported() -> None:
    assert follow(8, 2, lambda rank, _: 1.5 if rank < 5 else 1.0, steps=60) == []

    def node_pace(rank: int, step: int) -> float:
        return 1.5 if rank == 2 and step < 40 else 1.0

    first, last = follow(4, 1, node_pace, steps=80)
    assert (first.rank, first.over, last.rank, last.over) == (2, False, 2, True)
    assert "on time again" in describe(last, on_gpus=False)
    assert 40 <= last.step <= 40 + SOON


def test_a_step_that_one_rank_never_reports_is_discarded() -> None:
    watch = Stragglers(2, 1)
    for step in range(1, 1000):
        of_step = paces(step, {0: 1.0, 1: 1.0}, 1)
        for pace in of_step[: 1 if step % 2 else 2]:
            watch.add(pace)
    assert len(watch._steps) <= 1


NAMED_AT = WARM_UP + MIN_STEPS


def lagging(lag_of_steps: Sequence[float], dt: float = 1.0) -> list[Straggling]:
    """Return the events of two ranks, the first of which lags by these shares of its steps."""
    watch, events = Stragglers(2, 2), []
    for step, lag in enumerate([0.0] * WARM_UP + list(lag_of_steps), 1):
        events += watch.add(pace(0, step, 0.0, dt))
        events += watch.add(pace(1, step, lag * dt, dt))
    return events


@pytest.mark.parametrize(
    ("lag_of_steps", "named"),
    [
        ([0.1] * MIN_STEPS, False),  # late is above a tenth of the step
        ([0.101] * MIN_STEPS, True),
        ([0.5] * 13 + [0.0] * 3, True),  # in four fifths of the steps
        ([0.5] * 12 + [0.0] * 4, False),
        ([0.11, 9.0] * (MIN_STEPS // 2), False),  # the lags scatter too much
    ],
)
def test_a_rank_is_late_only_above_the_limits(lag_of_steps: list[float], named: bool) -> None:
    assert [each.rank for each in lagging(lag_of_steps)] == [0] * named


@pytest.mark.parametrize(("dt", "step"), [(1.0, NAMED_AT), (0.3125, NAMED_AT), (0.3, NAMED_AT + 1)])
def test_a_straggler_is_named_after_sixteen_steps_and_five_seconds(dt: float, step: int) -> None:
    (named,) = lagging([0.5] * (MIN_STEPS + 1), dt)
    assert (named.step, named.since) == (step, WARM_UP + 1)
    assert named.share == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("lag", "steps", "over"), [(0.05, 8, [False, True]), (0.051, 8, [False]), (0.05, 7, [False])]
)
def test_a_rank_has_recovered_when_half_of_its_steps_are_on_time(
    lag: float, steps: int, over: list[bool]
) -> None:
    assert [each.over for each in lagging([0.5] * MIN_STEPS + [lag] * steps)] == over


def test_a_lag_is_the_distance_to_the_median_of_the_other_ranks() -> None:
    four = {rank: pace(rank, 1, stood, dt=2.0) for rank, stood in enumerate((0.0, 0.4, 0.6, 1.0))}
    assert lags(four) == pytest.approx({0: 0.3, 1: 0.1, 2: -0.1, 3: -0.3})
    three = {rank: pace(rank, 1, stood) for rank, stood in enumerate((0.0, 0.4, 0.6))}
    assert lags(three) == pytest.approx({0: 0.5, 1: -0.1, 2: -0.4})
    assert lags({0: pace(0, 1, 0.0, dt=0.0), 1: pace(1, 1, 1.0, dt=0.0)}) == {0: 0.0, 1: 0.0}
