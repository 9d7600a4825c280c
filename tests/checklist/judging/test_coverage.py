"""Coverage of measurements: too few give no verdict, and unmeasured faults stay open."""

from __future__ import annotations

import dataclasses

import pytest

from checklist import past_runs
from checklist.analysis.baseline import DAY_S
from checklist.measurements import Hang, Measurements, Pair
from checklist.past_runs import run_of
from checklist.result import Result
from checklist.verdict import judge
from tests.checklist.clusters import Cluster
from tests.checklist.runs import cpu_run, gpu_run, verdict_of, with_pairs, with_share


def without_ranks(run: Measurements, *ranks: int) -> Measurements:
    """Remove the matrix products of these ranks."""
    remaining = tuple(x for x in run.locals if x.what != "gemm_bf16" or x.rank not in ranks)
    return dataclasses.replace(run, locals=remaining)


def without_pairs(run: Measurements, *links: tuple[int, int]) -> Measurements:
    remaining = tuple(p for p in run.pairs if (min(p.src, p.dst), max(p.src, p.dst)) not in links)
    return dataclasses.replace(run, pairs=remaining)


def only_pair(run: Measurements, a: int, b: int) -> Measurements:
    return dataclasses.replace(run, pairs=tuple(p for p in run.pairs if {p.src, p.dst} == {a, b}))


def reason(result: Result, check: str) -> str:
    check_result = result.check(check)
    return check_result.reason


def open_after(*runs: Result) -> list[tuple[str, tuple[str, ...]]]:
    return [(item.check, item.nodes) for item in past_runs.fold(map(run_of, runs)).open_failures]


def test_one_measured_rank_of_32_gives_no_verdict_and_covers_only_its_node() -> None:
    result = judge(without_ranks(gpu_run(4), *range(1, 32)))
    assert (result.verdict, verdict_of(result, "gemm")) == ("NO-VERDICT", "NO-VERDICT")
    assert reason(result, "gemm") == "Too little was measured: 1 of 32 GPUs."
    assert result.healthy_nodes == ()


def test_a_few_missing_measurements_are_reported_and_their_nodes_not_healthy() -> None:
    result = judge(without_ranks(gpu_run(4), 9, 10))
    assert (result.verdict, verdict_of(result, "gemm")) == ("PASS", "PASS")
    assert reason(result, "gemm").endswith("as expected. Measured: 30 of 32 GPUs.")
    assert result.healthy_nodes == ("host-0", "host-2", "host-3")


def test_a_pair_with_a_missing_direction_counts_as_missing() -> None:
    run = cpu_run(4)
    one_way = dataclasses.replace(run, pairs=tuple(p for p in run.pairs if (p.src, p.dst) != (2, 3)))
    assert reason(judge(one_way), "pairs") == "Too little was measured: 5 of 6 pairs."


def test_pairs_whose_segments_were_not_counted_are_missing_in_the_check_of_packet_loss() -> None:
    run = cpu_run(4)
    counted = {"segments": 1000, "retransmitted": 0}
    pairs = tuple(p if {p.src, p.dst} == {0, 1} else dataclasses.replace(p, **counted) for p in run.pairs)
    result = judge(dataclasses.replace(run, pairs=pairs))
    assert reason(result, "loss") == "Too little was measured: 5 of 6 pairs."


def test_above_32_nodes_the_scheduled_rounds_suffice_and_unmeasured_pairs_are_listed_with_age() -> None:
    first = judge(cpu_run(40))
    assert (first.verdict, verdict_of(first, "pairs")) == ("PASS", "PASS")
    assert reason(first, "pairs").endswith("Measured: 320 of 780 pairs.")

    measured_pairs = tuple(
        Pair(src=a, dst=b, round=0, gbytes_per_s=45.0) for a in (0, 1) for b in (2, 3, 4, 5)
    )
    other = (
        *measured_pairs,
        *(dataclasses.replace(p, src=p.dst, dst=p.src) for p in measured_pairs),
        *cpu_run(40).pairs,
    )
    past = past_runs.fold([run_of(judge(cpu_run(40, pairs=other))), run_of(first)])
    later = judge(cpu_run(40, started_unix=1_000 + 3 * DAY_S), pairs_seen=past.pairs_seen)
    unseen = len(past.pairs_seen) - 320
    assert unseen > 0
    expected_reason = f"320 of 780 pairs; {unseen} of the others up to 3 days ago, the rest never."
    assert reason(later, "pairs").endswith(expected_reason)


LINK = Cluster(nodes=6, speed=45, links={(1, 4): 0.3, (4, 1): 0.3})
SICK = judge(with_pairs(cpu_run(6), LINK))


