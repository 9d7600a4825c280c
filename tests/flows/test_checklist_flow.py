"""The checklist flow as a user runs it: two nodes on this machine, the verdict, the past, what is refused."""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from checklist import result as results
from checklist.measurements import Facts, record
from checklist.options import help_of
from checklist.probing.progress import Progress
from flows.cluster_check import launch as checklist_launch
from flows.cluster_check import steps
from flows.cluster_check.launch import DEFAULTS
from tests.flows.checklist_options import FLOOR
from tests.flows.conftest import environment, left_behind
from tests.warm_python import WarmPython

FLOW = Path(__file__).parents[2] / "flows" / "checklist_flow.py"
KEPT = ".metaflow/ChecklistFlow/finetune/runs/*"  # what a run keeps while it measures
BUSY_SECONDS = 480  # a run takes less than 60 on a machine that does nothing else
_READ = """
import pickle, sys
from metaflow import Run, namespace
namespace(None)
run = Run(sys.argv[1])
data = run["verdict"].task.data
found = {name: getattr(data, name) for name in ("result", "healthy_nodes", "bad_nodes", "cluster", "kept")}
sys.stdout.buffer.write(pickle.dumps(found | {"successful": run.successful}))
"""


@dataclass
class Run:
    """A run that has ended."""

    home: Path
    status: int
    output: str
    seconds: float

    @property
    def text(self) -> str:
        """What was said, without Metaflow's prefixes and line breaks."""
        lines = (re.sub(r"^\S+ \S+ \[[^]]*\] ", "", line) for line in self.output.splitlines())
        return " ".join(" ".join(lines).split())

    @property
    def run_id(self) -> str:
        found = re.search(r"run-id (\d+)", self.output)
        assert found is not None, self.output
        return found[1]

    def artifacts(self) -> dict[str, Any]:
        return dict(_python(self.home, _READ, f"ChecklistFlow/{self.run_id}"))

    def card(self) -> str:
        """The content of the card's page."""
        page = self.home / f"{self.run_id}.html"
        words = ("card", "get", f"{self.run_id}/verdict", str(page), "--id", "checklist")
        done = _flow(self.home, *words)
        assert page.exists(), done.output
        data = re.search(r'__MF_DATA__\["[^"]+"\] = "([^"]+)"', page.read_text())
        assert data is not None
        return base64.b64decode(data[1]).decode()


def _flow(home: Path, *arguments: str) -> Run:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(FLOW), *arguments],
        cwd=home,
        env=environment(home, AWS_EC2_METADATA_DISABLED="true"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUSY_SECONDS,
        check=False,
    )
    assert left_behind(home) == []
    return Run(home=home, status=done.returncode, output=done.stdout, seconds=time.monotonic() - began)


def _python(home: Path, code: str, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=home,
        env=environment(home, PYTHONPATH=str(FLOW.parents[1])),
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    )
    return pickle.loads(done.stdout)  # noqa: S301


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checklist")


