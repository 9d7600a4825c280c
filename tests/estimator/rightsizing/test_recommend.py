"""The next request of a step from what its earlier tasks used."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator.rightsizing.recommend import recommend
from estimator.rightsizing.report import report_step
from estimator.rightsizing.usage import Sizes, Usage
from tests.estimator.rightsizing.records import GIB, gpu, usage

SAME = {"rows": "100"}


def _memory(history: list[Usage], parameters: dict[str, str] | None = SAME) -> int:
    recommendation = recommend(history, parameters)
    assert recommendation is not None
    assert recommendation.sizes.memory_mib is not None
    return recommendation.sizes.memory_mib


@given(
    peaks=st.lists(st.floats(50, 500_000), min_size=1, max_size=20),
    failures=st.lists(st.tuples(st.floats(50, 500_000), st.integers(100, 500_000)), max_size=5),
)
def test_no_request_is_below_a_used_peak_or_a_size_that_ran_out_of_memory(
    peaks: list[float], failures: list[tuple[float, int]]
) -> None:
    history = [usage(peak, at=number) for number, peak in enumerate(peaks)]
    history += [
        usage(peak, at=100 + number, ending="out of memory", requested=Sizes(memory_mib=asked))
        for number, (peak, asked) in enumerate(failures)
    ]
    memory = _memory(history)
    assert memory >= max([*peaks, *(peak for peak, _ in failures)])
    assert memory >= max((1.5 * asked for _, asked in failures), default=0), "no success since the failure"


def test_headroom_shrinks_as_tasks_accumulate() -> None:
    requests = [_memory([usage(10_000, at=at) for at in range(count)]) for count in (1, 3, 10, 50)]
    assert requests == sorted(requests, reverse=True)
    assert requests[0] == pytest.approx(15_256, abs=128)
    assert requests[-1] == pytest.approx(12_300, abs=128)


def test_after_a_success_an_out_of_memory_task_counts_with_its_peak_only() -> None:
    lacking = usage(3900, at=1, ending="out of memory", requested=Sizes(memory_mib=4000))
    assert _memory([usage(1000), lacking]) >= 6000
    assert _memory([usage(1000), lacking, usage(4200, at=2)]) < 6600


def test_only_tasks_with_the_same_parameters_count_unless_these_made_no_difference() -> None:
    other = [usage(9000, at=at, parameters=(("rows", "900"),)) for at in range(3)]
    assert _memory([usage(1000), *other]) < 2000
    assert recommend(other[:2], SAME) is None, "two tasks cannot tell what a parameter does"
    alike = [usage(1000 + at, at=at, parameters=(("rows", str(at)),)) for at in range(3)]
    assert 1000 < _memory(alike) < 2000


def test_a_saturated_cpu_request_is_not_reduced() -> None:
    def cores(used: float) -> float | None:
        recommendation = recommend([usage(cpu=used)], SAME)
        return recommendation.sizes.cpu if recommendation else None

    assert (cores(0.2), cores(1.5), cores(3.9)) == (1, 2, 5)
    recommendation = recommend([usage(cpu=None)], SAME)
    assert recommendation is not None
    assert recommendation.sizes.cpu is None, "not measured"


def test_idle_gpus_are_dropped_and_unmeasured_ones_kept() -> None:
    asked = Sizes(cpu=4, memory_mib=8000, gpus=2)
    idle = replace(gpu(0), utilization=0.0)
    recommendation = recommend([usage(gpus=(gpu(20), idle), requested=asked)], SAME)
    assert recommendation is not None
    assert recommendation.sizes.gpus == 1
    assert recommendation.gpu_memory_bytes == pytest.approx(30 * GIB, rel=0.01)
    unmeasured = recommend([usage(requested=asked)], SAME)
    assert unmeasured is not None
    assert unmeasured.sizes.gpus == 2


def test_a_step_that_ran_out_of_gpu_memory_needs_a_larger_gpu() -> None:
    lacking = usage(gpus=(gpu(79),), ending="out of GPU memory", requested=Sizes(gpus=1))
    recommendation = recommend([lacking], SAME)
    assert recommendation is not None
    assert recommendation.gpu_memory_bytes == 120 * GIB


def test_the_report_prices_waste_and_prints_the_decorator_line() -> None:
    report = report_step([usage(1000, at=at) for at in range(5)])
    assert report.resources == "@resources(cpu=2, memory=1611)"
    assert report.usd == pytest.approx(5 * 0.17, rel=0.01)  # c6i: 4 CPU and 8 GiB
    assert report.wasted_share == pytest.approx(0.5, rel=0.01)
    asked = Sizes(cpu=8, memory_mib=64_000, gpus=1, gpu_type="A100-80GB")
    smaller = report_step([usage(gpus=(gpu(10, utilization=0.1),), requested=asked)])
    assert smaller.next_request is not None
    assert smaller.next_request.gpu_type in ("A10G", "L4")
    assert (smaller.wasted_share or 0.0) > 0.5
    assert asked.describe() == "8 CPU, 62.5 GiB, 1x A100-80GB"
    unknown = report_step([usage(requested=Sizes())])
    assert unknown.usd is unknown.wasted_usd is None, "nobody said what was requested"


def test_a_record_survives_json_and_another_version_is_refused() -> None:
    record = usage(gpus=(gpu(1),))
    assert Usage.from_json(record.to_json()) == record
    for text in ("{}", "[]", record.to_json().replace('"schema": 1', '"schema": 2')):
        with pytest.raises(ValueError, match=r"record"):
            Usage.from_json(text)
