"""Goals, bands, interruptions and spreads at their edges, without planning a catalogue."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from estimator import Job, Target, UserError, hardware, memory
from estimator.engines import varlen
from estimator.engines.setups import setup_of
from estimator.hardware.cluster import Cluster
from estimator.inference.generation import Sampling, _batches, _can_share, _with_gpus
from estimator.models import find
from estimator.plan import GIB, MIB, Interruptions, Layout, StartUp
from estimator.planning.candidates import TIE_MARGIN, Candidate, Shortage, percent
from estimator.planning.goals import Goals
from estimator.planning.interruption_rates import Rate
from estimator.planning.interruptions import (
    completion_obstacle,
    completion_probability,
    expected,
    predict_interruptions,
    wall_hours,
)
from estimator.planning.ladders import LARGEST_MICRO_BATCH, LARGEST_PIPELINE_MICRO_BATCH, Ladders
from estimator.planning.parallelism import SHORTEST_PIECE, Spread, spreads
from estimator.planning.places import Place
from estimator.planning.ranking import (
    compare_prices,
    compare_speeds,
    format_change,
    later_ranked,
    rejection_by_goals,
    sort_candidates,
)
from estimator.planning.reasons import compare_to_best
from estimator.planning.start_up import rates_of, start_up
from estimator.planning.step_requests import MEMORY_OUTSIDE_RANKS, SHARED_MEMORY_PER_GPU, _memory
from estimator.setup import Setup
from estimator.throughput import Speed
from tests.estimator.inference.test_generation import plan_of

LLAMA = find("llama-8b")
H100 = hardware.gpu("H100 SXM")
MEMORY = memory.estimate(Setup(model=LLAMA))
MACHINE = Place(
    name="big",
    gpu=H100,
    gpus=8,
    vcpu=96,
    ram_bytes=1000 * GIB,
    allocatable=0.9,
    network_gbps=80.0,
    rdma=False,
    usd_per_hour=36.0,
)


def candidate(
    rate: float | None = 1e4, usd: float | None = 36.0, gpus: int = 8, nodes: int = 1, **changes: Any
) -> Candidate:
    layout = Layout(
        device="cuda",
        nodes=nodes,
        processes_per_node=gpus,
        sharding="fsdp",
        micro_batch_size=1,
        accumulation=1,
        seq_len=512,
        activation_checkpointing=False,
        precision="bf16",
        optimizer="adamw",
    )
    values: dict[str, Any] = {
        "layout": layout,
        "memory": MEMORY,
        "gpu": H100,
        "place": replace(MACHINE, usd_per_hour=usd),
        "speed": Speed(rate, "test"),
    }
    return Candidate(**(values | changes))


def test_hours_and_price_include_start_up_and_evaluations() -> None:
    one = candidate(
        evaluated_tokens=72 * 10**6, start_up=StartUp(machine_minutes=3, image_minutes=2, weights_minutes=1)
    )
    tokens = 36 * 10**6  # an hour at 10,000 a second
    assert (one.training_hours(tokens), one.hours(tokens)) == (pytest.approx(2.0), pytest.approx(2.1))
    assert (one.usd(tokens), one.usd_per_token) == (pytest.approx(75.6), pytest.approx(36 / 36e6))
    assert candidate(nodes=2).usd_per_hour == 72.0
    assert (candidate(rate=None).hours(tokens), one.hours(None), candidate(usd=None).usd(tokens)) == (
        None,
    ) * 3


@pytest.mark.parametrize(
    ("goals", "kind", "over"),
    [
        ({"deadline_hours": 1.0}, None, None),
        ({"deadline_hours": 0.8}, "deadline", 0.25),
        ({"budget_usd": 36.0}, None, None),
        ({"budget_usd": 32.0}, "budget", 0.125),
    ],
)
def test_a_goal_met_exactly_counts_as_met(
    goals: dict[str, float], kind: str | None, over: float | None
) -> None:
    found = rejection_by_goals(candidate(), Goals(**goals), 36 * 10**6)  # type: ignore[arg-type]
    assert (found and found.kind, found and found.over) == (kind, over and pytest.approx(over))


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan])
def test_goals_must_be_positive(value: float) -> None:
    for unknown in ({"prefer": "green"}, {"epochs": 2}):
        with pytest.raises(UserError):
            Goals(**unknown)  # type: ignore[arg-type]
    for name in ("deadline_hours", "budget_usd", "interruption_rate"):
        with pytest.raises(UserError, match=name.replace("_", ".")):
            Goals(**{name: value})  # type: ignore[arg-type]
    for name in ("tokens", "dataset_tokens", "max_nodes", "max_gpus"):
        Goals(**{name: 1})  # type: ignore[arg-type]
        with pytest.raises(UserError, match=name.replace("_", ".")):
            Goals(**{name: value})  # type: ignore[arg-type]


def test_deadline_and_budget_decide_whether_speed_ranks_first() -> None:
    assert not Goals().by_speed
    assert Goals(prefer="speed").by_speed
    assert Goals(budget_usd=1).by_speed
    assert not Goals(budget_usd=1, deadline_hours=1, prefer="speed").by_speed
    job = Job(model=LLAMA)
    assert Goals(dataset_tokens=5, epochs=3).total_tokens(job) == 15
    assert Goals(dataset_tokens=5, epochs=3, tokens=7).total_tokens(job) == 7
    assert Goals(dataset_tokens=5).total_tokens(job) == 5
    assert Goals().total_tokens(replace(job, steps=2)) == 2 * job.tokens_per_step


def test_figures_within_the_tie_margin_of_the_best_count_as_equal() -> None:
    def sorted_candidates(*candidates: Candidate) -> list[Candidate]:
        return sort_candidates(
            list(candidates), Goals(), tokens=None, target=Target(kind="catalogue", capacity="any")
        )

    cheapest, dear = candidate(rate=1.5e4, usd=54.0), candidate(rate=1e4 / (1 + TIE_MARGIN), usd=36.0)
    assert sorted_candidates(cheapest, dear) == [dear, cheapest]
    by_speed = Goals(prefer="speed")
    assert (
        sort_candidates([dear, cheapest], by_speed, tokens=None, target=Target(kind="catalogue"))[0]
        is cheapest
    )
    too_dear = candidate(rate=0.99e4 / (1 + TIE_MARGIN), usd=36.0)
    assert sorted_candidates(cheapest, too_dear) == [cheapest, too_dear]
    few = candidate(gpus=4, place=replace(MACHINE, gpus=4, usd_per_hour=36.0))
    assert sorted_candidates(candidate(), few) == [few, candidate()]
    unpriced, unmeasured = candidate(usd=None), candidate(rate=None)
    assert sorted_candidates(unpriced, unmeasured, dear) == [dear, unmeasured, unpriced]
    unknown = candidate(place=replace(MACHINE, ram_bytes=None, usd_per_hour=0.1))
    assert sorted_candidates(unknown, dear) == [dear, unknown]


def test_among_plans_of_about_the_same_price_a_much_faster_one_ranks_first() -> None:
    def first(goals: Goals, *candidates: Candidate, tokens: int | None = None) -> Candidate:
        return sort_candidates(
            list(candidates), goals, tokens=tokens, target=Target(kind="catalogue", capacity="any")
        )[0]

    place = replace(MACHINE, gpus=1, usd_per_hour=3.6)
    slow = candidate(gpus=1, rate=1e3, place=place, gpu=hardware.gpu("L4"))

    def rival(rate: float, gpus: int = 1, usd: float = 7.2) -> Candidate:
        return candidate(gpus=gpus, rate=rate, place=replace(MACHINE, gpus=gpus, usd_per_hour=usd))

    assert first(Goals(), slow, rival(2.01e3)).speed.tokens_per_second == 2.01e3
    assert first(Goals(), slow, rival(1.99e3)) is slow
    assert first(Goals(), slow, rival(2.01e3, usd=9.0)) is slow, "more than a tie more expensive"
    assert first(Goals(deadline_hours=100), slow, rival(2.01e3)) is slow, "the deadline decides about time"
    # More GPUs of the same speed are faster for a job of known size, and are left to the users of a cluster
    many, cluster = rival(7.9e3, gpus=8, usd=28.8), Cluster(context="test", nodes=())
    assert first(Goals(), slow, many) is slow
    assert first(Goals(), slow, many, tokens=10**8) is many
    assert first(Goals(), slow, rival(2.9e3, gpus=3, usd=10.8), tokens=10**8) is slow, "a few machines more"
    assert first(Goals(cluster=cluster), slow, many, tokens=10**8) is slow
    faster = rival(2.01e3)
    same_gpus = replace(slow, gpu=faster.gpu)
    assert first(Goals(), same_gpus, faster) is same_gpus, "by a slower network, at half the price per hour"
    # Start-up is part of the time and of the price: a short job gains nothing
    minutes = StartUp(machine_minutes=10, image_minutes=0, weights_minutes=0)
    starting = [replace(item, start_up=minutes) for item in (slow, many)]
    assert first(Goals(), *starting, tokens=10**6) is starting[0]


def test_each_other_gpu_gets_one_rejection_with_the_price_difference() -> None:
    best = candidate()
    other = candidate(rate=0.5e4, gpu=hardware.gpu("L4"))
    again, same = candidate(rate=0.4e4, gpu=hardware.gpu("L4")), candidate(rate=0.3e4)
    third = candidate(rate=1.6e4, gpu=hardware.gpu("A100 SXM 80GB"))
    found = later_ranked(best, [same, other, again, third], Goals(), 2)
    assert [each.over for each in found] == [pytest.approx(1.0), pytest.approx(10 / 16 - 1)]
    assert len(later_ranked(best, [other, third], Goals(), 1)) == 1
    (slower,) = later_ranked(best, [other], Goals(prefer="speed"), 5)
    assert (slower.kind, slower.over) == ("speed", pytest.approx(0.5))


def test_differences_are_formatted_as_percent_with_their_direction() -> None:
    assert [percent(value) for value in (0.0994, 0.1, -0.05)] == ["9.9 %", "10 %", "-5.0 %"]
    assert [format_change(value, "more", "less")[-4:] for value in (0.0, -0.01)] == ["more", "less"]
    assert Shortage(hardware="x", needs=150, has=100).over == pytest.approx(0.5)
    slower = compare_to_best(candidate(rate=0.5e4), candidate())[0]
    assert slower.endswith("; compared with the best: 100 % more expensive per token, 50 % slower")
    assert [compare_speeds(ratio) for ratio in (0.5, 1.001, 1.5, 21.24)] == [
        "50 % slower",
        "equally fast",
        "50 % faster",
        "21.2 times as fast",
    ]
    assert [compare_prices(ratio) for ratio in (0.97, 1.0, 3.0)] == [
        "3.0 % cheaper",
        "equally expensive",
        "200 % more expensive",
    ]


RATE = Rate(per_node_hour=0.5, source="test")


def predicted_interruptions(**changes: Any) -> Interruptions:
    values: dict[str, Any] = {
        "nodes": 4,
        "checkpoint_bytes": 10 * GIB,
        "bytes_per_second": 0.5 * GIB,
        "cloud": None,
        "network_gbps": None,
        "restart_hours": 0.25,
    }
    predicted = predict_interruptions(RATE, **(values | changes))
    assert predicted is not None
    return predicted


def test_the_checkpoint_interval_is_at_least_the_time_to_store_one() -> None:
    disk = rates_of(None).disk_bytes_per_second
    predicted = predicted_interruptions()
    assert (predicted.checkpoint_seconds, predicted.restart_seconds) == (20.0, 900.0)
    assert predicted.store_seconds == pytest.approx(10 * GIB / disk)
    assert predicted.interval_seconds == pytest.approx(math.sqrt(2 * 20 * 1800))
    assert predicted_interruptions(bytes_per_second=None).checkpoint_seconds == pytest.approx(10 * GIB / disk)
    slow = predicted_interruptions(network_gbps=0.008)
    assert slow.store_seconds == slow.interval_seconds == pytest.approx(10 * GIB / 1e6)
    assert predict_interruptions(Rate(per_node_hour=None, source=""), **_arguments()) is None


def _arguments() -> dict[str, Any]:
    names = ("nodes", "checkpoint_bytes", "bytes_per_second", "cloud", "network_gbps", "restart_hours")
    return dict.fromkeys(names, 1)


def test_wall_time_follows_daly_and_completion_probability_poisson() -> None:
    found = replace(predicted_interruptions(), store_seconds=100.0, interval_seconds=600.0)
    between = 1800.0
    lost = math.exp(1000 / between) * math.expm1(620 / between) * between / 600
    assert wall_hours(3.0, found) == pytest.approx(3 * lost)
    assert wall_hours(0.0, found) == wall_hours(-1.0, found) == 0
    short = math.exp(1000 / between) * math.expm1(56 / between) * between / 36
    assert wall_hours(0.01, found) == pytest.approx(0.01 * short)
    assert wall_hours(1.0, replace(found, restart_seconds=1e9)) == math.inf
    assert expected(1.5, found) == pytest.approx(3.0)
    assert completion_probability(1.5, found, 2) == pytest.approx(math.exp(-3) * (1 + 3 + 4.5))
    assert (completion_probability(0.0, found, 0), completion_probability(math.inf, found, 9)) == (1.0, 0.0)
    half = math.log(2) / 2  # hours after which one of two runs was interrupted
    assert completion_obstacle(half * 0.999, found, 0) is None
    assert completion_obstacle(half * 1.001, found, 0) is not None


@pytest.mark.parametrize(("nodes", "there", "comes_up"), [(2, 2, False), (3, 2, True)])
def test_present_nodes_need_no_boot_time(nodes: int, there: int, comes_up: bool) -> None:
    place = replace(MACHINE, free_nodes=there, network_gbps=0.8)
    start = start_up(place, nodes, LLAMA)
    assert start.machine_minutes == rates_of(None).machine_minutes * comes_up
    assert start.weights_minutes == pytest.approx(2 * LLAMA.stored_parameters / 1e8 / 60)
    disk = start_up(replace(place, network_gbps=None), nodes, LLAMA).weights_minutes
    assert disk == pytest.approx(2 * LLAMA.stored_parameters / rates_of(None).disk_bytes_per_second / 60)


@pytest.mark.parametrize(
    ("target", "goals", "most", "shapes"),
    [
        ({}, {"max_nodes": 2}, None, [(1, 1), (1, 2), (1, 4), (1, 8), (2, 8)]),
        ({}, {"max_gpus": 8}, None, [(1, 1), (1, 2), (1, 4), (1, 8)]),
        ({"gpus": 4}, {}, None, [(1, 4)]),
        ({"gpus": 4, "nodes": 3}, {}, None, [(3, 4)]),
        ({"nodes": 3}, {}, 2, []),
        ({"nodes": 2}, {}, 2, [(2, 8)]),
        ({"nodes": 1}, {"max_gpus": 3}, None, [(1, 1), (1, 2)]),
    ],
)
def test_node_and_gpu_counts_fill_one_machine_before_a_second(
    target: dict[str, Any], goals: dict[str, Any], most: int | None, shapes: list[tuple[int, int]]
) -> None:
    place = replace(MACHINE, max_nodes=most)
    assert list(place.shapes(Target(kind="catalogue", **target), Goals(**goals))) == shapes


def test_a_spread_supersedes_those_that_split_the_model_further() -> None:
    two, four = Spread(sharding="fsdp", tensor=2), Spread(sharding="fsdp", tensor=4)
    assert two.supersedes(four, 1)
    assert not four.supersedes(two, 1)
    assert not two.supersedes(two, 1)
    assert not two.supersedes(four, 2)
    assert two.supersedes(replace(two, context=2), 2)
    assert not two.supersedes(replace(four, expert=2), 1)
    ways = {1: "none", 2: "1f1b"}
    assert {stages: Spread(sharding="none", pipeline=stages).schedule for stages in ways} == ways


def parallel(engine: Any = "torchtitan", **changes: Any) -> Job:
    return Job(model=LLAMA, engine=engine, global_batch_size=64, **changes)


def test_parallel_degrees_stay_within_their_limits() -> None:
    for length, degrees in ((2 * SHORTEST_PIECE, {1, 2}), (2 * SHORTEST_PIECE - 2, {1})):
        layouts = spreads(parallel(seq_len=length), 1, 8)
        assert {way.context for way in layouts} == degrees
    layouts = spreads(parallel(), 2, 8)
    assert {way.tensor for way in layouts} == {1, 2, 4, 8}
    assert max(way.pipeline for way in layouts) == 16
    assert {way.replicate for way in layouts} == {1, 2}
    assert {way.replicate for way in spreads(parallel(), 2, 1)} == {1}
    assert {way.virtual_stages for way in layouts if way.pipeline == 16} == {1, 2}
    assert spreads(parallel(micro_batch_size=16), 1, 4) != []
    assert all(way.model_parallel > 1 for way in spreads(parallel(micro_batch_size=16), 1, 8))
    experts = replace(parallel(), model=find("mixtral-8x7b"))
    assert {way.expert for way in spreads(experts, 2, 4) if way.tensor == way.pipeline == 1} == {1, 4, 8}


@pytest.mark.parametrize(
    ("job", "nodes", "gpus", "kinds"),
    [
        (parallel("torchtune"), 1, 1, {"none"}),
        (parallel("torchtune"), 1, 2, {"fsdp"}),
        (parallel("deepspeed"), 1, 1, {"zero0"}),
        (parallel("deepspeed"), 1, 2, {"zero1", "zero2", "zero3"}),
        (parallel("deepspeed", offload="cpu"), 1, 1, {"zero2"}),
        (parallel("deepspeed", offload="cpu"), 1, 2, {"zero2", "zero3"}),
        (parallel("fsdp2"), 1, 2, {"shard_grad_op", "fsdp"}),
    ],
)
def test_engines_shard_states_over_several_processes(
    job: Job, nodes: int, gpus: int, kinds: set[str]
) -> None:
    assert {way.sharding for way in spreads(job, nodes, gpus)} == kinds


def test_fsdp2_has_one_replica_or_one_per_node() -> None:
    assert {way.replicate for way in spreads(parallel("fsdp2"), 2, 4)} == {1, 2}
    assert {way.replicate for way in spreads(parallel("fsdp2"), 1, 8)} == {1}
    assert {way.replicate for way in spreads(parallel("fsdp2"), 8, 1)} == {1}
    assert {way.replicate for way in spreads(parallel("fsdp2", replicas=4), 1, 8)} == {4}
    assert spreads(parallel("fsdp2", replicas=3), 1, 8) == []


def test_micro_batches_divide_the_share_of_a_process_up_to_the_maximum() -> None:
    job = replace(parallel("torchtune"), global_batch_size=2 * 3 * LARGEST_MICRO_BATCH)
    (ladder, _) = Ladders(job, "bf16", "cuda").of(1, 2)
    sizes = Ladders(job, "bf16", "cuda").sizes(ladder)
    assert sizes == [n for n in range(1, LARGEST_MICRO_BATCH + 1) if 3 * LARGEST_MICRO_BATCH % n == 0]
    piped = Ladders(parallel(pipeline_parallel=2), "bf16", "cuda")
    for ladder in piped.of(1, 2):
        passes = [piped.rung(ladder, step).accumulation for step in range(len(piped.sizes(ladder)))]
        assert max(piped.sizes(ladder)) == LARGEST_PIPELINE_MICRO_BATCH
        assert ladder.spread.virtual_stages == 1 or all(number % 2 == 0 for number in passes)


def test_generation_shards_heads_evenly_and_batches_whole_prompts() -> None:
    sampling = Sampling(prompts=10, held_out=1, answers=4, prompt_tokens=10, new_tokens=10)
    assert [_batches(sampling, 10, sequences) for sequences in (3, 4, 7, 8, 40)] == [10, 10, 10, 5, 1]
    heads = replace(sampling, heads_shared=True)  # of llama-8b 32, and 8 of keys and values
    assert [count for count in range(1, 33) if _can_share(LLAMA, count, heads)] == [1, 2, 4, 8, 16, 32]
    assert _can_share(LLAMA, 3, sampling)
    base = replace(plan_of(gpu="H100 SXM", gpus=8, nodes=1).request, nodes=2, cpu=80, memory_mib=800)
    half = _with_gpus(base, 4)
    assert (half.nodes, half.gpus_per_node, half.cpu, half.memory_mib) == (1, 4, 40, 400)
    assert half.shared_memory_mib == base.shared_memory_mib // 2
    assert _with_gpus(base, 8) == replace(base, nodes=1)


@pytest.mark.parametrize(
    ("engine", "model", "packing", "masked"),
    [
        ("deepspeed", "llama-3.1-8b", True, False),
        ("deepspeed", "gpt-oss-20b", True, False),
        ("deepspeed", "gemma-2-9b", True, True),
        ("deepspeed", "gemma-2-9b", False, False),
        ("torchtune", "llama-3.1-8b", True, False),
        ("torchtitan", "llama-3.1-8b", True, False),
    ],
)
def test_packed_samples_need_a_dense_mask_if_no_kernel_separates_them(
    engine: Any, model: str, packing: bool, masked: bool
) -> None:
    job = replace(parallel(engine, packing=packing), model=find(model))
    assert setup_of(job, candidate().layout).document_mask == masked


def test_variable_length_attention_supports_heads_of_multiples_of_8_up_to_256() -> None:
    reasons = [
        varlen.unsupported(replace(LLAMA, head_dim=width), "sft", "full", "bf16") for width in (96, 256)
    ]
    assert reasons == [None, None]
    for width, words in ((100, "multiple of 8"), (264, "wider than the kernel's 256")):
        assert words in str(varlen.unsupported(replace(LLAMA, head_dim=width), "sft", "full", "bf16"))


def test_a_request_is_the_need_plus_a_quarter_up_to_the_share_of_the_node() -> None:
    extra = MEMORY_OUTSIDE_RANKS + 4 * SHARED_MEMORY_PER_GPU
    assert _memory(candidate(), 4, 100 * GIB) == 125 * GIB + extra
    assert _memory(candidate(), 4, 400 * GIB) == 450 * GIB, "half of the 900 GiB that can be allocated"
    assert _memory(candidate(), 4, 600 * GIB) == 600 * GIB
    unknown = candidate(place=replace(MACHINE, ram_bytes=None))
    assert _memory(unknown, 4, 400 * GIB) == 500 * GIB + extra


def test_shared_memory_is_requested_per_gpu() -> None:
    request = plan_of(gpu="H100 SXM", gpus=4, nodes=1).request
    assert request.shared_memory_mib == 4 * SHARED_MEMORY_PER_GPU // MIB
    assert request.memory_mib > request.shared_memory_mib, "which is part of it"
