"""AWS Batch on one machine: its REST interface, and an executor that runs submitted commands as pods.

Requests and answers are checked against botocore's model of the service, and against rules that the model
doesn't hold but the service enforces. What is emulated of a multi-node parallel job (AWS Batch user guide,
"Multi-node parallel jobs"): the nodes' environment; the job ends, and with it its other nodes, when the main
node's container ends; no retries but those that the request asks for, of which Metaflow asks for none.

A queue has one kind of machine. A job whose nodes don't fit stays RUNNABLE, with the reason, as with Batch.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.lab import metadata
from tests.lab.batch_jobs import Job, Queue, Record, arn, nodes_of, now
from tests.lab.batch_model import Invalid, check_request, check_response, operation_of
from tests.lab.pods import Exit, Hub, PodSpec

GRACE_S = 2.0  # from SIGTERM to SIGKILL for a job that is terminated; ECS waits for 30
Fault = Callable[[str], tuple[int, str, str] | None]


class BatchService:
    """Queues, definitions and jobs. ``requests``: operation and body of every call."""

    def __init__(self, hub: Hub, queues: list[Queue], role: Mapping[str, str]) -> None:
        """``role``: environment variables that the role of a job gives to its containers."""
        self._hub, self._role = hub, role
        self.queues = {queue.name: queue for queue in queues}
        self.definitions: dict[str, Record] = {}
        self.jobs: dict[str, Job] = {}
        self.requests: list[tuple[str, Record]] = []
        self.fault: Fault = lambda _: None
        self._threads: list[threading.Thread] = []

    def call(self, operation: str, body: Record) -> Record:
        """Answer one request. Raises Invalid."""
        self.requests.append((operation, body))
        check_request(operation, body)
        answers: dict[str, Callable[[Record], Record]] = {
            "DescribeJobQueues": self._describe_queues,
            "DescribeComputeEnvironments": self._describe_environments,
            "DescribeJobDefinitions": self._describe_definitions,
            "RegisterJobDefinition": self._register,
            "SubmitJob": self._submit,
            "DescribeJobs": self._describe_jobs,
            "ListJobs": self._list_jobs,
            "TerminateJob": self._terminate,
        }
        if operation not in answers:
            raise Invalid(f"this Batch knows no {operation}")
        answer = answers[operation](body)
        check_response(operation, answer)
        return answer

    def _describe_queues(self, body: Record) -> Record:
        names = [_short(name) for name in body.get("jobQueues") or self.queues]
        return {"jobQueues": [self.queues[name].describe() for name in names if name in self.queues]}

    def _describe_environments(self, body: Record) -> Record:
        names = [_short(name) for name in body.get("computeEnvironments") or self.queues]
        environments = [self.queues[name].describe_environment() for name in names if name in self.queues]
        return {"computeEnvironments": environments}

    def _describe_definitions(self, body: Record) -> Record:
        definition_name, named = body.get("jobDefinitionName"), body.get("jobDefinitions")
        definitions = [
            definition
            for definition in self.definitions.values()
            if (definition_name is None or definition["jobDefinitionName"] == definition_name)
            and (not named or definition["jobDefinitionArn"] in named)
        ]
        return {"jobDefinitions": definitions}

    def _register(self, body: Record) -> Record:
        name = body["jobDefinitionName"]
        revision = 1 + sum(each["jobDefinitionName"] == name for each in self.definitions.values())
        arn_of_revision = arn("job-definition", f"{name}:{revision}")
        revision_record = {"jobDefinitionArn": arn_of_revision, "revision": revision, "status": "ACTIVE"}
        self.definitions[arn_of_revision] = {**body, **revision_record}
        return {"jobDefinitionName": name, "jobDefinitionArn": arn_of_revision, "revision": revision}

    def _submit(self, body: Record) -> Record:
        definition = self.definitions.get(body["jobDefinition"])
        queue = self.queues.get(_short(body["jobQueue"]))
        if definition is None:
            raise Invalid(f"JobDefinition {body['jobDefinition']} not found")
        if queue is None or not queue.enabled:
            state = "does not exist" if queue is None else "is DISABLED"
            raise Invalid(f"JobQueue {body['jobQueue']} {state}")
        job = Job(id=str(uuid.uuid4()), request=body, definition=definition, nodes=nodes_of(definition, body))
        job.request["jobQueue"] = queue.name
        self.jobs[job.id] = job
        thread = threading.Thread(target=self._run, args=(job, queue), name=f"job-{job.id[:8]}", daemon=True)
        thread.start()
        self._threads.append(thread)
        return {"jobName": body["jobName"], "jobId": job.id, "jobArn": arn("job", job.id)}

    def _describe_jobs(self, body: Record) -> Record:
        matching_jobs = []
        for job_id in body["jobs"]:
            name, _, node = job_id.partition("#")
            job = self.jobs.get(name)
            if job is not None:
                matching_jobs.append(job.describe(int(node) if node else None))
        return {"jobs": matching_jobs}

    def _list_jobs(self, body: Record) -> Record:
        status = body.get("jobStatus", "RUNNING")
        matching_jobs = [job for job in self.jobs.values() if job.status == status]
        queue = _short(body.get("jobQueue", ""))
        summaries = [
            {"jobId": job.id, "jobName": job.request["jobName"], "status": job.status}
            for job in matching_jobs
            if job.request["jobQueue"] == queue
        ]
        return {"jobSummaryList": summaries}

    def _terminate(self, body: Record) -> Record:
        job = self.jobs.get(body["jobId"])
        if job is not None and job.stopped is None:
            job.stop = body["reason"]
        return {}

    # -- executor --------------------------------------------------------------------------------------

    def _run(self, job: Job, queue: Queue) -> None:
        job.status = "RUNNABLE"
        job.reason = queue.lacks(job.nodes)
        while job.reason is not None and job.stop is None:
            time.sleep(0.1)
        if job.stop is None:
            job.status = "STARTING"
            for number in range(len(job.nodes)):
                job.pods.append(self._hub.start(self._pod(job, number, queue)))
            job.started, job.status = now(), "RUNNING"
            ended = self._watch(job)
            job.reason = "Essential container in task exited"
            status = "SUCCEEDED" if ended.code == 0 and job.stop is None else "FAILED"
        else:
            status = "FAILED"
        job.reason = job.stop or job.reason
        job.stopped = now()
        job.status = status

    def _watch(self, job: Job) -> Exit:
        """Wait for the end of the main node and then of the other nodes."""
        limit_s = job.request.get("timeout", {}).get("attemptDurationSeconds", float("inf"))
        begin = time.monotonic()
        while (ended := job.pods[0].poll()) is None:
            if job.stop is None and time.monotonic() - begin > limit_s:
                job.stop = "Job attempt duration exceeded timeout"
            if job.stop is not None:
                break
            time.sleep(0.05)
        stopping = [threading.Thread(target=pod.kill, args=(GRACE_S,)) for pod in job.pods]
        for thread in stopping:
            thread.start()
        for thread in stopping:
            thread.join()
        return ended or job.pods[0].wait(1)

    def _pod(self, job: Job, number: int, queue: Queue) -> PodSpec:
        container = job.nodes[number]
        job_environment = {
            "AWS_BATCH_JOB_ID": f"{job.id}#{number}" if job.multinode else job.id,
            "AWS_BATCH_JOB_ATTEMPT": "1",
            "AWS_BATCH_JQ_NAME": queue.name,
            "AWS_BATCH_CE_NAME": queue.name,
            "AWS_EXECUTION_ENV": "AWS_ECS_EC2",
            "CHECKLIST_HOST_ID": f"{job.id}#{number}",  # each stands for a machine, and one kernel has one id
        }
        if job.multinode:
            job_environment |= {
                "AWS_BATCH_JOB_NODE_INDEX": str(number),
                "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
                "AWS_BATCH_JOB_NUM_NODES": str(len(job.nodes)),
            }
        if number:
            job_environment["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = job.pods[0].ip
        shared, tmpfs = container.sizes()
        return PodSpec(
            name=f"job-{job.id[:8]}-{number}",
            hostname=f"ip-{job.id[:8]}-{number}",
            command=container.command,
            environment={**self._role, **container.environment, **job_environment},
            memory_bytes=int(container.number("MEMORY")) * 2**20,
            shm_bytes=shared,
            empty_dirs=tmpfs,
        )


def _short(name: str) -> str:
    return name.rpartition("/")[2]


def _handler(service: BatchService) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self, status: int, value: Record, error: str | None = None) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            if error is not None:
                self.send_header("x-amzn-ErrorType", error)
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
            operation = operation_of(self.path)
            fault = service.fault(operation)
            if fault is not None:
                self._answer(fault[0], {"message": fault[2]}, fault[1])
                return
            try:
                self._answer(200, service.call(operation, body))
            except Invalid as problem:
                self._answer(400, {"message": str(problem)}, "ClientException")

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    return Handler


@contextmanager
def serve(service: BatchService, hub: Hub) -> Iterator[str]:
    """Serve the service in the hub; yields its address, AWS_ENDPOINT_URL_BATCH."""
    with metadata.answer(hub, _handler(service)) as url:
        yield url
