"""Launches of the host as the limit of small models."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

from estimator import hardware, throughput
from estimator.models import find
from estimator.setup import Setup
from estimator.throughput.flops import work
from estimator.throughput.launches import (
    FASTEST_LAUNCH,
    LAUNCH_SECONDS,
    SLOWEST_LAUNCH,
    TABLE,
    fused_share,
    in_block,
    of_step,
    outside,
)

H200 = hardware.gpu("H200 SXM")
TINY = Setup(model=find("tiny-llama"), engine="fsdp2", seq_len=256)
LARGE = Setup(model=find("llama-8b"), engine="fsdp2", method="lora", seq_len=2048, micro_batch_size=2)
CLAUSE = "kernel launches"


def test_the_table_counts_each_part_once_with_its_source() -> None:
    with TABLE.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    keys = [(row["fusion"], row["method"], row["part"]) for row in rows]
    assert len(set(keys)) == len(keys)
    assert all("benchmarks.launches" in row["source"] for row in rows)
    assert all(int(row["forward"]) >= 0 and int(row["backward"]) >= 0 for row in rows)


def test_the_fitted_time_of_a_block_is_that_of_its_launches() -> None:
    """Two independent sources: a fit to training runs, and NVIDIA's time per launch times the count."""
    fitted = throughput.efficiency.published().of("launch")
    counted = in_block("eager", adapters=False) * LAUNCH_SECONDS["eager"]
    assert fitted == pytest.approx(counted, rel=0.1)


def test_adapters_add_launches_and_compiled_blocks_have_fewer() -> None:
    for fusion in ("eager", "compiled"):
        assert in_block(fusion, adapters=True) > in_block(fusion, adapters=False)
    for adapters in (True, False):
        assert in_block("compiled", adapters=adapters) < in_block("eager", adapters=adapters)
    compiled = replace(TINY, compile=True)
    assert fused_share(TINY) == 1
    seconds = {name: in_block(name, adapters=False) * each for name, each in LAUNCH_SECONDS.items()}
    assert fused_share(compiled) == pytest.approx(seconds["compiled"] / seconds["eager"])
    tiny, faster = throughput.speed(TINY, H200), throughput.speed(compiled, H200)
    assert faster.tokens_per_second > tiny.tokens_per_second


def test_recomputation_launches_a_block_again() -> None:
    full = replace(TINY, checkpointing="full")
    assert of_step(full, work(full).layers) > of_step(TINY, work(TINY).layers)
    assert throughput.speed(full, H200).tokens_per_second < throughput.speed(TINY, H200).tokens_per_second


def test_launches_are_counted_for_each_micro_batch_and_once_for_the_optimizer() -> None:
    once, twice = (of_step(replace(TINY, accumulation=number), 4) for number in (1, 2))
    assert twice - once == 4 * in_block("eager", adapters=False) + outside(TINY)


def test_a_step_of_a_small_model_takes_as_long_as_its_launches_whatever_its_tokens() -> None:
    short, long = (throughput.speed(replace(TINY, seq_len=tokens), H200) for tokens in (64, 256))
    assert long.step_seconds == pytest.approx(short.step_seconds, rel=0.01)
    assert long.step_seconds >= of_step(TINY, work(TINY).layers) * FASTEST_LAUNCH


def test_the_range_of_a_launch_bound_step_covers_the_published_times_of_a_launch() -> None:
    count = of_step(TINY, work(TINY).layers)
    prediction = throughput.speed(TINY, H200)
    low, high = prediction.tokens_per_second_range
    assert low <= TINY.seq_len / (count * SLOWEST_LAUNCH)
    assert prediction.tokens_per_second < high <= TINY.seq_len / (count * FASTEST_LAUNCH)
    assert f"{CLAUSE}, which was not measured on small models" in prediction.basis


def test_a_large_model_is_not_bound_by_launches() -> None:
    assert CLAUSE not in throughput.speed(LARGE, H200).basis
