"""Results of a trial, and how nodes agree on them; real trials: tests/flows/test_finetune_flow_trial.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from estimator.errors import UserError
from launchers.report.peak import MemoryPeak
from launchers.report.state import RankMeasured
from launchers.run import trial
from launchers.run.trial import Decision, TrialResult, describe_layout, describe_result, find_decision
from launchers.store.bundles import LocalStorage
from tests.launchers.gang.conftest import make_plan

GIB = 2**30


def rank(number: int, reserved: int | None, rss: int) -> RankMeasured:
    return RankMeasured(
        rank=number,
        device="cpu" if reserved is None else f"cuda:{number}",
        allocated_peak_bytes=None if reserved is None else 1,
        reserved_peak_bytes=reserved,
        rss_peak_bytes=rss,
    )


def result(**changes: object) -> TrialResult:
    values: dict[str, object] = {
        "plan": make_plan(1, 1),
        "steps": 3,
        "tokens_per_second": 640.0,
        "ranks": (rank(0, None, GIB),),
    }
    return TrialResult(**(values | changes))  # type: ignore[arg-type]


def test_a_stored_decision_is_found_unchanged(tmp_path: Path) -> None:
    store = LocalStorage(tmp_path)
    assert find_decision(store, "trials/7") is None
    failed = result(steps=0, tokens_per_second=None, failure="rank 0 failed: no memory", out_of_memory=True)
    decision = Decision(plan=result().plan, results=(failed, result()))
    trial._store_decision(store, "trials/7", decision)
    assert find_decision(store, "trials/7") == decision


def test_a_node_waits_for_the_decision_at_most_the_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "DECISION_S", 0.1)
    with pytest.raises(UserError, match="within 0 s"):
        trial._await_decision(LocalStorage(tmp_path), "trials/7")


def test_a_result_shows_prediction_and_measurement() -> None:
    assert describe_result(result()) == (
        "predicted unknown speed, memory 0 MiB; measured 640 tokens/s, memory 1.00 GiB"
    )
    assert describe_result(result(failure="x", out_of_memory=True)).endswith("; ran out of memory")
    assert describe_result(result(failure="rank 0 failed")).endswith("; failed: rank 0 failed")


def test_the_peak_is_the_largest_reserved_memory_on_gpus_and_resident_memory_on_cpus() -> None:
    on_gpus = (rank(0, 2 * GIB, 9 * GIB), rank(1, 3 * GIB, 9 * GIB))
    assert result(ranks=on_gpus).memory_peak == MemoryPeak(size_bytes=3 * GIB, counter="reserved")
    assert result().memory_peak == MemoryPeak(size_bytes=GIB, counter="resident")
    assert result(ranks=()).memory_peak is None


def test_on_gpus_the_predicted_memory_counts_what_torch_reserves() -> None:
    plan = result().plan
    memory = replace(
        plan.prediction.memory, shows_bytes=4 * GIB, shows_range=(3 * GIB, 5 * GIB), outside_bytes=GIB
    )
    on_gpu = replace(
        plan,
        layout=replace(plan.layout, device="cuda"),
        prediction=replace(plan.prediction, memory=memory),
    )
    expected_text = describe_result(result(plan=on_gpu, ranks=(rank(0, 2 * GIB, 9),)))
    assert "memory 3.00 GiB reserved by torch; measured 640 tokens/s, memory 2.00 GiB" in expected_text


def test_measured_plans_are_distinguished_by_their_layout() -> None:
    plan = make_plan(1, 1)
    other = replace(plan, layout=replace(plan.layout, sharding="zero2", activation_checkpointing=True))
    assert describe_layout(plan) == "micro batch 1 x 1, no checkpointing"
    assert describe_layout(other) == "zero2, micro batch 1 x 1, checkpointing"
