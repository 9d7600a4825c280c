"""A local stand-in for all services of ``run --with batch``: Batch, S3, metadata service and network."""

from __future__ import annotations

import contextlib
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from estimator.plan import Plan
from tests.flows.conftest import FLOW, READ_ARTIFACTS, environment
from tests.lab import batch, log_uploads, metadata
from tests.lab.batch import BatchService
from tests.lab.batch_jobs import Job, Queue
from tests.lab.metadata import MetadataService
from tests.lab.object_store import ObjectStore
from tests.lab.pods import Hub

QUEUE = "training"


@dataclass(kw_only=True)
class Lab:
    """The servers, and the environment with which a client reaches them."""

    hub: Hub
    store: ObjectStore
    service: BatchService
    metadata: MetadataService
    metadata_url: str
    batch_url: str

    def client(self, home: Path, **variables: str) -> dict[str, str]:
        """A user's environment, below ``home``, with Metaflow configured for this lab."""
        home_environment = environment(
            home,
            METAFLOW_DEFAULT_METADATA="service",
            METAFLOW_SERVICE_URL=self.metadata_url,
            METAFLOW_BATCH_JOB_QUEUE=QUEUE,
            METAFLOW_BATCH_CONTAINER_IMAGE="registry.example/finetune:1",
            METAFLOW_ECS_S3_ACCESS_IAM_ROLE="arn:aws:iam::123456789012:role/flows",
            AWS_ENDPOINT_URL_BATCH=self.batch_url,
            PYTHONPATH=str(log_uploads.install_for_clients(self.hub.folder / "client-site")),
        )
        return home_environment | self.store.environment() | variables

    def start(self, home: Path, *arguments: str, flow: Path = FLOW, **variables: str) -> Client:
        """Start a flow's command as a user does; its output goes to ``home/log``."""
        home.mkdir(parents=True, exist_ok=True)
        home_environment = self.client(home, **variables)
        command = [sys.executable, str(flow), *arguments]
        if "run" in arguments or "resume" in arguments:
            command += ["--run-id-file", str(home / "run_id")]
        earlier_jobs = set(self.service.jobs)
        with (home / "log").open("w") as log:
            process = self.hub.popen(
                command,
                home_environment,
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # as in a terminal of its own
            )
        return Client(lab=self, home=home, environment=home_environment, process=process, known=earlier_jobs)


@dataclass(kw_only=True)
class Client:
    """A command of a flow that was started."""

    lab: Lab
    home: Path
    environment: dict[str, str]
    process: subprocess.Popen[Any]
    known: set[str]  # ids of the jobs that were there before

    @property
    def log(self) -> str:
        return (self.home / "log").read_text(errors="replace")

    @property
    def has_begun(self) -> bool:
        """Whether the run has an id."""
        return (self.home / "run_id").exists()

    @property
    def run_id(self) -> str:
        return (self.home / "run_id").read_text()

    def jobs(self, step: str | None = None) -> list[Job]:
        """Jobs submitted since this command was started, in order; ``step`` selects those of one step."""
        matching_jobs = [job for name, job in [*self.lab.service.jobs.items()] if name not in self.known]
        return [j for j in matching_jobs if step in (None, j.request["parameters"]["metaflow.step_name"])]

    def pods_log(self) -> str:
        """Output of the pods of all jobs of the command."""
        pods = [pod for job in self.jobs() for pod in job.pods]
        return "\n".join(f"== {pod.spec.name}: {pod.poll()}\n{pod.log.read_text()}" for pod in pods)

    def committed(self) -> int:
        """Step of the newest complete checkpoint of this run, or 0."""
        if not self.has_begun:
            return 0
        keys = self.lab.store.keys_below(f"metaflow/FinetuneFlow/finetune/checkpoints/{self.run_id}/")
        steps = [re.search(r"/step-(\d+)[^/]*/checkpoint\.json$", key) for key in keys]
        return max((int(match[1]) for match in steps if match), default=0)

    def wait_for(self, condition: Callable[[], Any], within: float) -> Any:
        """Wait for a condition while the command runs."""
        deadline = time.monotonic() + within
        while True:
            value = condition()
            if value:
                return value
            assert self.process.poll() is None, f"the run ended first:\n{self.log}\n{self.pods_log()}"
            assert time.monotonic() < deadline, f"not within {within:g} s:\n{self.log}\n{self.pods_log()}"
            time.sleep(0.3)

    def end(self, within: float) -> int:
        """Wait for the command and return its exit status; every job and pod must have ended."""
        try:
            code = self.process.wait(within)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"not ended within {within:g} s:\n{self.log}\n{self.pods_log()}") from None
        deadline = time.monotonic() + 30
        while any(job.stopped is None for job in self.jobs()):
            assert time.monotonic() < deadline, f"a job is left:\n{self.log}"
            time.sleep(0.1)
        assert [pid for job in self.jobs() for pod in job.pods for pid in pod.pids()] == []
        return code

    def artifacts(self, flow: str = "FinetuneFlow") -> dict[str, Any]:
        """All artifacts of finished tasks by name; those of later steps override earlier ones."""
        pickled = self.run_client(READ_ARTIFACTS, f"{flow}/{self.run_id}")
        stored_artifacts: dict[str, Any] = pickle.loads(pickled)  # noqa: S301
        return stored_artifacts

    def run_client(self, program: str, *arguments: str) -> bytes:
        """Run a program that uses the Metaflow client as the launching user; return its output."""
        command = [sys.executable, "-c", program, *arguments]
        process = self.lab.hub.popen(command, self.environment, cwd=self.home, stdout=subprocess.PIPE)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0
        return bytes(output)


def check_training_job(job: Job, plan: Plan) -> None:
    """Check that a multi-node job requests the nodes and resources of its plan."""
    planned = plan.request
    assert job.request["jobQueue"] == QUEUE
    assert job.definition["nodeProperties"]["numNodes"] == planned.nodes == len(job.nodes)
    for node in job.nodes:
        assert (node.number("VCPU"), node.number("MEMORY")) == (planned.cpu, planned.memory_mib)
        assert node.properties["linuxParameters"]["sharedMemorySize"] == planned.shared_memory_mib
        assert node.number("GPU") == 0


@contextlib.contextmanager
def lab(folder: Path, *, first_id: int = metadata.FIRST_ID) -> Iterator[Lab]:
    """``first_id``: of the metadata service; a fresh one's ids are short."""
    id_service = MetadataService(first_id)
    with contextlib.ExitStack() as stack:
        hub = stack.enter_context(Hub(folder / "hub"))
        store = stack.enter_context(ObjectStore(folder, address=hub.address, inside=hub.inside))
        service = BatchService(hub, [Queue(name=QUEUE)], role=store.credentials())
        yield Lab(
            hub=hub,
            store=store,
            service=service,
            metadata=id_service,
            metadata_url=stack.enter_context(metadata.serve(hub, id_service)),
            batch_url=stack.enter_context(batch.serve(service, hub)),
        )
