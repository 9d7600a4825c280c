"""A container killed for memory is recorded for the next attempt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from decorators import _metaflow, usage
from decorators._metaflow import WaitedJob
from decorators.backends import oom_kills
from decorators.backends.kubernetes import errors
from estimator.plan import MIB
from estimator.rightsizing.usage import Sizes
from launchers.run.replanning import Replanning, plans_key
from launchers.store.bundles import LocalStorage
from tests.decorators.backends.kubernetes.test_errors import Pods, pod

KILLED = "OutOfMemoryError: Container killed due to memory usage"


@pytest.fixture
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Replanning:
    """Stored plans of the attempts of run 7; this process waits for attempt 1 of its step train."""
    storage = LocalStorage(tmp_path)
    monkeypatch.setattr(oom_kills, "datastore", lambda: storage)
    monkeypatch.setattr(_metaflow, "waited_attempt", lambda: ("7", "train", 1))
    monkeypatch.setattr(_metaflow, "waited_task", lambda: "3")
    monkeypatch.setattr(_metaflow, "flow_name", lambda: "SomeFlow")
    monkeypatch.setattr(usage, "usage_storage", lambda: storage)
    monkeypatch.setenv(usage.SIZES_VARIABLE, "{}")
    usage.set_sizes("train", Sizes(cpu=2, memory_mib=4000))
    return Replanning(storage=storage, prefix=plans_key("7"))


def test_an_oom_killed_pod_is_recorded_for_the_next_attempt(
    plans: Replanning, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(name: str, reason: str, code: int) -> dict[str, Any]:
        state = {"terminated": {"reason": reason, "exitCode": code}}
        return pod(name, phase="Failed", containerStatuses=[{"state": state}])

    job = WaitedJob(backend="kubernetes", kind="jobset", name="js-1", namespace="n")
    monkeypatch.setattr(errors, "ClusterApi", lambda: Pods(ended("w-0", "Error", 137)))
    errors.failed_pods(job)
    assert plans.killed_container("train", 1) is None
    both = Pods(ended("w-0", "Error", 1), ended("w-1", "OOMKilled", 137))
    monkeypatch.setattr(errors, "ClusterApi", lambda: both)
    assert errors.failed_pods(job)[1] == "pod w-1 on node-a failed: OOMKilled (exit code 137)"
    assert plans.killed_container("train", 1) == "pod w-1"
    assert plans.killed_container("train", 0) is None
    (record,) = usage.read_history(plans.storage, "SomeFlow", "train")
    assert (record.run, record.task, record.attempt, record.ending) == ("7", "3", 1, "out of memory")
    assert record.requested.memory_mib == 4000
    assert record.memory_bytes == 4000 * MIB, "its limit, which no sample has seen"


class Jobs:
    """A replacement for the Batch client of boto3."""

    def __init__(self, *reasons: str) -> None:
        self.reasons = reasons

    def describe_jobs(self, jobs: list[str]) -> dict[str, Any]:
        records = zip(jobs, self.reasons, strict=True)
        return {"jobs": [{"jobId": name, "container": {"reason": reason}} for name, reason in records]}


@pytest.mark.parametrize(
    ("info", "client", "failed_container"),
    [
        ({"container": {"reason": KILLED}}, Jobs(), "batch job b-1"),
        ({"container": {"exitCode": 1}, "attempts": [{"container": {"exitCode": 1}}]}, Jobs(), None),
        ({"attempts": [{"container": {"reason": KILLED}}]}, Jobs(), "batch job b-1"),
        ({"nodeProperties": {"numNodes": 2}}, Jobs("", KILLED), "batch job b-1#1"),
        ({"nodeProperties": {"numNodes": 2}}, Jobs("", ""), None),
    ],
)
def test_an_oom_killed_batch_container_is_found_on_any_node(
    info: dict[str, Any], client: Jobs, failed_container: str | None
) -> None:
    job = WaitedJob(
        backend="batch", kind="batch job", name="b-1", client=client, info={"jobId": "b-1", **info}
    )
    assert oom_kills.in_batch_job(job) == failed_container


def test_a_failure_to_record_an_oom_kill_does_not_hide_the_error(
    plans: Replanning, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise OSError("no datastore")

    monkeypatch.setattr(oom_kills, "datastore", broken)
    oom_kills.note("pod w-1")
    assert "pod w-1 ran out of memory" in capsys.readouterr().err
