"""Impossible measurements are discarded and their reporter is named."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from checklist.analysis.ceilings import PHYSICAL_LIMITS, Ceilings
from checklist.analysis.soundness import sound, unsound_times
from checklist.measurements import Counters, Local, Measurements, Nic, record, to_dict
from estimator import hardware
from tests.checklist.runs import all_with, cpu_run, gpu_run, with_facts

NAN, INF = math.nan, math.inf
BAD_TIMES = [NAN, INF, -INF, -0.5, 0.0]
TEN_GBIT = (Nic(name="eth0", addresses=("10.0.0.1",), gbps=10.0, up=True),)


def changed(run: Measurements, field: str, index: int, **changes: Any) -> Measurements:
    """Return the run with one of its records changed."""
    items = list(getattr(run, field))
    items[index] = dataclasses.replace(items[index], **changes)
    changed_items: Any = {field: tuple(items)}
    return dataclasses.replace(run, **changed_items)


def reported(run: Measurements) -> list[tuple[str, int | None, int | None]]:
    """Check, node and rank of each impossible value; the remaining run must be valid JSON."""
    accepted = sound(run)
    json.dumps(to_dict(accepted), allow_nan=False)
    assert sound(accepted) == accepted
    return [(one.check, one.node, one.rank) for one in accepted.unsound]


@pytest.mark.parametrize("run", [gpu_run(), gpu_run(33), cpu_run(4), cpu_run(2, local=True)])
def test_every_measurement_of_a_healthy_run_is_accepted(run: Measurements) -> None:
    assert sound(run) == run


@pytest.mark.parametrize("value", BAD_TIMES)
def test_a_connection_with_an_impossible_time_still_counts(value: float) -> None:
    run = changed(gpu_run(), "probes", 0, seconds=value)
    assert reported(run) == [("mesh", 0, None)]
    assert sound(run).probes[0].connected


def test_impossible_facts_and_counters_count_as_unknown() -> None:
    assert reported(with_facts(gpu_run(), 9, clock_offset_s=NAN)) == [("clock", 1, 9)]
    assert reported(with_facts(gpu_run(), 9, clock_offset_error_s=-1.0)) == [("clock", 1, 9)]
    assert sound(with_facts(gpu_run(), 9, clock_offset_error_s=INF)).facts[9].clock_offset_s is None
    assert reported(with_facts(gpu_run(), 9, shm_bytes=-1)) == [("shared-memory", 1, 9)]
    assert reported(with_facts(gpu_run(), 9, memlock_bytes=-7)) == [("memlock", 1, 9)]
    nan = (Nic(name="eth0", gbps=NAN),)
    assert reported(with_facts(gpu_run(), 9, nics=nan)) == [("interface", 1, 9)]
    assert reported(changed(gpu_run(), "health", 1, ecc_uncorrected=-1)) == [("gpu-health", 0, 0)]
    counted = Counters(node=1, phase="pairs", tcp_segments=10, tcp_retransmitted=-2)
    assert reported(gpu_run(counters=(counted,))) == [("loss", 1, None)]
    ports = Counters(node=1, phase="pairs", carrier_changes=-1, port_errors={"rx_crc_errors": -3})
    assert reported(gpu_run(counters=(ports,))) == [("loss", 1, None), ("loss", 1, None)]
    assert sound(gpu_run(counters=(ports,))).counters[0].port_errors == {}
    spoilt = changed(gpu_run(), "health", 1, nvlink_errors={"CRC": -3})
    assert sound(spoilt).health[1].nvlink_errors == {}


def test_impossible_samples_and_percentiles_are_reported_and_correctness_is_kept() -> None:
    assert reported(changed(gpu_run(), "locals", 4, samples=(760.0, NAN))) == [("gemm", 0, 2)]
    assert reported(changed(gpu_run(4), "pairs", 0, gbytes_per_s_p95=NAN)) == [("pairs", 0, None)]
    run = changed(gpu_run(), "collectives", 0, seconds_p95=NAN)
    assert reported(run) == [("latency", None, None)]
    valid = sound(run).collectives[0]
    assert (valid.seconds_median, valid.busbw_gbytes_per_s, valid.correct) == (None, None, True)


def test_more_retransmitted_than_sent_segments_discard_only_the_loss_measurement() -> None:
    run = changed(gpu_run(), "pairs", 0, segments=10, retransmitted=11)
    assert reported(run) == [("loss", run.pairs[0].src, None)]
    assert sound(run).pairs[0].gbytes_per_s == run.pairs[0].gbytes_per_s


def test_a_pair_far_above_the_line_rate_of_its_sockets_is_impossible() -> None:
    ten = all_with(cpu_run(2, collectives=()), nics=TEN_GBIT)
    fine = dataclasses.replace(ten, pairs=tuple(dataclasses.replace(p, gbytes_per_s=1.2) for p in ten.pairs))
    assert reported(fine) == []
    assert reported(changed(fine, "pairs", 1, gbytes_per_s=6.0)) == [("pairs", fine.pairs[1].src, None)]
    local = dataclasses.replace(fine, local=True)
    assert reported(changed(local, "pairs", 1, gbytes_per_s=6.0)) == []


def test_a_collective_far_above_the_line_rate_of_its_hosts_is_impossible() -> None:
    run = all_with(cpu_run(2, pairs=()), nics=TEN_GBIT)
    assert reported(dataclasses.replace(run, collectives=run.collectives[:1])) == []
    assert reported(dataclasses.replace(run, collectives=run.collectives[-1:])) == [("bandwidth", None, None)]


def test_a_gpu_faster_than_one_and_a_half_times_its_data_sheet_is_impossible() -> None:
    assert reported(changed(gpu_run(), "locals", 0, value=985.0)) == []
    assert reported(changed(gpu_run(), "locals", 0, value=1500.0)) == [("gemm", 0, 0)]
    assert reported(changed(gpu_run(), "locals", 1, value=5100.0)) == [("hbm", 0, 0)]
    assert Ceilings.from_run(cpu_run()).local(0, "gemm_fp32").value == PHYSICAL_LIMITS["TFLOPS"]


def test_the_plausibility_limit_is_ten_times_the_fastest_known_hardware() -> None:
    gpus = hardware.gpus()
    rates = [rate for gpu in gpus for _, rate in gpu.peak_tflops]
    assert PHYSICAL_LIMITS["TFLOPS"] >= 10 * max(rates)
    assert PHYSICAL_LIMITS["GB/s"] >= 10 * max(gpu.bandwidth_gbps or 0 for gpu in gpus)


@pytest.mark.parametrize("value", BAD_TIMES)
def test_impossible_times_are_removed_before_the_slowest_rank_is_taken(value: float) -> None:
    (one,) = unsound_times([0.1, value], check="bandwidth", what="all_reduce", node=1, rank=5)
    assert (one.node, one.rank) == (1, 5)
    assert not unsound_times([0.1, 0.2], check="bandwidth", what="all_reduce", node=1, rank=5)


def test_a_rank_that_reports_nan_does_not_end_the_run() -> None:
    reply = to_dict(Local(rank=0, what="gemm_bf16", value=NAN, unit="TFLOPS", samples=(INF,)))
    assert math.isnan(record(Local, reply).value or 0.0)
