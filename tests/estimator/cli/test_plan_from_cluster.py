"""``finetune plan --from-cluster``: the command in a process of its own, against a server of nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.estimator.hardware.test_from_cluster import (
    CPU_NODE,
    Api,
    eks_p5,
    gke_l4,
    serving_api,
    write_kubeconfig,
)


def run(home: Path, url: str, *words: str) -> subprocess.CompletedProcess[str]:
    (home / ".kube").mkdir(exist_ok=True)
    write_kubeconfig(home, training=url)
    return subprocess.run(
        [sys.executable, "-m", "estimator.cli.app", "plan", "--from-cluster", *words],
        env=os.environ | {"KUBECONFIG": str(home / ".kube" / "config")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def plans(home: Path, nodes: list[dict[str, Any]], *words: str) -> list[dict[str, Any]]:
    with serving_api(Api(nodes=nodes)) as url:
        done = run(home, url, *words, "--json")
    assert done.returncode == 0, done.stderr
    return [plan["request"] for plan in json.loads(done.stdout)["plans"]]


def test_no_plan_asks_for_more_nodes_or_other_machines_than_the_cluster_has(tmp_path: Path) -> None:
    cluster = [eks_p5(1), eks_p5(2), gke_l4(3), CPU_NODE]
    found = plans(tmp_path, cluster, "--model", "llama-70b", "--method", "lora")
    assert found
    assert {request["instance_type"] for request in found} <= {"p5.48xlarge", "g2-standard-8"}
    assert max(request["nodes"] for request in found) <= 2
    assert found[0]["gpu"] == "H100 SXM"


def test_what_the_cluster_can_not_hold_is_one_clear_answer(tmp_path: Path) -> None:
    with serving_api(Api(nodes=[gke_l4(1)])) as url:
        done = run(tmp_path, url, "--model", "llama-70b", "--method", "full")
    assert done.returncode == 1
    assert "llama-70b" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_cluster_without_gpus_is_told(tmp_path: Path) -> None:
    with serving_api(Api(nodes=[CPU_NODE])) as url:
        done = run(tmp_path, url, "--model", "llama-8b")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "GPU" in done.stderr
