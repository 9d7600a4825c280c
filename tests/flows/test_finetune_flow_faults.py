"""A run with a fault ends soon, leaves no process, and resumes from its last complete checkpoint.

benchmarks/faults.py has every process and every moment; these are the cases that cover the most.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import write_sums
from tests.flows.conftest import EVALUATED, FlowRun
from tests.flows.faults import EVERY, SHORT, STEPS, Ended, Flow
from tests.flows.marked_secrets import SECRETS, files_below, leaks
from tests.lab import small_engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NewFlow = Callable[..., Flow]
Losses = list[tuple[int, float]]
SMALL_LOSSES = [(step, 1 / step) for step in range(1, STEPS + 1)]  # of tests.lab.small_engine
END_S = 120.0  # seconds: 5 to 10 where nothing else runs


@pytest.fixture
def flow(tmp_path: Path) -> Iterator[NewFlow]:
    """``flow("run", nodes=2)`` starts a short run in this test's own folder."""
    started: list[Flow] = []
    data = write_sums(tmp_path / "sums.jsonl")

    def start(*arguments: str, nodes: int, **environment: str) -> Flow:
        if arguments[0] == "run":
            arguments = (*arguments, f"--nodes={nodes}", f"--dataset={data}", *SHORT)
        started.append(Flow(tmp_path, *arguments, nodes=nodes, **environment))
        return started[-1]

    yield start
    for each in started:
        each.clean_up()


@pytest.fixture
def undisturbed(finished_run: Callable[[str, str, int], FlowRun]) -> Callable[[int], Losses]:
    """``undisturbed(2)``: losses of a run of two nodes without faults."""

    def losses(nodes: int) -> Losses:
        rows = finished_run("torchtune", "full", nodes).artifacts()["metrics"]
        return [(row["step"], row["loss"]) for row in rows]

    return losses


def check_ended(run: Flow, ended: Ended) -> None:
    """Check that all expected processes have ended soon."""
    assert ended.left == [], run.log
    assert ended.seconds < END_S, run.log


@pytest.mark.parametrize("ranks", ["small", pytest.param("torchtune", marks=pytest.mark.nightly)])
def test_retries_after_a_killed_rank_and_a_killed_node_give_the_same_losses(
    flow: NewFlow, finished_run: Callable[[str, str, int], FlowRun], tmp_path: Path, ranks: str
) -> None:
    options, site = [f"--eval-every={EVALUATED}"], {}
    if ranks == "small":  # tests.lab.small_engine
        site = {"PYTHONPATH": str(small_engine.install(tmp_path / "site"))}
        options = [f"--set=engine_options.{value}" for value in ("step_s=0.5", "more_bytes=20000000")]
    run = flow("run", *options, nodes=2, **site)
    first = run.kill("rank", "in a checkpoint", rank=1)
    check_ended(run, first)
    second = run.kill("control task", "in the middle")
    check_ended(run, second)
    run.wait_for(lambda: "/evaluate/" in run.log)
    assert "rank 1 on" in run.log
    assert "was ended by SIGKILL (9)" in run.log
    assert "was stopped by the end of the process that started its task" in run.log
    _, after_first, after_second = run.resumed_steps()
    assert after_first >= first.committed > 0
    assert after_second >= second.committed > after_first
    if ranks == "small":
        assert run.losses() == SMALL_LOSSES
        return
    undisturbed = finished_run("torchtune", "full", 2).artifacts()
    assert run.losses() == [(row["step"], row["loss"]) for row in undisturbed["metrics"]]
    evaluations = undisturbed["outcome"].evaluations
    assert run.outcome()["evaluations"] == [(each.step, each.loss) for each in evaluations]


def test_a_failing_run_leaves_no_secret_of_the_environment(flow: NewFlow, tmp_path: Path) -> None:
    """The rank's error and its log contain its whole environment, in each attempt."""
    site, home = small_engine.install(tmp_path / "site"), tmp_path / "home"
    home.mkdir()
    options = [f"--set=engine_options.{value}" for value in ("step_s=0.1", "at=2", "do=raise_environment")]
    run = flow(
        *("run", *options, "--tracker=tensorboard"),
        nodes=1,
        PYTHONPATH=str(site),
        HOME=str(home),
        FINETUNE_LOG="debug",
        FINETUNE_TRACEBACK="1",
        **SECRETS,
    )
    assert run.end() != 0
    assert "no answer to a request with" in run.log
    assert "FINETUNE_WORK_DIR" in run.log, "the error shows the environment"
    places = dict(files_below(tmp_path))
    for needed in ("log", ".metaflow/FinetuneFlow/finetune/logs", ".html", "stderr", "calibration"):
        assert any(needed in name for name in places), needed
    assert leaks(places.items()) == []


def test_a_pod_that_is_terminated_before_its_first_step_leaves_no_record_of_the_attempt(
    flow: NewFlow, tmp_path: Path
) -> None:
    """The same attempt runs again elsewhere, and a metadata service keeps the first record of an attempt."""
    site = {"PYTHONPATH": str(small_engine.install(tmp_path / "site"))}
    run = flow("run", "--set=engine_options.step_s=600", nodes=1, METAFLOW_KUBERNETES_WORKLOAD="1", **site)
    node = run.wait_for(lambda: run.node(0))
    os.kill(node.task_pid, signal.SIGTERM)
    run.wait_for(lambda: "Task is starting (retry)" in run.log)
    done = [path.parts[-3] for path in tmp_path.glob(f".metaflow/FinetuneFlow/{run.run_id}/*/*/0.DONE.lock")]
    assert "prepare" in done
    assert "train" not in done


