"""Callbacks while Metaflow waits for a job."""

from __future__ import annotations

import pytest

from decorators import _metaflow
from decorators._metaflow import WaitedJob, jobs

KubernetesJobs = pytest.importorskip("metaflow.plugins.kubernetes.kubernetes_job")


def test_each_watcher_is_called_once_per_status_query_of_metaflow(monkeypatch: pytest.MonkeyPatch) -> None:
    jobsets = pytest.importorskip("metaflow.plugins.kubernetes.kubernetes_jobsets")
    for kind in (KubernetesJobs.RunningJob, jobsets.RunningJobSet):
        for name in ("is_done", "_fetch_job", "_fetch_jobset", "_fetch_pod"):
            if name in kind.__dict__:
                monkeypatch.setattr(kind, name, kind.__dict__[name])  # put back after the test
    monkeypatch.setattr(jobs, "_watchers", [])
    monkeypatch.setattr(jobs, "command_arguments", lambda: ["kubernetes"])
    monkeypatch.setattr(jobs, "remove_job_at_signal", lambda: None)
    monkeypatch.setattr(KubernetesJobs.RunningJob, "is_done", property(lambda _: False))
    first, second = list[WaitedJob](), list[WaitedJob]()
    one, two = first.append, second.append
    for watcher in (one, two, one):
        _metaflow.watch_waiting(watcher)
    job = object.__new__(KubernetesJobs.RunningJob)
    job._name, job._namespace, job._job = "t-1", "n", None
    assert not job.is_done
    assert [each.name for each in (*first, *second)] == ["t-1", "t-1"]
