"""A training run uses the newest checklist of its cluster: it stops, avoids bad nodes, uses the bandwidth."""

from __future__ import annotations

import dataclasses
import json
import re
import socketserver
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from checklist import result as results
from checklist.outputs.taint import EFFECT, KEY, LABEL
from checklist.result import SCHEMA_VERSION, Result
from checklist.verdict import judge
from estimator.plan import Plan
from flows.cluster_check import gate
from flows.cluster_check.gate import Checked
from tests.checklist.clusters import Cluster
from tests.checklist.runs import cpu_run, gpu_run, with_pairs
from tests.checklist.servers import Api, kubeconfig, nodes_api
from tests.flows.conftest import FLOW, environment

# Leaves what the checklist flow's step `verdict` leaves, with results that no machine here could measure
STAND_IN = """
import json, os
from metaflow import FlowSpec, step

class ChecklistFlow(FlowSpec):
    @step
    def start(self):
        self.cluster = os.environ["CLUSTER"]
        self.next(self.verdict)

    @step
    def verdict(self):
        assert self.cluster != "broken"
        with open(os.environ["RESULT"]) as file:
            self.result = json.load(file)
        self.next(self.end)

    @step
    def end(self):
        assert self.result["verdict"] != "FAIL"

if __name__ == "__main__":
    ChecklistFlow()
"""
ASK = """
import json, sys
from metaflow import get_namespace, namespace
namespace("user:somebody")
from flows.cluster_check.gate import newest
found, problem = newest(sys.argv[1], limit_s=float(sys.argv[2]))
named = found and [found.run, found.result.verdict, found.result.headline]
print(json.dumps([named, problem, get_namespace()]))
"""
ROOT = FLOW.parents[1]
HOUR, DAY = 3600.0, 86_400.0


def healthy(age_s: float = 60.0, nodes: int = 8, **changes: Any) -> Result:
    run = gpu_run(nodes)
    return judge(dataclasses.replace(run, started_unix=time.time() - run.seconds - age_s, **changes))


def slow(age_s: float = 60.0) -> Result:
    share = {2: 0.25}
    run = with_pairs(gpu_run(8), Cluster(nodes=8, speed=45, transmit=share, receive=share))
    return judge(dataclasses.replace(run, started_unix=time.time() - run.seconds - age_s))


def checked(result: Result) -> Checked:
    return Checked(run="ChecklistFlow/7", result=result, age_s=time.time() - result.finished_unix)


def store_result(home: Path, cluster: str, result: Result, **changes: Any) -> None:
    """Run the flow that stores this result for that cluster."""
    flow, file = home / "checklist_flow.py", home / "result.json"
    flow.write_text(STAND_IN)
    file.write_text(json.dumps({**json.loads(results.to_json(result)), **changes}))
    subprocess.run(
        [sys.executable, str(flow), "--no-pylint", "run"],
        cwd=home,
        env=environment(home, CLUSTER=cluster, RESULT=str(file), METAFLOW_USER="nightly"),
        capture_output=True,
        timeout=200,
        check=False,
    )


def newest(home: Path, cluster: str, limit_s: float = 60, **variables: str) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-c", ASK, cluster, str(limit_s)],
        cwd=ROOT,
        env=environment(home, **variables),
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    read: list[Any] = json.loads(done.stdout)
    return read


def finetune(home: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FLOW), "--no-pylint", *arguments],
        cwd=home,
        env=environment(home, **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )


# ---- what it says


def test_a_run_is_refused_after_a_checklist_failure_within_a_day_with_the_override_option() -> None:
    error = checked(slow(3 * HOUR)).refusal("kubernetes")
    assert error.problem.startswith(
        "The checklist of this cluster failed 3.0 h ago (ChecklistFlow/7): host-2 is slow in both directions"
    )
    assert error.problem.endswith(" Bad nodes: host-2.")
    *_, advice, anyway = error.advice.splitlines()
    assert advice == "Then run the checklist again: finetune check --with kubernetes"
    assert anyway == "To train anyway: --ignore-checklist"
    resumed = checked(slow()).refusal("local", resumes=True)
    assert resumed.advice.endswith("METAFLOW_RUN_IGNORE_CHECKLIST=1 before the command")


