"""The metadata stand-in, through Metaflow's own client: what it tells is what a run has registered."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flows.conftest import environment
from tests.lab import metadata, pods
from tests.lab.pods import Hub

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(pods.missing() is not None, reason=str(pods.missing())),
]
FLOW = """
from metaflow import FlowSpec, current, parallel, retry, step


class SmallFlow(FlowSpec):
    @step
    def start(self):
        self.numbers = [1, 2]
        self.next(self.twice, num_parallel=2)

    @retry(times=1, minutes_between_retries=0)
    @parallel
    @step
    def twice(self):
        if current.retry_count == 0 and current.parallel.node_index == 0:
            raise RuntimeError("the first attempt fails")
        self.doubled = 2 * self.numbers[current.parallel.node_index]
        self.next(self.join)

    @step
    def join(self, inputs):
        self.total = sum(task.doubled for task in inputs)
        self.next(self.end)

    @step
    def end(self):
        pass


if __name__ == "__main__":
    SmallFlow()
"""
READ = """
import json
from metaflow import Flow, Run, Task, namespace
namespace(None)
run = Flow("SmallFlow").latest_run
run.add_tag("mine")
run.replace_tag("mine", "yours")
task = run["join"].task
node = next(t for t in run["twice"] if "_node_" not in t.id)
again = Task(node.pathspec, attempt=1)
print(json.dumps({
    "id": run.id, "successful": run.successful, "total": task["total"].data, "tasks": len(list(run["twice"])),
    "steps": sorted(step.id for step in run), "attempt": node.current_attempt,
    "first": "doubled" in Task(node.pathspec, attempt=0), "second": again["doubled"].data,
    "tags": sorted(Run(run.pathspec).user_tags), "log": "fails" in Task(node.pathspec, attempt=0).stderr,
    "parents": sorted(parent.id for parent in task.parent_tasks),
    "found": list(task.metadata_dict)[:1] != [], "missing": "nothing" in run,
}))
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path / "hub") as made:
        yield made


def test_metaflows_client_reads_back_what_a_run_has_registered(hub: Hub, tmp_path: Path) -> None:
    service = metadata.MetadataService()
    (tmp_path / "small_flow.py").write_text(FLOW)
    with metadata.serve(hub, service) as url:
        own = environment(tmp_path, METAFLOW_DEFAULT_METADATA="service", METAFLOW_SERVICE_URL=url)
        own["PATH"] = f"{Path(sys.executable).parent}:{own['PATH']}"  # other nodes' tasks are started by name
        run = hub.run([sys.executable, "small_flow.py", "run"], own, timeout=180, cwd=tmp_path)
        assert run.returncode == 0, run.stdout
        read = hub.run([sys.executable, "-c", READ], own, timeout=60, cwd=tmp_path)
        assert read.returncode == 0, read.stdout
    found = json.loads(read.stdout)
    parents = found.pop("parents")
    assert len(parents) == 2
    assert found == {
        "id": str(metadata.FIRST_ID),
        "successful": True,
        "total": 6,
        "tasks": 2,
        "steps": ["end", "join", "start", "twice"],
        "attempt": 1,
        "first": False,
        "second": 2,
        "tags": ["yours"],
        "log": True,
        "found": True,
        "missing": False,
    }
    assert f"flows/SmallFlow/runs/{metadata.FIRST_ID}" in service.heartbeats
