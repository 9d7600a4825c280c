"""The checklist on a cluster that removes a pod: it gives a verdict that blames no node."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kubernetes.cluster import Cluster, Launched
from tests.lab.api import Json
from tests.lab.control_plane import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(900)]

LIMIT_S = 600


def test_an_evicted_pod_is_named_and_its_earlier_measurements_are_judged(
    cluster: Cluster, tmp_path: Path
) -> None:
    options = ["--nodes=2", "--device=cpu", "--profile=standard", "--skip=storage,datastore"]
    run = cluster.launch("checklist_flow", tmp_path, "run", "--with", "kubernetes", *options)
    wait_for(lambda: _measured(cluster, run), LIMIT_S, "the first phase is over")
    worker = _worker(cluster, run)
    cluster.kubelet_of(worker).evict(worker["metadata"]["name"])

    assert run.wait(LIMIT_S) != 0, run.full_log()
    name, node = worker["metadata"]["name"], worker["spec"]["nodeName"]
    assert f"pod {name} on {node} failed: Evicted: The node was low on resource: memory." in run.log
    assert "Traceback" not in run.log, run.log
    artifacts = run.artifacts("ChecklistFlow")
    result = artifacts["result"]
    assert (result["verdict"], artifacts["bad_nodes"], artifacts["healthy_nodes"]) == (
        "NO-VERDICT",
        [],
        [],
    ), run.full_log()
    assert len(result["nodes"]) == 2
    assert f"pod {name} on {node} failed: Evicted" in str(result["notes"])
    run.nothing_left()


def _measured(cluster: Cluster, run: Launched) -> bool:
    """Return whether node 0 has stored measurements."""
    assert run.process.poll() is None, run.full_log()
    return run.has_begun and bool(
        cluster.store.keys_below(f"metaflow/ChecklistFlow/finetune/runs/{run.run_id}/")
    )


def _worker(cluster: Cluster, run: Launched) -> Json:
    (matching_pod,) = (
        pod
        for pod in cluster.pods()
        if pod["metadata"].get("annotations", {}).get("metaflow/run_id") == run.run_id
        and pod["metadata"]["labels"].get("jobset.sigs.k8s.io/replicatedjob-name") == "worker"
    )
    return matching_pod
