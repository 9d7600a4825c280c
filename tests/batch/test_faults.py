"""Faults on AWS Batch: a run resumes, or ends soon with one line that names the reason and the job.

The limits are for a machine that does ten other things: what matters is that there is an end at all.
"""

from __future__ import annotations

import pickle
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.batch.lab import Client, Lab
from tests.conftest import write_sums
from tests.flows.conftest import FLOW, left_behind
from tests.flows.faults import READ_OUTCOME
from tests.lab import faulty_proxy, metadata
from tests.lab.batch_jobs import OUT_OF_MEMORY
from tests.lab.metadata import MetadataService
from tests.lab.small_engine import SMALL as SMALL_RANKS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CHECKLIST = FLOW.with_name("checklist_flow.py")
SMALL = Path(__file__).parent / "flows" / "small_flow.py"
STEPS = 60  # of a run whose ranks don't train
TOKEN = "hf_" + "TheTokenOfTheTestOnBatch" * 2
LIMIT_S = 900
END_S = 180


def small(lab: Lab, home: Path, *arguments: str, **environment: str) -> Client:
    return lab.start(home, "run", *arguments, flow=SMALL, **environment)


def waiting(run: Client) -> None:
    """Wait until all nodes of the step are running."""

    def working() -> bool:
        pods = [pod for job in run.jobs("work") for pod in job.pods]
        return len(pods) == 2 and all("works" in pod.log.read_text() for pod in pods)

    run.wait_for(working, LIMIT_S)


@pytest.mark.nightly
def test_short_task_ids_reach_all_nodes_and_an_oom_killed_container_is_retried(
    lab: Lab, tmp_path: Path
) -> None:
    with metadata.serve(lab.hub, MetadataService(first_id=1)) as new_service:
        run = small(lab, tmp_path, "--does=grow", METAFLOW_SERVICE_URL=new_service)
        assert run.end(LIMIT_S) == 0, run.log + run.pods_log()
        assert run.artifacts("SmallFlow")["seen"] == [(0, 1), (1, 1)]
    first, second = run.jobs("work")
    assert first.describe(0)["container"]["reason"] == OUT_OF_MEMORY
    assert (first.status, second.status) == ("FAILED", "SUCCEEDED")
    notes = lab.store.keys_below(f"metaflow/SmallFlow/finetune/plans/{run.run_id}/")
    assert [key.rpartition("/")[2] for key in notes] == ["work-attempt-0.killed"]
    task = first.request["parameters"]["metaflow.task_id"]
    assert len(task) == 1, "the service is new"
    next_command = first.nodes[1].command[-1]
    assert next_command.count("AWS_BATCH_JOB_NODE_INDEX") == 3
    assert f"--task-id {task}-node-$AWS_BATCH_JOB_NODE_INDEX " in next_command


@dataclass(frozen=True, kw_only=True)
class Interrupted:
    """A run whose training job lost machines and that was stopped after training finished."""

    run: Client
    nodes: tuple[int, ...]  # whose machines were lost, one after the other
    outcome: dict[str, Any]
    artifacts: dict[str, Any]


