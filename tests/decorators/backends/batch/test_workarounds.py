"""Faults of Metaflow with several nodes on AWS Batch are refused at launch or corrected."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from metaflow.exception import MetaflowException
from metaflow.plugins.aws.batch.batch_client import BatchJob, RunningJob

from decorators import _metaflow
from decorators.backends.batch import errors, workarounds
from decorators.backends.interface import ClusterFacts, StepRequest
from decorators.backends.options import Options
from decorators.backends.registry import BACKENDS
from estimator.errors import UserError
from tests.decorators.backends.plans import planned

# As Metaflow 2.19.39 writes it, shortened where nothing is replaced.
COMMAND = (
    "true && mkdir -p $PWD/.logs && export PYTHONUNBUFFERED=x MF_PATHSPEC=FinetuneFlow/12/train_nodes/{task} "
    "MF_DATASTORE=s3 MF_ATTEMPT=0 MFLOG_STDOUT=$PWD/.logs/mflog_stdout && python -c 'import boto3; "
    'boto3.client("s3").download_file("bucket", "flows/data/9f/19f25c9b", "job.tar")\' && '
    "(python -u finetune_flow.py --quiet --metadata service --datastore s3 step train_nodes --run-id 12 "
    "--task-id {task} --input-paths ${{METAFLOW_INPUT_PATHS_0}} --split-index 0 --ubf-context ubf_control "
    "[multinode-args] 1>> >(python -m tee) 2>> >(python -m tee)); c=$?; exit $c"
)


class Recorder:
    """A replacement for the boto3 client: submissions of Metaflow pass through the guard, as in a run."""

    submitted: dict[str, Any]

    def submit_job(self, **params: Any) -> dict[str, str]:
        self.submitted = workarounds.correct(params)
        return {"jobId": "j"}


def submitted(task: str, *, guarded: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Return the two commands that the Metaflow client submits for a step on two nodes."""
    if not guarded:
        monkeypatch.setattr(workarounds, "correct", lambda params: params)
    monkeypatch.setattr(RunningJob, "update", lambda job: job)  # looks in a busy loop, once a second
    client = Recorder()
    job = BatchJob(client)
    job.image("i").iam_role("r").task_id(task).parameter("metaflow.task_id", task)
    job.command(["bash", "-c", COMMAND.format(task=task)])
    job.num_parallel = 2
    job.execute()
    main, node_commands = client.submitted["nodeOverrides"]["nodePropertyOverrides"]
    return main["containerOverrides"]["command"][-1], node_commands["containerOverrides"]["command"][-1]


@pytest.mark.parametrize("task", ["517006", "control-517006-0"])
def test_a_command_with_a_long_task_id_is_equivalent_to_that_of_metaflow(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, guarded = submitted(task, guarded=True, monkeypatch=monkeypatch)
    own_main, metaflow_command = submitted(task, guarded=False, monkeypatch=monkeypatch)
    assert main == own_main == COMMAND.format(task=task).replace("[multinode-args]", "--split-index 0")
    assert guarded == metaflow_command


@pytest.mark.parametrize("task", ["12", "1"])
def test_a_short_task_id_is_replaced_only_where_it_names_the_task(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, guarded = submitted(task, guarded=True, monkeypatch=monkeypatch)
    _, long = submitted("517006", guarded=True, monkeypatch=monkeypatch)
    assert guarded == long.replace("517006", task)
    assert guarded.count(f"{task}-node-$AWS_BATCH_JOB_NODE_INDEX") == 2
    _, metaflow_command = submitted(task, guarded=False, monkeypatch=monkeypatch)
    assert metaflow_command != guarded, "Metaflow does it right by now: the guard can go"


def test_single_node_jobs_and_other_commands_are_unchanged() -> None:
    one = {"containerOverrides": {"command": ["bash", "-c", "x"]}, "parameters": {"metaflow.task_id": "1"}}
    assert workarounds.correct(dict(one)) == one
    assert workarounds.others_command("python step --task-id 1", "1") is None


@pytest.mark.parametrize(
    ("backend", "nodes", "metadata", "refused"),
    [
        ("batch", 2, "local", True),
        ("batch", 1, "local", False),
        ("batch", 2, "service", False),
        ("kubernetes", 2, "local", False),
    ],
)
def test_local_metadata_is_refused_for_several_nodes_of_batch_only(
    backend: Any, nodes: int, metadata: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_metaflow, "metadata_kind", lambda: metadata)
    request = replace(planned("llama-8b", "lora", "L40S", 1).request, nodes=nodes)
    step_request = StepRequest(backend=backend, request=request, options=Options(preflight=False))
    if not refused:
        assert BACKENDS[backend].preflight(step_request) == ClusterFacts()
        return
    for check in (BACKENDS[backend].preflight, BACKENDS[backend].offered):
        with pytest.raises(UserError, match="metadata service") as caught:
            check(step_request)
        assert "METAFLOW_SERVICE_URL" in caught.value.advice


def answer(code: str, message: str) -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": message}}, "SubmitJob")


@pytest.mark.parametrize(
    ("error", "problem", "advice"),
    [
        (answer("ExpiredTokenException", "The security token is expired"), "have expired", "aws sso login"),
        (answer("AccessDeniedException", "User ann is not authorized"), "not authorized", "infra/aws"),
        (answer("ClientException", "JobQueue q not found"), "JobQueue q not found", "configure show"),
        (MetaflowException("AWS Batch Job Queue q not found."), "Job Queue q not found", "configure show"),
        (EndpointConnectionError(endpoint_url="http://b"), "cannot be reached", "AWS_DEFAULT_REGION"),
    ],
)
def test_an_error_of_aws_is_reported_in_two_lines_with_advice(
    error: Exception, problem: str, advice: str
) -> None:
    explanation = errors.explain(error, "")
    assert problem in explanation.problem
    assert advice in explanation.advice
    assert "\n" not in explanation.problem + explanation.advice
    final_explanation = errors.explain(error, "job-1")
    assert re.search(r"aws batch terminate-job --job-id job-1", final_explanation.advice)
