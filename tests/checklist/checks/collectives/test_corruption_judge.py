"""Judging of silent data corruption by repeated matrix products."""

from __future__ import annotations

import dataclasses

from checklist.measurements import Measurements
from checklist.verdict import judge
from tests.checklist.runs import gpu_run, verdict_of


def changed(run: Measurements, *ranks: int, whole: bool, **changes: object) -> Measurements:
    reported = tuple(
        dataclasses.replace(one, **changes) if one.rank in ranks and one.whole == whole else one  # type: ignore[arg-type]
        for one in run.repeated
    )
    return dataclasses.replace(run, repeated=reported)


def test_a_gpu_whose_repeated_product_differs_is_named() -> None:
    result = judge(changed(gpu_run(), 9, whole=False, differing=1))
    (fault,) = result.findings
    assert (fault.code, fault.nodes, fault.ranks) == ("corruption", ("host-1",), (9,))
    assert result.bad_nodes == ("host-1",)
    (failure,) = result.open_failures()
    assert (failure.nodes, failure.gpus) == (("host-1",), ("GPU-1-1",))


def test_two_equal_groups_with_different_results_are_both_suspects() -> None:
    result = judge(changed(gpu_run(2, 1), 1, whole=True, digest="other"))
    (fault,) = result.findings
    assert (fault.verdict, fault.nodes, fault.suspects) == ("FAIL", (), ("host-0", "host-1"))


def test_the_corruption_check_has_no_verdict_without_matrix_products() -> None:
    result = judge(dataclasses.replace(gpu_run(), repeated=()))
    assert verdict_of(result, "corruption") == "NO-VERDICT"