@pytest.fixture(scope="module")
def interrupted(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    """Run a flow that loses the machine of node 0, then that of node 1. Ranks use tests.lab.small_engine."""
    nodes = (0, 1)
    home = tmp_path_factory.mktemp("interrupted")
    data = write_sums(home / "sums.jsonl")
    launch_arguments = ["--with=batch", "--device=cpu", "--nodes=2", f"--dataset={data}"]
    steps = [f"--max-steps={STEPS}", "--checkpoint-every=5", "--epochs=9", "--global-batch-size=4"]
    steps += ["--seq-len=128", "--set=evaluation.fraction=0.1", *(f"--set={value}" for value in SMALL_RANKS)]
    run = lab.start(home, "run", *launch_arguments, *steps, HF_TOKEN=TOKEN)
    for number, node in enumerate(nodes, start=1):
        known = run.committed()
        run.wait_for(lambda known=known: run.committed() > known, LIMIT_S)
        lost = run.jobs("train_nodes")[-1]
        lost.lose_machine(node)
        run.wait_for(lambda number=number: f"Disruption {number} of at most 20" in run.log, END_S)
    run.wait_for(lambda: re.search(r"/train_nodes/\S+ .*Task finished successfully", run.log), LIMIT_S)
    outcome = pickle.loads(run.run_client(READ_OUTCOME, f"FinetuneFlow/{run.run_id}"))  # noqa: S301
    artifacts = run.artifacts()
    run.process.send_signal(signal.SIGTERM)
    assert run.end(END_S) != 0
    return Interrupted(run=run, nodes=nodes, outcome=outcome, artifacts=artifacts)


@pytest.mark.nightly
def test_lost_machines_cost_no_attempt(interrupted: Interrupted) -> None:
    run, jobs = interrupted.run, interrupted.run.jobs("train_nodes")
    for job, node in zip(jobs, interrupted.nodes, strict=False):
        who = f"node {job.id}#{node}: Host EC2 (instance i-{job.id[:8]}{node}) terminated. The step is sub"
        assert who in run.log
    assert [row["loss"] for row in interrupted.outcome["metrics"]] == [1 / n for n in range(1, STEPS + 1)]
    assert [job.status for job in jobs] == [*["FAILED"] * len(interrupted.nodes), "SUCCEEDED"]
    assert "(retry)" not in run.log
    assert "Traceback" not in run.log, run.log


@pytest.mark.nightly
def test_no_token_is_in_a_request_a_log_or_the_datastore(lab: Lab, interrupted: Interrupted) -> None:
    places = {"requests": str(lab.service.requests), "terminal": interrupted.run.log}
    places |= {"containers": interrupted.run.pods_log(), "plan": str(interrupted.artifacts)}
    assert [name for name, text in places.items() if TOKEN in text] == []
    assert [key for key, content in lab.store.objects().items() if TOKEN.encode() in content] == []


def test_a_sigint_to_the_launch_alone_terminates_the_jobs_and_leaves_no_process(
    lab: Lab, tmp_path: Path
) -> None:
    run = small(lab, tmp_path, "--does=wait")
    waiting(run)
    run.process.send_signal(signal.SIGINT)
    assert run.end(END_S) != 0
    (job,) = run.jobs()
    assert job.status == "FAILED"
    assert job.stop == "Metaflow initiated job termination."
    assert left_behind(tmp_path) == []


@pytest.mark.nightly
def test_a_lost_container_gives_a_checklist_verdict_that_blames_no_node(lab: Lab, tmp_path: Path) -> None:
    options = ["--nodes=2", "--device=cpu", "--profile=standard", "--skip=storage,datastore"]
    run = lab.start(tmp_path, "run", "--with", "batch", *options, flow=CHECKLIST)
    run.wait_for(lambda: _measured(lab, run), LIMIT_S)
    (job,) = run.jobs("check_nodes")
    job.pods[1].kill()
    assert run.end(END_S) != 0
    assert "Traceback" not in run.log, run.log
    artifacts = run.artifacts("ChecklistFlow")
    result = artifacts["result"]
    assert (result["verdict"], artifacts["bad_nodes"]) == ("NO-VERDICT", []), run.log
    assert len(result["nodes"]) == 2
    assert "Lost contact with node 1" in str(result["notes"])


def _measured(lab: Lab, run: Client) -> bool:
    """Return whether node 0 of a checklist has stored measurements."""
    return run.has_begun and bool(lab.store.keys_below(f"metaflow/ChecklistFlow/finetune/runs/{run.run_id}/"))


@pytest.mark.nightly
def test_a_busy_and_slow_datastore_only_delays_a_run(lab: Lab, tmp_path: Path) -> None:
    faults = faulty_proxy.Faults(busy_share=0.1, delay_s=0.05)
    with faulty_proxy.before(lab.store.url, faults, address=lab.hub.address, inside=lab.hub.inside) as url:
        run = small(lab, tmp_path, METAFLOW_S3_ENDPOINT_URL=url)
        assert run.end(LIMIT_S) == 0, run.log + run.pods_log()
        assert run.artifacts("SmallFlow")["seen"] == [(0, 0), (1, 0)]
    assert faults.refused > 3


def test_credentials_that_expire_during_a_run_end_it_with_one_line_that_names_the_job(
    lab: Lab, tmp_path: Path
) -> None:
    run = small(lab, tmp_path, "--does=wait")
    waiting(run)
    lab.service.fault = lambda _: (403, "ExpiredTokenException", "The security token is expired")
    try:
        code = run.process.wait(END_S)
        log = run.log
    finally:
        lab.service.fault = lambda _: None
        (job,) = run.jobs()
        job.stop = "the test is over"
    assert run.end(END_S) == code != 0
    assert "The AWS credentials have expired" in log
    assert f"aws batch terminate-job --job-id {job.id}" in log
    assert "Traceback" not in log
    assert left_behind(tmp_path) == []


@pytest.mark.nightly
def test_a_datastore_that_stays_unreachable_ends_the_run_and_its_job_with_one_line(
    lab: Lab, tmp_path: Path
) -> None:
    faults = faulty_proxy.Faults()
    with faulty_proxy.before(lab.store.url, faults, address=lab.hub.address, inside=lab.hub.inside) as url:
        settings_of_run = {"METAFLOW_S3_ENDPOINT_URL": url, "FINETUNE_DATASTORE_TIMEOUT": "0.2"}
        run = small(lab, tmp_path, "--does=wait", **settings_of_run)
        waiting(run)
        faults.gone = True
        assert run.end(END_S) != 0
    (job,) = run.jobs()
    assert job.status == "FAILED"
    (line,) = (line for line in run.log.splitlines() if f"batch job {job.id} was removed" in line)
    (seconds,) = re.findall(r"has not responded for (\d+) s", line)
    assert 12 <= int(seconds) < END_S, "the limit of 0.2 min, and the poll that ends it"
    assert "s3://" in line
    assert "Traceback" not in run.log
    assert left_behind(tmp_path) == []


def test_credentials_refused_by_the_datastore_are_named_before_anything_is_submitted(
    lab: Lab, tmp_path: Path
) -> None:
    data = write_sums(tmp_path / "sums.jsonl")
    launch_arguments = ["--with", "batch", "--device=cpu", "--nodes=2", f"--dataset={data}"]
    expired = faulty_proxy.Faults(expired=True)
    with faulty_proxy.before(lab.store.url, expired, address=lab.hub.address, inside=lab.hub.inside) as url:
        run = lab.start(tmp_path, "run", *launch_arguments, METAFLOW_S3_ENDPOINT_URL=url)
        assert run.end(END_S) == 2, "nothing was begun"
    assert "the AWS credentials have expired. Log in again" in " ".join(run.log.split())
    assert "Traceback" not in run.log
    assert run.jobs() == []
