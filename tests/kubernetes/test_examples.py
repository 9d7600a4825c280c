"""Example flows with training code of the user, on two pods of a control plane."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import pytest

from launchers.models import tiny_llama
from tests.kubernetes.cluster import Cluster, Launched
from tests.lab.control_plane import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

LIMIT_S = 600  # a minute on a machine that does nothing else
STEPS = 12_000


def _stored(cluster: Cluster, run: Launched) -> list[str]:
    """Return the keys of the run's checkpoints in its datastore."""
    assert run.process.poll() is None, run.full_log()
    if not run.has_begun:
        return []
    return cluster.store.keys_below(f"metaflow/DdpFlow/finetune/runs/{run.run_id}/own-checkpoints/")


@pytest.mark.nightly  # tests/decorators/test_own_script.py has it without pods
def test_plain_ddp_continues_from_its_checkpoint_after_a_node_is_lost(
    cluster: Cluster, tmp_path: Path
) -> None:
    launch_arguments = ["--with=kubernetes", f"--steps={STEPS}", "--checkpoint-every=1000"]
    run = cluster.launch("ddp_flow", tmp_path, "run", *launch_arguments, folder="examples")
    wait_for(lambda: _stored(cluster, run), LIMIT_S, "a checkpoint is stored", every=0.5)
    pods = {
        pod["metadata"]["labels"]["jobset.sigs.k8s.io/replicatedjob-name"]: pod
        for pod in cluster.pods()
        if "jobset.sigs.k8s.io/jobset-name" in pod["metadata"]["labels"]
    }
    worker, control = pods["worker"], cluster.pod(pods["control"])
    assert control is not None
    cluster.kubelet_of(worker).evict(worker["metadata"]["name"])
    wait_for(lambda: control.poll() is not None, 60, "the other node ends within seconds")
    assert run.wait(LIMIT_S) == 0, run.full_log()
    resumed = re.findall(r"resumes at step (\d+)", run.log)
    assert resumed, run.full_log()
    assert all(int(step) > 1000 for step in resumed)
    assert f"steps on each node: [{STEPS}, {STEPS}]" in run.log
    run.nothing_left()


@pytest.mark.nightly  # the path to pods is that of plain DDP
def test_trl_trains_on_two_pods(cluster: Cluster, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    texts = [{"text": f"Ticket {number}: the printer does not print."} for number in range(64)]
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps(row) for row in texts))
    with tempfile.TemporaryDirectory(dir="/var/tmp") as shared:
        model = tiny_llama.make(Path(shared, "tiny"), config={**tiny_llama.CONFIG, "num_hidden_layers": 1})
        result = [f"--model={model}", f"--data={tmp_path / 'texts.jsonl'}", "--steps=4"]
        run = cluster.launch("trl_flow", tmp_path, "run", "--with=kubernetes", *result, folder="examples")
        assert run.wait(LIMIT_S) == 0, run.full_log()
    assert "steps: 4" in run.log
    run.nothing_left()