@pytest.fixture(scope="module")
def first(home: Path) -> Run:
    """A run with no options."""
    return _flow(home, "run")


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run whose own thresholds no machine can reach."""
    folder = tmp_path_factory.mktemp("failed")
    (folder / "thresholds.csv").write_text(FLOOR)
    checks = ("--only", "ranks,gemm", "--thresholds", "thresholds.csv", "--system", "here")
    return _flow(folder, "run", *checks, "--json", "failed.json")


@pytest.fixture(scope="module")
def later(failed: Run) -> Run:
    """A later run on one node, without the check that failed before."""
    options = ("--nodes", "1", "--gpus-per-node", "2", "--skip", "gemm,hbm,storage,datastore")
    return _flow(failed.home, "run", *options)


@pytest.mark.slow
def test_a_run_with_no_options_ends_with_a_verdict_a_card_and_a_result(
    first: Run, record_property: Callable[[str, object], None]
) -> None:
    record_property("seconds", round(first.seconds, 1))
    assert first.status == 0, first.output
    found = first.artifacts()
    result = steps.from_plain(found["result"])
    assert result.verdict in ("PASS", "WARN")
    assert f"{result.verdict}: " in first.text
    assert len(result.nodes) == 2
    assert result.check("mesh").verdict == "PASS"  # type: ignore[union-attr]
    assert result.check("correctness").verdict == "PASS"  # type: ignore[union-attr]
    assert result.check("datastore").measured  # type: ignore[union-attr]
    assert found["healthy_nodes"] == list(result.nodes)
    assert found["bad_nodes"] == []
    assert found["cluster"].startswith("local:")
    assert results.read(first.home / "checklist-result.json").verdict in ("PASS", "WARN", "FAIL")
    assert "checklist-result.json" in first.output
    assert result.headline.split(".")[0] in first.card()


@pytest.mark.slow
def test_a_fail_ends_the_flow_after_all_is_stored_with_one_clear_line(failed: Run) -> None:
    assert failed.status != 0
    assert "Traceback" not in failed.output, failed.output
    assert "FAIL: gemm_fp32 of all 2 ranks is below the floor" in failed.text
    found = failed.artifacts()
    assert json.loads((failed.home / "failed.json").read_text()) == found["result"]
    assert not found["successful"]
    assert found["result"]["verdict"] == "FAIL"
    assert "not fit for training" in failed.card()


@pytest.mark.nightly
@pytest.mark.slow
def test_a_failure_stands_until_the_same_check_passes(later: Run) -> None:
    assert later.status != 0
    found = later.artifacts()["result"]
    assert len(found["nodes"]) == 1
    assert {check["check"]: check["verdict"] for check in found["checks"]}["correctness"] == "PASS"
    assert [item["check"] for item in found["standing"]] == ["gemm"]
    assert "Still open from an earlier run" in later.text
    assert "--only gemm" in later.text
    assert any("1 earlier run of local:" in n and "1 failures still open" in n for n in found["notes"])


@pytest.mark.slow
def test_a_node_whose_process_is_killed_is_named_and_the_verdict_still_comes(tmp_path: Path) -> None:
    run = _hurt(
        tmp_path, lambda _: os.kill(_supervisor(tmp_path, node=1), signal.SIGKILL), "--op-timeout", "20"
    )
    assert run.status != 0
    found = run.artifacts()["result"]
    assert found["verdict"] == "FAIL", run.output
    assert found["bad_nodes"] == ["local1"], run.output
    assert any("was ended by signal 9" in note for note in found["notes"])
    assert "Traceback" not in run.output


@pytest.mark.nightly
@pytest.mark.slow
def test_a_step_that_is_lost_is_judged_by_what_its_nodes_had_measured(tmp_path: Path) -> None:
    kept: list[Path] = []

    def hurt(_: subprocess.Popen[bytes]) -> None:
        kept.append(_until(lambda: next(tmp_path.glob(f"{KEPT}/measured.json"), None)))
        os.kill(psutil.Process(_supervisor(tmp_path, node=0)).ppid(), signal.SIGKILL)

    run = _hurt(tmp_path, hurt)
    assert run.status != 0
    found = run.artifacts()["result"]
    assert found["verdict"] == "NO-VERDICT", run.output
    assert len(found["nodes"]) == 2, "the facts were measured by then"
    assert "A pod or container of the step did not finish" in found["headline"]
    measured, judged = json.loads(kept[0].read_text()), found["measurements"]
    facts = [[record(Facts, fact) for fact in run_of["facts"]] for run_of in (measured, judged)]
    assert facts[0] == facts[1]
    assert "Traceback" not in run.output


@pytest.mark.slow
@pytest.mark.nightly
def test_ctrl_c_ends_a_run_at_once_and_resume_finishes_it(tmp_path: Path) -> None:
    def interrupt(process: subprocess.Popen[bytes]) -> None:
        _supervisor(tmp_path, node=0)
        os.killpg(process.pid, signal.SIGINT)

    run = _hurt(tmp_path, interrupt, "--only", "mesh,correctness,latency,bandwidth")
    assert run.status != 0
    assert "Workflow interrupted" in run.text
    assert "Traceback" not in run.output
    resumed = _flow(tmp_path, "resume", "--origin-run-id", run.run_id)
    assert resumed.status == 0, resumed.output
    assert resumed.artifacts()["result"]["verdict"] in ("PASS", "WARN")


def _hurt(home: Path, hurt: Callable[[subprocess.Popen[bytes]], None], *options: str) -> Run:
    """A run to which that is done; it ends, and leaves no process."""
    # A shell's background jobs ignore a Ctrl-C, and so would this if pytest were one
    command = ["env", "--default-signal=INT", sys.executable, str(FLOW), "run", *options]
    began = time.monotonic()
    with (home / "log").open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=home,
            env=environment(home, AWS_EC2_METADATA_DISABLED="true"),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # as in a terminal of its own
        )
        try:
            hurt(process)
            status = process.wait(BUSY_SECONDS)
        finally:
            process.kill()
            process.wait()
    assert left_behind(home) == []
    output, seconds = (home / "log").read_text(), time.monotonic() - began
    return Run(home=home, status=status, output=output, seconds=seconds)


def _until(found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + BUSY_SECONDS / 2
    while time.monotonic() < deadline:
        if (value := found()) is not None:
            return value
        time.sleep(0.02)
    raise AssertionError("it did not come")


def _supervisor(home: Path, node: int) -> int:
    """The process that looks after that node's ranks, once they have told who they are."""
    deadline = time.monotonic() + BUSY_SECONDS / 2
    while time.monotonic() < deadline:
        told = [Progress(file).read().operation for file in home.glob(f"work/*/*/rank{node}.progress")]
        if told and told[0] not in ("", "facts", "health", "clock"):
            return next(process.pid for process in psutil.process_iter() if _looks_after(process, home, node))
        time.sleep(0.02)
    raise AssertionError("no supervisor has started")