@pytest.mark.nightly
def test_resume_continues_after_a_killed_scheduler_ctrl_c_and_sigterm(flow: NewFlow, tmp_path: Path) -> None:
    """Ranks do not train (tests.lab.small_engine), but verify the checkpoint that they resume from."""
    site = {"PYTHONPATH": str(small_engine.install(tmp_path / "site"))}
    run = flow("run", "--set=engine_options.step_s=1.0", nodes=2, **site)
    ended = run.kill("scheduler", "in the middle")
    check_ended(run, ended)
    for how in ("Ctrl-C", "SIGTERM"):
        run = flow("resume", "--origin-run-id", run.run_id, nodes=2, **site)
        run.wait_until("in the middle")
        assert run.resumed_steps()[0] >= ended.committed > 0, run.log
        ended = run.stop(how)
        check_ended(run, ended)
        assert "Resume the run" in run.log, run.log
        # The terminal's Ctrl-C reaches Metaflow's process that draws the card, too; one that still imports
        # says so in its own way, and Metaflow repeats it at the very end.
        assert "Traceback" not in run.log.partition("Card render failed")[0]
    run = flow("resume", "--origin-run-id", run.run_id, nodes=2, **site)
    assert run.end() == 0, run.log
    assert run.resumed_steps()[0] >= ended.committed > 0
    assert run.losses() == SMALL_LOSSES


KILL_EVALUATION = """
import os, sys
if "launchers.evaluation.evaluate" in sys.orig_argv:
    os.kill(os.getpid(), 9)
"""


@pytest.mark.nightly  # tests/launchers/run/test_stages.py has each stage
def test_a_killed_evaluation_does_not_lose_the_model(flow: NewFlow, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(KILL_EVALUATION)
    run = flow("run", "--max-steps=2", nodes=1, PYTHONPATH=str(site))
    assert run.end() == 0, run.log
    assert (tmp_path / "finetuned" / run.run_id / "model" / "model.safetensors").is_file()
    assert f"resume evaluate --origin-run-id {run.run_id}" in run.log
    resumed = flow("resume", "evaluate", "--origin-run-id", run.run_id, nodes=1)
    assert resumed.end() == 0, resumed.log
    assert "held-out loss: " in resumed.log


@pytest.mark.nightly
def test_the_loop_engine_resumes_after_a_killed_agent(flow: NewFlow) -> None:
    run = flow("run", "--engine=deepspeed", nodes=2)
    ended = run.kill("agent", "in the middle", rank=1)
    check_ended(run, ended)
    run.wait_for(lambda: "/evaluate/" in run.log)
    assert "the agent of node 1" in run.log
    assert run.resumed_steps()[1] >= ended.committed > 0
    losses = run.losses()
    assert [step for step, _ in losses] == list(range(1, STEPS + 1))
    assert losses[-1][1] < losses[0][1] - 1


class Disk:
    """A small disk that can be filled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4g", "tmpfs", str(folder)], capture_output=True, text=True
        )
        if mounted.returncode != 0:
            pytest.skip(f"a small disk can only be mounted with root's rights here: {mounted.stderr.strip()}")

    def fill(self, spare_bytes: int = 10 * 2**20) -> None:
        for _ in range(20):
            now = os.statvfs(self._folder)
            used = (now.f_blocks - now.f_bfree) * now.f_frsize
            if self._resize(str(used + spare_bytes)):  # not, when just then more was written
                return
        raise AssertionError(f"{self._folder} cannot be made smaller")

    def free(self) -> None:
        assert self._resize("4g")

    def _resize(self, size: str) -> bool:
        command = ["mount", "-o", f"remount,size={size}", str(self._folder)]
        return subprocess.run(command, capture_output=True).returncode == 0

    def unmount(self) -> None:
        subprocess.run(["umount", "-l", str(self._folder)], check=False)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Disk]]:
    mounted: list[Disk] = []

    def mount(name: str) -> Disk:
        mounted.append(Disk(tmp_path / name))
        return mounted[-1]

    yield mount
    for each in mounted:
        each.unmount()


@pytest.mark.nightly
@pytest.mark.parametrize(("case", "nodes"), [("work", 2), (".metaflow", 1)])
def test_a_full_disk_is_reported_in_one_line_and_resume_continues_when_space_is_free(
    flow: NewFlow,
    disk: Callable[[str], Disk],
    undisturbed: Callable[[int], Losses],
    tmp_path: Path,
    case: str,
    nodes: int,
) -> None:
    """The engine writes into the work folder; the package writes into the datastore."""
    small = disk(case)
    real_training = case == "work"
    slow_ranks = ["--set=engine_options.step_s=0.3", "--set=engine_options.more_bytes=20000000"]
    ranks = [] if real_training else slow_ranks
    site = {} if real_training else {"PYTHONPATH": str(small_engine.install(tmp_path / "site"))}
    run = flow("run", *ranks, nodes=nodes, **site)
    run.wait_for(lambda: run.committed() > 0)
    small.fill()
    assert run.end(within=90) != 0
    text = " ".join(run.log.split())
    assert "No space left" in text
    assert str(run.home / case) in text
    assert f"The last complete checkpoint is of step {run.committed()}." in text
    assert "Traceback" not in text
    assert "Internal error" not in text
    assert "(retry)" not in text, "a full disk is not retried"
    committed = run.committed()
    small.free()
    run = flow("resume", "--origin-run-id", run.run_id, nodes=nodes, **site)
    run.wait_for(lambda: "/evaluate/" in run.log)
    assert run.resumed_steps() == [committed]
    assert committed % EVERY == 0
    assert run.losses() == (undisturbed(nodes) if real_training else SMALL_LOSSES)
