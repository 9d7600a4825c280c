"""Requests of the phases that need no network."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest

from checklist.measurements import Diagnosed, to_dict
from checklist.run import phases
from checklist.run.pairing import PhaseSkipped
from checklist.run.phases import diag
from tests.checklist.run.sessions import ScriptedSession
from tests.checklist.runs import facts, healthy_gpu


def deep(requests: list[tuple[str, int, Mapping[str, Any]]]) -> ScriptedSession:
    """Three nodes of two GPUs each; the first ranks have joined."""

    def answer(request_name: str, rank: int, arguments: Mapping[str, Any]) -> Any:
        requests.append((request_name, rank, arguments))
        return to_dict(Diagnosed(node=rank, level=arguments["level"], passed=("memory",)))

    run = ScriptedSession(3, answer, profile="deep")
    run.device, run.phase_ends = "cuda", time.monotonic() + 900
    run.results.facts = {rank: facts(rank, 2) for rank in range(6)}
    return run


def test_the_dcgm_diagnostic_runs_once_per_node_over_the_gpus_of_all_its_ranks() -> None:
    requests: list[tuple[str, int, Mapping[str, Any]]] = []
    run = deep(requests)
    assert diag(run) is None
    assert [(request_name, rank) for request_name, rank, _ in requests] == [
        ("diagnose", 0),
        ("diagnose", 1),
        ("diagnose", 2),
    ]
    reported = requests[1][2]
    assert (reported["gpus"], reported["level"]) == (["GPU-1-0", "GPU-1-1"], 2)
    assert 800 < reported["limit_s"] < 900
    assert [one.node for one in run.results.diagnosed] == [0, 1, 2]


def test_the_dcgm_diagnostic_does_not_run_next_to_other_jobs_or_without_gpus() -> None:
    run = deep([])
    run.fact(3, gpu_processes=1)
    with pytest.raises(PhaseSkipped, match="rank 3 on host-1 is used by 1 other"):
        diag(run)
    run.device = "cpu"
    with pytest.raises(PhaseSkipped, match="no GPUs"):
        diag(run)


def test_samples_of_a_gpu_under_load_are_returned_with_its_health_afterwards() -> None:
    def answer(request_name: str, rank: int, arguments: Mapping[str, Any]) -> Any:
        assert (request_name, arguments) == ("health", {"when": "after"})
        return [to_dict(healthy_gpu(rank, 1, when)) for when in ("loaded", "after")][rank:]

    run = ScriptedSession(3, answer)
    phases._health(run, "after")
    assert run.results.health == [], "there are no GPUs"
    run.device = "cuda"
    phases._health(run, "after")
    assert [(one.rank, one.when) for one in run.results.health] == [(0, "loaded"), (0, "after"), (1, "after")]
