"""Scores of the estimator on the published measurements in the repository."""

import pytest

from benchmarks.published import rows
from benchmarks.published.scoring import Score, Scored, percentile, score, usual_network
from benchmarks.published.verdict import verdict
from estimator import hardware
from tests.benchmarks.published.measured_tables import CARRIED, carried


def precise(items: tuple[Scored, ...]) -> Score:
    """The score on rows of quality A."""
    return score(item for item in items if item.row.quality == "A")


# ---------------------------------------------------------------------------------------------------------
# The limits


def test_every_included_row_is_scored_but_those_with_a_stated_regression() -> None:
    skipped = carried().skipped.values()
    assert len(skipped) == 2
    assert all("the publication states a regression" in reason for reason in skipped)


def fixed(kinds: tuple[str, ...]) -> Score:
    """The score on rows of quality A whose batches have one length."""
    rows_of = (item for item in carried().memory if item.row.quality == "A" and not item.row.varies)
    return score(item for item in rows_of if item.row.kind in kinds)


def test_errors_for_litgpt_llama_adapters_are_below_3_percent() -> None:
    """tutorials/resource-tables.md: v1 and v2, on bf16 weights, NF4, and NF4 with its scales quantized."""
    adapters = [item for item in carried().memory if item.row.setup and item.row.setup.prompts]
    assert len(adapters) == 12
    assert all(abs(item.error) < 0.03 for item in adapters), [(item.row.id, item.error) for item in adapters]


def test_at_most_5_percent_of_verdicts_are_wrong_in_either_direction() -> None:
    answer = verdict(carried().judged)
    assert answer.ran > 700
    assert answer.refused_of_ran <= 0.05 * answer.ran
    assert answer.oom >= 100
    assert answer.accepted_of_oom <= 0.05 * answer.oom


@pytest.mark.parametrize(
    ("kinds", "median", "p95"),
    [
        # 8 % is the goal; the next row after the 95 % is a phi-1.5
        (("allocated", "active"), 0.02, 0.085),
        # 15 % is the goal: benchmarks/results/estimator_fit.md names the rows
        (("reserved",), 0.05, 0.17),
    ],
)
def test_errors_of_live_and_reserved_memory_of_precise_rows_are_small(
    kinds: tuple[str, ...], median: float, p95: float
) -> None:
    scores = fixed(kinds)
    assert scores.median_abs_error is not None
    assert scores.p95_abs_error is not None
    assert scores.median_abs_error <= median
    assert scores.p95_abs_error <= p95


def test_the_predicted_range_contains_19_of_20_precise_rows() -> None:
    scores = precise(carried().memory)
    assert scores.covered is not None
    assert scores.covered >= 0.95


# ---------------------------------------------------------------------------------------------------------
# How it is scored


def scored(
    measured: float, predicted: float, lower: float | None = None, upper: float | None = None
) -> Scored:
    row = rows.read(CARRIED)[0]
    return Scored(row=row, measured=measured, predicted=predicted, lower=lower, upper=upper, basis="made up")


def test_errors_are_fractions_of_the_measurement() -> None:
    scores = score([scored(100, 90, 80, 95), scored(100, 98, 95, 101), scored(50, 55, 52, 60)])
    assert scores.rows == 3
    assert scores.median_abs_error == pytest.approx(0.1)
    assert scores.bias == pytest.approx(-0.02)
    assert scores.under_by_3pct == pytest.approx(1 / 3)
    assert scores.covered == pytest.approx(1 / 3)


def test_a_group_without_ranges_has_unknown_coverage() -> None:
    assert score([scored(100, 90)]).covered is None
    assert score([]).median_abs_error is None


def test_a_percentile_lies_between_its_neighbors() -> None:
    values = [float(number) for number in range(21)]
    assert percentile(values, 0.95) == pytest.approx(19)
    assert percentile([1.0, 2.0], 0.5) == pytest.approx(1.5)
    assert percentile([3.0], 0.95) == 3.0


def test_the_default_network_is_that_of_the_largest_machine_with_the_gpu() -> None:
    machines = [item for item in hardware.instances() if item.gpu == "H100 SXM" and item.gpu_count == 8]
    gbps, rdma = usual_network(hardware.gpu("H100 SXM"), 8)
    assert gbps == max(item.network_gbps or 0 for item in machines)
    assert rdma


def test_a_rack_of_72_gpus_has_the_network_of_72_gpus() -> None:
    inside, _ = usual_network(hardware.gpu("GB200"), 72)
    server, _ = usual_network(hardware.gpu("GB200"), 8)
    assert inside is not None
    assert server is not None
    assert inside == pytest.approx(9 * server)
