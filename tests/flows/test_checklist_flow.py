"""The checklist flow as a user runs it: two local nodes, verdict, history, and refusals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from checklist import result as results
from checklist.measurements import Facts, record
from checklist.options import help_of
from checklist.probing.progress import Progress
from flows.cluster_check import launch as checklist_launch
from flows.cluster_check import steps
from flows.cluster_check.launch import DEFAULTS
from tests.checklist.servers import hook
from tests.flows.checklist_options import FLOOR
from tests.flows.conftest import FlowRun, environment, run_flow
from tests.flows.marked_secrets import SECRETS, files_below, leaks
from tests.warm_python import WarmPython

FLOW = Path(__file__).parents[2] / "flows" / "checklist_flow.py"
KEPT = ".metaflow/ChecklistFlow/finetune/runs/*"  # what a run keeps while it measures
BUSY_SECONDS = 480  # a run takes less than 60 on a machine that does nothing else


def _flow(home: Path, *arguments: str, **overrides: Any) -> FlowRun:
    return run_flow(
        home, *arguments, flow=FLOW, timeout=BUSY_SECONDS, AWS_EC2_METADATA_DISABLED="true", **overrides
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checklist")


@pytest.fixture(scope="module")
def first(home: Path) -> FlowRun:
    """A run with no options."""
    return _flow(home, "run")


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> FlowRun:
    """A run whose thresholds no machine can reach, with a webhook that refuses its message."""
    folder = tmp_path_factory.mktemp("failed")
    (folder / "thresholds.csv").write_text(FLOOR)
    checks = ("--only", "ranks,gemm", "--thresholds", "thresholds.csv", "--system", "here")
    with hook(status=500) as (address, _):
        secrets = {**SECRETS, "CHECKLIST_WEBHOOK_URL": address}
        return _flow(folder, "run", *checks, "--json", "failed.json", "--webhook", **secrets)


@pytest.fixture(scope="module")
def later(failed: FlowRun) -> FlowRun:
    """A later run on one node, without the check that failed before."""
    options = ("--nodes", "1", "--gpus-per-node", "2", "--skip", "gemm,hbm,storage,datastore")
    return _flow(failed.home, "run", *options)


@pytest.mark.slow
def test_a_run_with_no_options_ends_with_a_verdict_a_card_and_a_result(
    first: FlowRun, record_property: Callable[[str, object], None]
) -> None:
    record_property("seconds", round(first.seconds, 1))
    assert first.returncode == 0, first.output
    artifacts = first.artifacts("ChecklistFlow")
    result = steps.from_plain(artifacts["result"])
    assert result.verdict in ("PASS", "WARN")
    assert f"{result.verdict}: " in first.text
    assert len(result.nodes) == 2
    assert result.check("mesh").verdict == "PASS"  # type: ignore[union-attr]
    assert result.check("correctness").verdict == "PASS"  # type: ignore[union-attr]
    assert result.check("datastore").measured  # type: ignore[union-attr]
    assert artifacts["healthy_nodes"] == list(result.nodes)
    assert artifacts["bad_nodes"] == []
    assert artifacts["cluster"].startswith("local:")
    assert results.read(first.home / "checklist-result.json").verdict in ("PASS", "WARN", "FAIL")
    assert "checklist-result.json" in first.output
    assert result.headline.split(".")[0] in first.card(FLOW, "verdict", "checklist")


@pytest.mark.slow
def test_a_failed_checklist_stores_its_results_and_ends_the_flow_with_one_line(failed: FlowRun) -> None:
    assert failed.returncode != 0
    assert "Traceback" not in failed.output, failed.output
    assert "FAIL: gemm_fp32 of all 2 ranks is below the floor" in failed.text
    artifacts = failed.artifacts("ChecklistFlow")
    assert json.loads((failed.home / "failed.json").read_text()) == artifacts["result"]
    assert artifacts["result"]["verdict"] == "FAIL"
    assert "not fit for training" in failed.card(FLOW, "verdict", "checklist")


@pytest.mark.slow
def test_a_failed_checklist_leaves_no_secret_of_the_environment(failed: FlowRun) -> None:
    assert "The webhook could not be called: it answers with status 500" in failed.text
    secrets = (*SECRETS.values(), urlsplit(failed.environment["CHECKLIST_WEBHOOK_URL"]).path)
    assert leaks(files_below(failed.home), secrets) == []


@pytest.mark.nightly
@pytest.mark.slow
def test_a_failure_stays_open_until_the_same_check_passes(later: FlowRun) -> None:
    assert later.returncode != 0
    result = later.artifacts("ChecklistFlow")["result"]
    assert len(result["nodes"]) == 1
    assert {check["check"]: check["verdict"] for check in result["checks"]}["correctness"] == "PASS"
    assert [item["check"] for item in result["standing"]] == ["gemm"]
    assert "Still open from an earlier run" in later.text
    assert "--only gemm" in later.text
    assert any("1 earlier run of local:" in n and "1 failures still open" in n for n in result["notes"])


@pytest.mark.slow
def test_a_node_with_a_killed_process_is_named_and_the_run_has_a_verdict(tmp_path: Path) -> None:
    def inject_fault(_: subprocess.Popen[str]) -> None:
        os.kill(_node_agent_pid(tmp_path, node=1), signal.SIGKILL)

    run = _flow(tmp_path, "run", "--op-timeout", "20", inject_fault=inject_fault)
    assert run.returncode != 0
    result = run.artifacts("ChecklistFlow")["result"]
    assert result["verdict"] == "FAIL", run.output
    assert result["bad_nodes"] == ["local1"], run.output
    assert any("was ended by signal 9" in note for note in result["notes"])
    assert "Traceback" not in run.output


@pytest.mark.nightly
@pytest.mark.slow
def test_a_lost_step_is_judged_by_the_stored_measurements_of_its_nodes(tmp_path: Path) -> None:
    stored_measurements: list[Path] = []

    def inject_fault(_: subprocess.Popen[str]) -> None:
        stored_measurements.append(_until(lambda: next(tmp_path.glob(f"{KEPT}/measured.json"), None)))
        os.kill(psutil.Process(_node_agent_pid(tmp_path, node=0)).ppid(), signal.SIGKILL)

    run = _flow(tmp_path, "run", inject_fault=inject_fault)
    assert run.returncode != 0
    result = run.artifacts("ChecklistFlow")["result"]
    assert result["verdict"] == "NO-VERDICT", run.output
    assert len(result["nodes"]) == 2, "the facts were measured by then"
    assert "A pod or container of the step did not finish" in result["headline"]
    measured, judged = json.loads(stored_measurements[0].read_text()), result["measurements"]
    facts = [[record(Facts, fact) for fact in run_of["facts"]] for run_of in (measured, judged)]
    assert facts[0] == facts[1]
    assert "Traceback" not in run.output


@pytest.mark.slow
@pytest.mark.nightly
def test_ctrl_c_ends_a_run_at_once_and_resume_finishes_it(tmp_path: Path) -> None:
    def interrupt(process: subprocess.Popen[str]) -> None:
        _node_agent_pid(tmp_path, node=0)
        os.killpg(process.pid, signal.SIGINT)

    run = _flow(tmp_path, "run", "--only", "mesh,correctness,latency,bandwidth", inject_fault=interrupt)
    assert run.returncode != 0
    assert "Workflow interrupted" in run.text
    assert "Traceback" not in run.output
    resumed = _flow(tmp_path, "resume", "--origin-run-id", run.run_id)
    assert resumed.returncode == 0, resumed.output
    assert resumed.artifacts("ChecklistFlow")["result"]["verdict"] in ("PASS", "WARN")


def _until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + BUSY_SECONDS / 2
    while time.monotonic() < deadline:
        if (value := condition()) is not None:
            return value
        time.sleep(0.02)
    raise AssertionError("it did not come")


def _node_agent_pid(home: Path, node: int) -> int:
    """Return the node agent of the ranks of that node, once they have joined."""
    deadline = time.monotonic() + BUSY_SECONDS / 2
    while time.monotonic() < deadline:
        reported = [Progress(file).read().operation for file in home.glob(f"work/*/*/rank{node}.progress")]
        if reported and reported[0] not in ("", "facts", "health", "clock"):
            return next(
                process.pid for process in psutil.process_iter() if _is_node_agent(process, home, node)
            )
        time.sleep(0.02)
    raise AssertionError("no node agent has started")


def _is_node_agent(process: psutil.Process, home: Path, node: int) -> bool:
    try:
        process_environment = process.environ() if "checklist.run.local" in process.cmdline() else {}
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
    if process_environment.get("FINETUNE_WORK_DIR") != str(home / "work"):
        return False
    return process_environment["CHECKLIST_LOCAL_NODE"] == str(node)


@pytest.fixture(scope="module")
def launch(home: Path) -> Iterator[Callable[..., FlowRun]]:
    """``launch("run", "--help")``: run the command line of the flow, which ends before starting a task."""
    variables = environment(home, AWS_EC2_METADATA_DISABLED="true")
    with WarmPython("flows.cluster_check.steps", environment=variables, folder=home) as warm:

        def run(*arguments: str) -> FlowRun:
            done = warm.run([str(FLOW), *arguments], folder=home, environment=variables, merge=True)
            return FlowRun(home, variables, done.returncode, done.stdout, seconds=0.0)

        yield run


def test_a_user_error_is_reported_in_one_line_and_launches_nothing(
    home: Path, launch: Callable[..., FlowRun]
) -> None:
    (home / "options.yaml").write_text("nodess: 3\n")
    for arguments, message_part in (
        (["run", "--only", "meshh"], "meshh"),
        (["--config", "options", "options.yaml", "run"], "'nodess'. Did you mean nodes?"),
    ):
        run = launch(*arguments)
        assert run.returncode != 0
        assert message_part in run.text
        assert "Traceback" not in run.output
        assert "Workflow starting" not in run.output


def test_the_flags_of_the_flow_are_exactly_the_checklist_options(launch: Callable[..., FlowRun]) -> None:
    text = launch("run", "--help-all").output
    flags = {"--" + name.replace("_", "-") for name in DEFAULTS}
    assert flags <= set(re.findall(r"--[a-z-]+", text))
    for field in checklist_launch.FlowOptions.model_fields.values():
        assert re.split(r"\.| \(", help_of(field))[0] in " ".join(text.split())
