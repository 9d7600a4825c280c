"""The decorator in real flows on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from estimator.calibration import Store
from tests.decorators.conftest import FLOWS, Home, wait_until
from tests.warm_python import WarmPython

NODES = str(FLOWS / "nodes.py")  # Metaflow pickles frames of nodes as classes of __main__: no warm Python
# Notes, on standard error, each page of a card that is stored and each process that is started for one.
PAGES = """
import sys
def note(event, args):
    if event == "os.rename" and "blank-finetune" in str(args[1]) and str(args[1]).endswith(".html"):
        print("a page is stored", file=sys.stderr, flush=True)
    if event == "subprocess.Popen" and "card" in args[1]:
        print("a process for a page", file=sys.stderr, flush=True)
sys.addaudithook(note)
"""
BUSY_S = 60.0  # a few seconds, where nothing else runs; some tests at once make a machine slow


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPython]:
    """A Python process that has imported Metaflow, the decorator and their dependencies."""
    home = Home(tmp_path_factory.mktemp("warm"))
    modules = ("metaflow.cli", "metaflow.runtime", "decorators.gpu_profile")
    with WarmPython(*modules, environment=home.environment(), folder=home.path) as started:
        yield started


@pytest.fixture
def home(home: Home, warm: WarmPython) -> Home:
    return Home(home.path, warm)


def _clean(output: str) -> None:
    assert "Traceback" not in output
    assert "Internal error" not in output


def run_noting_pages(home: Home, *arguments: str) -> subprocess.CompletedProcess[str]:
    (home.path / "sitecustomize.py").write_text(PAGES)
    environment = {"PYTHONPATH": str(home.path), "COUNT_PLANS": str(home.path / "plans")}
    return home.run("profiled.py", *arguments, **environment)


def test_the_plan_is_made_once_and_a_step_stores_measurements_record_and_card(home: Home) -> None:
    done = run_noting_pages(home, "--with", "resources:cpu=3,memory=1000", "run", "--model", "tiny-llama")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((home.path / "plans").read_text().splitlines()) == 1
    assert "plan in end: tiny-llama" in done.stdout
    assert "a page is stored" in done.stdout
    assert "a process for a page" not in done.stdout
    train = home.artifacts("ProfiledFlow", "train", "plan", "measured")
    plan = train["plan"]
    assert home.artifacts("ProfiledFlow", "start", "plan")["plan"] == plan
    assert train["measured"].steps == 3
    assert train["measured"].ranks[0].rank == 0
    assert train["measured"].host_rss_peak_bytes > 20 << 20

    assert (plan.request.cpu, plan.request.memory_mib) == (3, 1000)
    assert {(o.name, o.planned, o.used, o.given_by) for o in plan.overrides} == {
        ("cpu", "2", "3", "--with resources:cpu="),
        ("memory_mib", "2048", "1000", "--with resources:memory="),
    }

    stored = Store(home.path / "calibration.jsonl").read()
    assert stored.problems == ()
    (record,) = stored.finished
    (run_id,) = home.runs("ProfiledFlow")
    assert record.run.startswith(f"ProfiledFlow/{run_id}/train/")
    assert (record.engine, record.method, record.gpu) == ("torchtune", "full", "cpu")
    assert record.formulas == "of the tests"


@pytest.mark.slow
def test_the_number_of_gpus_set_by_the_user_changes_the_layout(home: Home) -> None:
    done = home.run("profiled.py", "run", "--model", "llama-8b", "--with", "resources:gpu=2")
    assert done.returncode == 0, done.stdout + done.stderr
    plan = home.artifacts("ProfiledFlow", "train", "plan")["plan"]
    assert plan.request.gpus_per_node == plan.layout.processes_per_node == 2
    assert [(o.name, o.used) for o in plan.overrides] == [("gpus_per_node", "2")]


@pytest.mark.slow
@pytest.mark.nightly
def test_parameters_from_the_environment_reach_the_plan(home: Home) -> None:
    done = home.run("profiled.py", "run", METAFLOW_RUN_MODEL="llama-8b")
    assert done.returncode == 0, done.stdout + done.stderr
    assert home.artifacts("ProfiledFlow", "train", "plan")["plan"].model == "llama-8b"


@pytest.mark.slow
def test_a_resumed_run_has_the_parameters_of_its_origin_and_lists_all_origins(home: Home) -> None:
    runs: list[str] = []
    for arguments in (("run", "--model", "llama-8b", "--fail", "train"), ("resume",), ("resume",)):
        origin = ("--origin-run-id", runs[-1]) if runs else ()
        plans = home.path / f"plans-{len(runs)}"
        done = home.run("profiled.py", *arguments, *origin, "--run-id-file", "run_id", COUNT_PLANS=str(plans))
        assert done.returncode == 1  # "fail" is one of these parameters
        output = next(line for line in done.stdout.splitlines() if "origins:" in line)
        assert output.split("origins:")[1].split() == runs[::-1]
        (page,) = plans.read_text().splitlines()
        assert page.endswith(" local llama-8b" if runs else " local none"), "the plan that its origin had"
        runs.append((home.path / "run_id").read_text())
    assert home.artifacts("ProfiledFlow", "start", "plan")["plan"].model == "llama-8b"


def test_resume_without_an_earlier_run_is_refused_in_one_line(home: Home) -> None:
    done = home.run("profiled.py", "resume")
    assert done.returncode == 2
    assert "There is no run to resume" in done.stderr
    _clean(done.stderr)


def test_a_user_error_at_launch_is_two_lines_and_starts_no_run(home: Home) -> None:
    done = home.run("profiled.py", "run", "--model", "none")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "There is no model named none." in done.stderr
    assert "llama-\N{ASTERISK OPERATOR}." in done.stderr
    _clean(done.stderr)
    assert home.runs("ProfiledFlow") == []


def test_a_user_error_in_a_step_is_shown_without_a_traceback_and_not_retried(home: Home) -> None:
    done = home.run(
        "profiled.py", "run", "--fail", "start", "--with", "retry:times=2,minutes_between_retries=0"
    )
    assert done.returncode == 1
    assert done.stdout.count("Line 7 of the dataset is broken.") == 1
    assert "Mend it:" in done.stdout
    assert "This failed task will not be retried." in done.stdout
    _clean(done.stdout + done.stderr)


def test_a_bug_in_a_step_keeps_its_traceback_and_stores_a_card_but_no_record(home: Home) -> None:
    done = run_noting_pages(home, "run", "--fail", "train")
    assert done.returncode == 1
    assert (
        0 < done.stdout.index("ValueError: the loss is not a number") < done.stdout.index("a page is stored")
    )
    assert "a process for a page" not in done.stdout
    assert "profiled.py" in done.stdout
    assert "Step train (task-id 2) failed." in done.stderr
    assert not (home.path / "calibration.jsonl").exists()


def test_a_retried_task_has_one_card_by_its_id_and_those_of_earlier_attempts_by_other_ids(home: Home) -> None:
    done = home.run(
        "profiled.py", "run", "--fail", "train", "--with", "retry:times=2,minutes_between_retries=0"
    )
    assert done.returncode == 1
    pages = set()
    for card_id in ("finetune", "finetune_attempt_0", "finetune_attempt_1"):
        home.run("profiled.py", "card", "get", "train", f"{card_id}.html", "--id", card_id)
        pages.add((home.path / f"{card_id}.html").read_text())
    assert len(pages) == 3


@pytest.mark.parametrize("expected", [("show",), ("run", "--help")])
def test_other_commands_make_no_plan_and_print_nothing(home: Home, expected: tuple[str, ...]) -> None:
    done = home.run("profiled.py", *expected, COUNT_PLANS=str(home.path / "plans"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (home.path / "plans").exists()
    _clean(done.stdout + done.stderr)


def test_a_flow_without_a_plan_is_measured_on_request(home: Home) -> None:
    done = home.run("plain.py", "run", "--with", "decorators.gpu_profile")
    assert done.returncode == 0, done.stdout + done.stderr
    stored_artifacts = home.artifacts("PlainFlow", "start", "plan", "measured")
    assert stored_artifacts["plan"] is None
    assert stored_artifacts["measured"].samples >= 1
    assert stored_artifacts["measured"].step == "start"


@pytest.mark.slow
def test_a_flow_runs_without_measurements_if_the_decorator_is_absent(home: Home) -> None:
    done = home.run("plain.py", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert home.artifacts("PlainFlow", "start", "measured")["measured"].samples == 0


@pytest.mark.slow
def test_each_node_of_a_parallel_step_has_the_plan_and_its_own_measurements(home: Home) -> None:
    done = home.python(NODES, "run", "--until-sampled", "true")
    assert done.returncode == 0, done.stdout + done.stderr
    stored_artifacts = home.artifacts("NodesFlow", "gather", "plans", "measured")
    assert stored_artifacts["plans"][0] == stored_artifacts["plans"][1]
    assert stored_artifacts["plans"][0].layout.nodes == 2
    first, second = stored_artifacts["measured"]
    assert (first.node, second.node) == (0, 1)
    # Node 1 holds 150 MiB more, and is a child of node 0's process on this machine.
    assert second.host_rss_peak_bytes - first.host_rss_peak_bytes > 100 << 20


@pytest.mark.slow
def test_a_failing_node_reports_its_reason_without_a_traceback_or_leftover_process(home: Home) -> None:
    done = home.python(NODES, "run", "--failing-node", "1")
    assert done.returncode == 1
    assert "Node 1 has no disk space." in done.stdout
    _clean(done.stdout + done.stderr)
    wait_until(lambda: not _alive(home), BUSY_S)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["scheduler", pytest.param("first node", marks=pytest.mark.nightly)])
def test_tasks_end_if_their_parent_process_is_killed(home: Home, victim: str) -> None:
    flow = home.start("nodes.py", "run", "--seconds", "300")
    try:
        wait_until(lambda: (home.path / "node-1.pid").exists() and (home.path / "node-0.pid").exists(), 90)
        pids = [int((home.path / f"node-{node}.pid").read_text()) for node in (0, 1)]
        os.kill(flow.pid if victim == "scheduler" else pids[0], signal.SIGKILL)
        wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), BUSY_S)
        flow.wait(BUSY_S)
        wait_until(lambda: not _alive(home), BUSY_S)
    finally:
        flow.kill()
        flow.wait()


def _alive(home: Home) -> list[int]:
    """Return processes that work in the folder."""
    return [process.pid for process in psutil.process_iter() if _works_in(process, home.path)]


def _works_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.cwd() == str(folder.resolve()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