def test_a_slow_link_is_cleared_only_by_a_run_that_measured_the_pair() -> None:
    assert [(item.nodes, item.links) for item in SICK.open_failures()] == [
        (("host-1", "host-4"), (("host-1", "host-4"),))
    ]
    blind = judge(without_pairs(cpu_run(6), (1, 4)), open_failures=SICK.open_failures())
    assert (verdict_of(blind, "pairs"), blind.verdict) == ("PASS", "FAIL")
    assert blind.open_failures() == SICK.open_failures()
    seeing = judge(cpu_run(6), open_failures=SICK.open_failures())
    assert (seeing.verdict, seeing.open_failures()) == ("PASS", ())


def test_failures_of_stored_runs_are_cleared_in_the_same_way() -> None:
    blind = judge(without_pairs(cpu_run(6, started_unix=2_000), (1, 4)))
    assert open_after(SICK, blind) == [("pairs", ("host-1", "host-4"))]
    assert open_after(SICK, blind, judge(cpu_run(6, started_unix=3_000))) == []


def test_a_recovered_node_is_cleared_even_if_another_node_fails_the_check() -> None:
    def slow(node: int, at: float) -> Result:
        run = gpu_run(6, started_unix=at)
        return judge(with_pairs(run, Cluster(nodes=6, speed=45, transmit={node: 0.3}, receive={node: 0.3})))

    assert open_after(slow(2, 1_000), slow(4, 2_000)) == [("pairs", ("host-4",))]


def slow_gpu(gpus: int = 8, **changes: object) -> Measurements:
    return with_share(gpu_run(2, gpus, **changes), 0.8, [3], "gemm_bf16")


def with_gpu(run: Measurements, rank: int, uuid: str) -> Measurements:
    """Return the run with another GPU for a rank."""
    old = run.facts[rank].gpu_uuids[run.facts[rank].local_rank]
    reported = tuple(
        dataclasses.replace(fact, gpu_uuids=tuple(uuid if one == old else one for one in fact.gpu_uuids))
        for fact in run.facts
    )
    return dataclasses.replace(run, facts=reported)


def test_a_gpu_is_cleared_by_its_own_pass_or_replacement_and_not_by_other_gpus_of_its_node() -> None:
    sick = judge(slow_gpu())
    (item,) = sick.open_failures()
    assert (item.nodes, item.gpus, item.over_gpus) == (("host-0",), ("GPU-0-3",), 8)

    open_failures = sick.open_failures()
    without = judge(without_ranks(gpu_run(2), 3), open_failures=open_failures)
    assert (verdict_of(without, "gemm"), without.bad_nodes) == ("PASS", ("host-0",))
    half = gpu_run(2, 4)
    other_gpu = with_gpu(half, 3, "GPU-0-7")
    assert judge(other_gpu, open_failures=open_failures).bad_nodes == ("host-0",), (
        "four of eight, without that one"
    )
    assert judge(gpu_run(2), open_failures=open_failures).open_failures() == ()
    assert judge(with_gpu(gpu_run(2), 3, "GPU-new"), open_failures=open_failures).open_failures() == ()


@pytest.mark.parametrize("check", ["pairs", "gemm"])
def test_a_pass_with_too_few_measurements_clears_no_failure(check: str) -> None:
    slow_node = with_pairs(gpu_run(4), Cluster(nodes=4, transmit={0: 0.25}, receive={0: 0.25}))
    open_failures = judge(slow_node if check == "pairs" else slow_gpu()).open_failures()
    little = gpu_run(4)
    little = only_pair(little, 0, 1) if check == "pairs" else without_ranks(little, *range(8, 32))
    assert judge(little, open_failures=open_failures).open_failures() == open_failures


def test_an_open_failure_stored_by_an_earlier_version_is_read_and_cleared_by_a_pass() -> None:
    old = [
        dataclasses.replace(item, links=(), gpus=(), over_gpus=0, seen_unix=0.0)
        for item in judge(slow_gpu()).open_failures()
    ]
    assert judge(gpu_run(2), open_failures=old).open_failures() == ()


def test_a_hang_stays_open_if_another_hang_cut_its_phase_short() -> None:
    def hang(rank: int) -> Measurements:
        stuck = Hang(rank=rank, node=rank // 8, phase="pairs", op="send_recv", sequence=3, waited_s=30)
        return dataclasses.replace(gpu_run(4), hangs=(stuck,))

    open_failures = judge(hang(9)).open_failures()
    repetitions = judge(hang(17), open_failures=open_failures)
    assert repetitions.bad_nodes == ("host-2",), "every phase ran to its end with host-1"
    cut = dataclasses.replace(hang(17), phases=gpu_run(4).phases[:2])
    assert judge(cut, open_failures=open_failures).bad_nodes == ("host-1", "host-2")


def test_a_hang_is_cleared_by_a_profile_without_the_dcgm_diagnostic() -> None:
    stuck = Hang(rank=9, node=1, phase="pairs", op="send_recv", sequence=3, waited_s=30)
    deep = dataclasses.replace(gpu_run(), profile="deep", hangs=(stuck,))
    assert judge(gpu_run(), open_failures=judge(deep).open_failures()).bad_nodes == ()