def _looks_after(process: psutil.Process, home: Path, node: int) -> bool:
    try:
        said = process.environ() if "checklist.run.local" in process.cmdline() else {}
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
    if said.get("FINETUNE_WORK_DIR") != str(home / "work"):
        return False
    return said["CHECKLIST_LOCAL_NODE"] == str(node)


@pytest.fixture(scope="module")
def launch(home: Path) -> Iterator[Callable[..., Run]]:
    """``launch("run", "--help")``: the flow's command line, which ends before it starts a task."""
    variables = environment(home, AWS_EC2_METADATA_DISABLED="true")
    with WarmPython("flows.cluster_check.steps", environment=variables, folder=home) as warm:

        def run(*words: str) -> Run:
            done = warm.run([str(FLOW), *words], folder=home, environment=variables, merge=True)
            return Run(home=home, status=done.returncode, output=done.stdout, seconds=0.0)

        yield run


def test_a_mistake_is_one_line_and_nothing_is_launched(home: Path, launch: Callable[..., Run]) -> None:
    (home / "options.yaml").write_text("nodess: 3\n")
    for words, said in (
        (["run", "--only", "meshh"], "meshh"),
        (["--config", "options", "options.yaml", "run"], "'nodess'. Did you mean nodes?"),
    ):
        run = launch(*words)
        assert run.status != 0
        assert said in run.text
        assert "Traceback" not in run.output
        assert "Workflow starting" not in run.output


def test_every_option_is_a_flag_of_the_flow_and_nothing_else_is(launch: Callable[..., Run]) -> None:
    text = launch("run", "--help").output
    flags = {"--" + name.replace("_", "-") for name in DEFAULTS}
    assert flags <= set(re.findall(r"--[a-z-]+", text))
    for field in checklist_launch.FlowOptions.model_fields.values():
        assert help_of(field)[:30] in " ".join(text.split())
