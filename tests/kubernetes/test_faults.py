"""Faults of a cluster: a run resumes from its last checkpoint, or ends soon with the reason and without pods.

The runs are real but for their ranks (tests.lab.small_engine); test_on_a_control_plane.py trains on pods.

The limits are for a machine that does ten other things: what matters is that there is an end at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import write_sums
from tests.decorators.conftest import FLOWS
from tests.flows.faults import READ_OUTCOME
from tests.kubernetes.cluster import NAMESPACE, Cluster, Launched
from tests.kubernetes.faults import (
    BIG,
    LIMIT_S,
    attempt_ends,
    delete,
    drained,
    lose_a_node,
    one_node_short,
    training,
    wait_for_line,
    worker_of,
)
from tests.lab import faulty_proxy
from tests.lab.control_plane import wait_for
from tests.lab.small_engine import SMALL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS, EVERY = 110, 5
END_S = 240  # for what ends at the first step of a flow
TRAINED = r"/train_nodes/\d+ \(pid \d+\)\] Task finished successfully"
UNDISTURBED = [1.0 / step for step in range(1, STEPS + 1)]  # losses of such ranks
GONE_S = 30  # for how long the API server is away
SHORT = [
    f"--max-steps={STEPS}",
    f"--checkpoint-every={EVERY}",
    "--epochs=9",
    "--global-batch-size=4",
    "--seq-len=128",
    "--set=evaluation.generations=0",
    "--set=evaluation.fraction=0.1",
    *(f"--set={value}" for value in SMALL),
]


# -- faults while nodes train ------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_run_survives_expired_login_four_lost_pods_and_an_api_server_restart(
    cluster: Cluster, tmp_path: Path
) -> None:
    """One run with all faults: no attempt is used, and its report equals that of an undisturbed run."""
    login, earlier = _robots_login(cluster), set(cluster.logs())
    run = _launch(cluster, tmp_path, "--no-preflight", KUBECONFIG=str(login))
    with _paused_first_pod(cluster, run):
        cluster.api.delete(ROBOT)
        wait_for_line(run, "rejects the credentials")
        _renew(cluster, login)

    first = training(cluster, run)
    cluster.kubelet_of(first["worker"]).evict(first["worker"]["metadata"]["name"])
    wait_for_line(
        run, f"Disruption 1 of at most 20, .* pod {worker_of(first)}: Evicted: The node was low on resource"
    )
    attempt_ends(cluster, first)

    second = training(cluster, run)
    lose_a_node(cluster, second)
    wait_for_line(run, f"Disruption 2 of at most 20, .* pod {worker_of(second)}: lost")
    attempt_ends(cluster, second)

    third = training(cluster, run)
    delete(cluster, third["worker"])
    wait_for_line(run, f"Disruption 3 of at most 20, .* pod {worker_of(third)}: deleted")

    fourth = training(cluster, run)
    with drained(cluster, fourth["worker"]):
        wait_for_line(run, f"Disruption 4 of at most 20, .* pod {worker_of(fourth)}: deleted")
        moved = training(cluster, run)
    assert fourth["worker"]["spec"]["nodeName"] not in {pod["spec"]["nodeName"] for pod in moved.values()}
    cluster.control_plane.stop_api_server()
    time.sleep(GONE_S)
    cluster.control_plane.start_api_server()
    wait_for_line(run, TRAINED)

    assert "The Kubernetes API does not respond" in run.log
    assert _losses(run) == UNDISTURBED
    # The terminal may lack the last lines of a job that was submitted again
    pods = "\n".join(text for name, text in cluster.logs().items() if name not in earlier)
    gone_on = [int(step) for step in re.findall(r"from the checkpoint of step (\d+)", pods)]
    assert len(gone_on) == 4, run.full_log()
    assert 0 < gone_on[0] <= gone_on[1] < gone_on[2] < gone_on[3] < STEPS
    # The workers that were told to go have made all store one more
    for step in gone_on[2:]:
        assert f"all have stopped, and the checkpoint of step {step} is stored" in pods
    assert "(retry)" not in run.log
    assert "Traceback" not in run.log, run.log
    _stop(run)


ROBOT = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/robot"


def _robots_login(cluster: Cluster) -> Path:
    """A kubeconfig of a launcher with a service account that can be deleted."""
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "robot", "namespace": NAMESPACE},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": "finetune-launcher",
        },
        "subjects": [{"kind": "ServiceAccount", "name": "robot", "namespace": NAMESPACE}],
    }
    plane = cluster.control_plane
    plane.apply(binding)
    return plane.kubeconfig("launcher", NAMESPACE, token=plane.service_account("robot", NAMESPACE))


def _renew(cluster: Cluster, login: Path) -> None:
    config = json.loads(login.read_text())
    config["users"][0]["user"]["token"] = cluster.control_plane.service_account("robot", NAMESPACE)
    login.write_text(json.dumps(config))


@contextlib.contextmanager
def _paused_first_pod(cluster: Cluster, run: Launched) -> Iterator[None]:
    """Stop the first pod of the run while the block runs."""
    before = len(cluster.hub.pods)
    wait_for(lambda: len(cluster.hub.pods) > before, END_S, "a pod starts")
    wait_for_line(run, "Task is starting")
    stopped = [psutil.Process(pid) for pid in cluster.hub.pods[before].pids()]
    for process in stopped:
        process.suspend()
    try:
        yield
    finally:
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


@pytest.mark.nightly
def test_an_oom_killed_pod_gets_a_leaner_plan_and_a_lost_s3_ends_the_run(
    cluster: Cluster, tmp_path: Path
) -> None:
    faults = faulty_proxy.Faults()
    hub = cluster.hub
    with faulty_proxy.before(cluster.store.url, faults, address=hub.address, inside=hub.inside) as url:
        run = _launch(
            cluster,
            tmp_path,
            "--no-preflight",
            METAFLOW_S3_ENDPOINT_URL=url,
            FINETUNE_DATASTORE_TIMEOUT="0.5",
        )
        first = training(cluster, run, attempt=0)
        worker = first["worker"]
        cluster.kubelet_of(worker).kill_for_memory(worker["metadata"]["name"])
        attempt_ends(cluster, first)
        wait_for_line(run, rf"pod {worker['metadata']['name']} on \S+ failed: OOMKilled \(exit code 137\)")
        wait_for_line(
            run, r"another plan because an earlier attempt ran out of memory: micro batch \d+ -> \d+"
        )

        training(cluster, run, attempt=1)
        faults.gone = True
        _ends(run)
        problem, advice = run.log.splitlines()[-2:]
        assert re.match(
            r"Error: The datastore s3://\S+ has not responded for 30 s .*; jobset \S+ was", problem
        )
        assert advice == "Check METAFLOW_S3_ENDPOINT_URL, the network and S3; then resume."
    assert "(retry)" not in run.log.rpartition("does not respond")[2]


@pytest.mark.nightly
def test_a_late_node_is_waited_for_and_a_deleted_job_ends_the_run(cluster: Cluster, tmp_path: Path) -> None:
    """The wait is reported once per minute; --pending-timeout counts from the last node that started."""
    with one_node_short(cluster):
        run = _launch(cluster, tmp_path, "--no-preflight", pods=BIG)
        missing = r"\(1 of 2 nodes running; waiting for \S+-worker-\S+\): .*Insufficient cpu"
        wait_for_line(run, rf"jobset \S+ is waiting {missing}")
        wait_for_line(run, rf"jobset \S+ is waiting for 60 s {missing}")
    wait_for_line(run, TRAINED)
    assert _losses(run) == UNDISTURBED
    assert "(retry)" not in run.log
    wait_for_line(run, r"/gather/\d+ \(pid \d+\)\] .* Task is starting")
    jobs = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"
    (name,) = [
        job["metadata"]["name"]
        for job in cluster.api.items(jobs)
        if f"/{run.run_id}/gather/" in json.dumps(job["spec"]["template"])
        and not job["status"].get("succeeded")
    ]
    cluster.api.delete(f"{jobs}/{name}", propagationPolicy="Background")
    _ends(run)
    last = run.log.splitlines()[-1]
    assert last == f"Step gather failed: The job {name} in namespace {NAMESPACE} was deleted."


@pytest.mark.nightly
def test_a_run_without_its_launcher_ends_by_itself_and_can_be_resumed(
    cluster: Cluster, tmp_path: Path
) -> None:
    lost = _launch(cluster, tmp_path, "--no-preflight")
    pods = training(cluster, lost)
    os.killpg(lost.process.pid, signal.SIGKILL)
    lost.wait(END_S)
    names = {pod["metadata"]["name"] for pod in pods.values()}
    wait_for(lambda: not names & set(cluster.running()), LIMIT_S, "the pods train to their end")
    origin = lost.run_id
    run = cluster.launch("finetune_flow", tmp_path, "resume", "--origin-run-id", origin)
    wait_for_line(run, rf"Cloning previously run task {origin}/train_nodes/")
    wait_for_line(run, r"/gather/\d+ \(pid \d+\)\] Task finished successfully")
    assert _losses(run) == UNDISTURBED
    _stop(run)


def _losses(run: Launched) -> list[float]:
    outcome = pickle.loads(run.read(READ_OUTCOME, f"FinetuneFlow/{run.run_id}"))  # noqa: S301
    assert [row["step"] for row in outcome["metrics"]] == list(range(1, STEPS + 1))
    return [row["loss"] for row in outcome["metrics"]]


def _stop(run: Launched) -> None:
    """Signal only the launching process, as a canceled CI job does."""
    run.process.terminate()
    run.wait(END_S)
    assert "Resume the run" in run.log, run.log
    run.nothing_left(90)  # a pod's grace, and more


# -- what never starts -------------------------------------------------------------------------------------


def _ends(run: Launched, *lines: str) -> None:
    """Check that the run ends soon with these lines, without a traceback, and without a pod."""
    assert run.wait(END_S) != 0, run.full_log()
    for line in lines:
        assert re.search(line, run.log), run.full_log()
    assert "Traceback" not in run.log, run.log
    run.nothing_left()


def _launch(
    cluster: Cluster, home: Path, *arguments: str, pods: str = "--with=kubernetes", **environment: str
) -> Launched:
    data = write_sums(home / "sums.jsonl")
    options = [pods, "--device=cpu", "--nodes=2", f"--dataset={data}", *SHORT, *arguments]
    return cluster.launch("finetune_flow", home, "run", *options, **environment)


def test_a_run_without_matching_gpus_reports_it_once_and_ends_without_a_pod(
    cluster: Cluster, tmp_path: Path
) -> None:
    """A node group that could grow but does not: the wait must end at its timeout."""
    status = "autoscalerStatus: Running\nnodeGroups:\n- name: gpus\n  health: {maxSize: 4}\n"
    path = "/api/v1/namespaces/kube-system/configmaps"
    cluster.api.create(path, {"metadata": {"name": "cluster-autoscaler-status"}, "data": {"status": status}})
    jobs = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"
    earlier = {job["metadata"]["uid"] for job in cluster.api.items(jobs)}
    command = [sys.executable, str(FLOWS / "profiled.py"), "run", "--with", "kubernetes"]
    with (tmp_path / "log").open("w") as output:
        run = cluster.hub.popen(
            [*command, "--model=llama-8b", "--pending-timeout=0.25"],
            cluster.environment(tmp_path),
            cwd=tmp_path,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        code = run.wait(600)
    cluster.api.delete(f"{path}/cluster-autoscaler-status")
    log = (tmp_path / "log").read_text()
    assert code != 0, log
    assert "Can Kubernetes context lab" in log, log  # what is unknown is shown, and stops nobody
    # The scheduler speaks of the selector or of the GPUs, whichever it checks first; once
    assert len(re.findall(r" is waiting: 0/\d+ nodes are available", log)) == 1, log
    *_, problem, advice = log.splitlines()
    assert re.match(r"Error: job \S+ had not started after 15 s", problem), log
    assert "--pending-timeout MINUTES" in advice
    assert "Traceback" not in log
    assert "attempt 1" not in log  # waiting again would not help
    wait_for(lambda: not cluster.running(), 60, f"no pod is left: {cluster.running()}")
    run_jobs = [job for job in cluster.api.items(jobs) if job["metadata"]["uid"] not in earlier]
    assert all(job.get("status", {}).get("succeeded") for job in run_jobs), run_jobs


@pytest.mark.nightly  # tests/decorators/backends/kubernetes/test_errors.py has the server's answers
def test_a_user_without_rights_gets_the_servers_refusal(cluster: Cluster, tmp_path: Path) -> None:
    config = str(cluster.control_plane.kubeconfig("nobody", NAMESPACE))
    run = _launch(cluster, tmp_path, "--no-preflight", KUBECONFIG=config)
    _ends(run)
    problem, advice = run.log.splitlines()[-2:]
    assert re.match(r"Error: Kubernetes refuses: .*User \"nobody\" cannot create resource \"jobs\"", problem)
    assert "rbac-launcher.yaml" in advice


def test_a_user_without_rights_is_refused_before_anything_is_submitted(
    cluster: Cluster, tmp_path: Path
) -> None:
    """tests/decorators/backends/kubernetes/test_preflight.py has every case without a run of the flow."""
    before = {job["metadata"]["uid"] for job in cluster.api.items("/apis/batch/v1/jobs")}
    config = str(cluster.control_plane.kubeconfig("nobody", NAMESPACE))
    _ends(_launch(cluster, tmp_path, KUBECONFIG=config), r"create jobs", "kubectl|infra/kubernetes")
    after = {job["metadata"]["uid"] for job in cluster.api.items("/apis/batch/v1/jobs")}
    assert after <= before