def test_an_older_failure_or_missing_verdict_is_one_line_and_a_pass_prints_nothing() -> None:
    old = checked(slow(25 * HOUR))
    assert old.refusal("batch") is None
    assert old.remarks()[0].startswith(
        "The checklist of this cluster failed 25.0 h ago (ChecklistFlow/7): host-2"
    )
    unknown = checked(judge(dataclasses.replace(gpu_run(8), pairs=())))
    assert unknown.refusal("batch") is None
    assert "had no verdict" in unknown.remarks()[0]
    assert checked(healthy()).refusal("batch") is None
    assert checked(healthy()).remarks() == ()


def test_the_bandwidth_between_nodes_is_the_one_measured_by_the_checklist() -> None:
    result_made = healthy()
    bandwidth = checked(result_made).bandwidth()
    assert bandwidth.inter_node_gbytes_per_s == result_made.busbw_gbytes_per_s is not None
    assert bandwidth.intra_node_gbytes_per_s is None
    assert bandwidth.source == "ChecklistFlow/7, all_reduce of 16.0 GiB over 8 nodes"
    assert bandwidth.date == time.strftime("%Y-%m-%d", time.gmtime(result_made.finished_unix))


def test_bandwidth_measured_on_one_node_does_not_apply_between_nodes() -> None:
    bandwidth = checked(healthy(nodes=1)).bandwidth()
    assert bandwidth.inter_node_gbytes_per_s is None
    assert bandwidth.intra_node_gbytes_per_s == pytest.approx(480 * 2 * 7 / 8 / 2)
    assert bandwidth.source.endswith("over the 8 GPUs of a node")


@pytest.mark.parametrize(
    "result_made",
    [
        healthy(age_s=31 * DAY),
        healthy(local=True),
        healthy(collectives=()),
        judge(cpu_run(2, started_unix=time.time() - 100)),
    ],
    ids=["a month old", "nodes of one machine", "not measured", "gloo"],
)
def test_results_without_network_measurements_do_not_replace_the_data_sheet(result_made: Result) -> None:
    assert checked(result_made).bandwidth() is None


def plan_for(gpu: str | None, instance: str | None) -> Plan:
    from estimator import Job, Target, plan
    from estimator.models import find

    training_plan = plan(Job(model=find("llama-8b"), method="lora"), Target(kind="kubernetes"))
    return dataclasses.replace(
        training_plan,
        request=dataclasses.replace(training_plan.request, gpu_type=gpu, instance_type=instance),
    )


def test_bandwidth_of_another_instance_type_is_ignored() -> None:
    of = checked(healthy()).covers
    assert of(plan_for("H100 SXM", "p5.48xlarge"))
    assert not of(plan_for("H100 SXM", "p5e.48xlarge"))
    assert not of(plan_for("A100 SXM 80GB", None))
    assert not of(plan_for(None, None))


# ---- bad nodes


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    served = Api(8)
    with nodes_api(served) as url:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, url)))
        yield served


def labeled(api: Api, **values: str) -> None:
    for name, node in api.nodes.items():
        node["metadata"]["labels"][LABEL] = values.get(name.replace("-", ""), "true")


def test_faulty_nodes_are_excluded_by_the_label_of_healthy_nodes_at_any_age(api: Api) -> None:
    labeled(api, host2="false")
    exclusion = gate.exclude_nodes(checked(slow(90 * DAY)), "kubernetes")
    assert exclusion.labels == ((LABEL, "true"),)
    assert exclusion.lines == (f"Excluded by requiring the label {LABEL}=true: host-2.",)


def test_a_tainted_node_needs_no_label(api: Api) -> None:
    api.nodes["host-2"]["spec"]["taints"].append({"key": KEY, "value": "true", "effect": EFFECT})
    exclusion = gate.exclude_nodes(checked(slow()), "kubernetes")
    assert exclusion.labels == ()
    assert exclusion.lines == (f"Excluded by their taint {KEY}: host-2.",)


@pytest.mark.parametrize("marks", [{}, {"host2": "true"}], ids=["unlabeled", "called fit"])
def test_a_node_that_is_not_excluded_is_named_with_the_command_for_it(
    api: Api, marks: dict[str, str]
) -> None:
    if marks:
        labeled(api, **marks)
    exclusion = gate.exclude_nodes(checked(slow()), "kubernetes")
    assert exclusion.labels == ()
    assert exclusion.lines == (
        f"Not excluded: host-2. To exclude it: kubectl taint nodes host-2 {KEY}=true:NoSchedule",
    )


def test_faulty_nodes_are_reported_in_one_line_on_batch_or_without_access_to_nodes(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.refuse["GET"] = 403
    (line,) = gate.exclude_nodes(checked(slow()), "kubernetes").lines
    assert line.startswith("Nodes that failed the checklist: host-2. Their taints could not be read:")
    (line,) = gate.exclude_nodes(checked(slow()), "batch").lines
    assert line.endswith("batch cannot avoid them: terminate those machines.")
    assert gate.exclude_nodes(checked(healthy()), "batch") == gate.NodeExclusion()
    assert gate.exclude_nodes(checked(slow()), "local") == gate.NodeExclusion()


# ---- where it is read


@pytest.mark.nightly
@pytest.mark.slow
def test_the_newest_verdict_of_the_same_cluster_counts_for_all_users(tmp_path: Path) -> None:
    assert newest(tmp_path, "kubernetes:a/train") == [None, None, "user:somebody"]
    store_result(tmp_path, "kubernetes:a/train", healthy())
    store_result(tmp_path, "kubernetes:a/train", slow())
    store_result(tmp_path, "kubernetes:b/train", healthy(), version=7)
    store_result(tmp_path, "broken", healthy())

    checked_result, problem, namespace = newest(tmp_path, "kubernetes:a/train")
    assert checked_result[1] == "FAIL", "its run has failed, its verdict has not"
    assert checked_result[2].startswith("host-2 is slow")
    assert re.fullmatch(r"ChecklistFlow/\d+", checked_result[0])
    assert (problem, namespace) == (None, "user:somebody")
    checked_result, problem, _ = newest(tmp_path, "kubernetes:b/train")
    assert checked_result is None
    assert re.fullmatch(
        r"The newest checklist of this cluster \(ChecklistFlow/\d+\) cannot be used: The result has schema "
        rf"version 7; this program reads {SCHEMA_VERSION}\.",
        problem,
    )
    assert newest(tmp_path, "broken")[:2] == [None, None]


@pytest.mark.slow
def test_a_hanging_or_missing_metadata_service_does_not_delay_a_run(tmp_path: Path) -> None:
    class Silent(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while self.request.recv(4096):
                pass

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Silent) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        service = {
            "METAFLOW_DEFAULT_METADATA": "service",
            "METAFLOW_SERVICE_URL": f"http://127.0.0.1:{server.server_address[1]}",
        }
        checked_result, problem, _ = newest(tmp_path, "kubernetes:a/train", limit_s=1, **service)
        server.shutdown()
    assert checked_result is None
    assert problem == "No checklist of this cluster was found within 1 s."


# ---- the flow


@pytest.mark.slow
def test_a_failed_checklist_of_the_cluster_stops_a_run_before_anything_is_submitted(
    tmp_path: Path,
) -> None:
    store_result(tmp_path, "prod", slow(3 * HOUR))
    for arguments in (("run",), ("run", "--plan-only")):
        stopped = finetune(tmp_path, *arguments, FINETUNE_CLUSTER="prod")
        assert stopped.returncode == 2
        assert "The checklist of this cluster failed 3.0 h ago" in stopped.stdout
        assert "Bad nodes: host-2." in stopped.stdout
        assert "Traceback" not in stopped.stdout
    assert not (tmp_path / ".metaflow" / "FinetuneFlow").exists(), "no run has begun"

    ignored = finetune(tmp_path, "run", "--plan-only", "--ignore-checklist", FINETUNE_CLUSTER="prod")
    assert ignored.returncode == 0
    assert "The checklist of this cluster failed 3.0 h ago" in ignored.stdout
    assert "Plan: tiny-llama" in ignored.stdout
    elsewhere = finetune(tmp_path, "run", "--plan-only", FINETUNE_CLUSTER="test")
    assert elsewhere.returncode == 0
    assert "checklist" not in elsewhere.stdout
