"""``python -m launchers`` as a command: exit statuses, and resumption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from estimator import models
from estimator.errors import UserError
from estimator.plan import GIB
from launchers import run_config, settings
from launchers.base.workdir import full_disk_explained
from launchers.cluster.allocation import node_address
from launchers.cluster.processes import is_running
from launchers.gang.job import TrainJob
from launchers.report.peak import MemoryPeak
from launchers.results import handover
from launchers.run.training import TrainingResult
from launchers.scheduler import run
from launchers.scheduler.hosts import Start
from tests.decorators.flows.plans import make_plan
from tests.launchers.report.test_trackers import metrics
from tests.warm_python import WarmPython

ROOT = Path(__file__).parents[3]
QUICK = ["--set", "global_batch_size=4", "--set", "seq_len=64", "--no-calibration"]
QUICK += ["--set", "evaluation.fraction=0", "--set", "evaluation.generations=0"]


def environment(folder: Path) -> dict[str, str]:
    schedulers = ("SLURM_", "PBS_", "OMPI_", "PMI_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(schedulers)}
    inherited |= {"FINETUNE_WORK_DIR": str(folder / "work"), "PYTHONPATH": str(ROOT)}
    return inherited | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    with (folder / "log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "launchers", "--output", str(folder / "out"), *arguments],
            cwd=folder,
            env=environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """``refused(tmp_path, "--set", "modle=x")``: output of the command, which must exit with a user error."""
    home = tmp_path_factory.mktemp("warm")
    script = home / "command.py"
    script.write_text("from launchers.__main__ import main\nmain()\n")
    with WarmPython("launchers.__main__", environment=environment(home), folder=home) as warm:

        def run(folder: Path, *arguments: str) -> str:
            command = [str(script), "--output", str(folder / "out"), *arguments]
            done = warm.run(command, folder=folder, environment=environment(folder), merge=True)
            assert done.returncode == 2
            assert "Traceback" not in done.stdout
            return done.stdout

        yield run


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--set", "modle=x"), "unknown setting `modle`"),
        (("--model", "llama-70b"), "too many to train on CPUs"),
        (("--rank", "8"), "Did you mean --lora-rank"),
    ],
)
def test_a_user_error_has_its_own_exit_status(
    tmp_path: Path, arguments: tuple[str, ...], line: str, refused: Callable[..., str]
) -> None:
    assert line in refused(tmp_path, *arguments)
    assert not (tmp_path / "out" / "model").exists()


@pytest.mark.parametrize("option", ["--output", "--cache"])
def test_a_folder_that_cannot_be_written_is_a_user_error(
    tmp_path: Path, option: str, refused: Callable[..., str]
) -> None:
    (tmp_path / "file").write_text("a file")
    problem = refused(tmp_path, option, str(tmp_path / "file"))
    assert all(
        expected_text in problem
        for expected_text in (f"{tmp_path / 'file'}", "cannot be written", f"Set {option} to a")
    )


def test_an_output_folder_in_use_by_another_job_is_refused(
    tmp_path: Path, refused: Callable[..., str]
) -> None:
    folder = tmp_path / "out" / "run"
    folder.mkdir(parents=True)
    (folder / "owner.json").write_text(json.dumps({"job": "81234", "host": "gpu1"}))
    assert f"Job 81234 is writing into {tmp_path / 'out'}" in refused(tmp_path)


@pytest.mark.parametrize("result", ["model", "adapter"])
def test_a_result_whose_evaluation_fails_is_kept_and_the_failure_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], result: str
) -> None:
    """A model, or an adapter that cannot be merged; the file that completes a folder is written last."""
    plan, model = make_plan({}, "local"), models.resolve("tiny-llama")
    evaluation_settings = run_config.resolve(
        settings.build({"evaluation": {"generations": 1}}),
        model.spec,
        method=plan.method,
        engine=plan.engine,
    )

    def collect(job: TrainJob, destination: Path) -> None:
        (destination / result).mkdir(parents=True)  # that transformers cannot load

    monkeypatch.setattr(handover, "collect", collect)
    scheduler_run = run.SchedulerRun(settings=evaluation_settings, output=tmp_path / "out")
    scheduler_run.folder.mkdir(parents=True)
    start = Start(
        secret="",
        attempt=0,
        key="k",
        plan=plan,
        settings=evaluation_settings,
        model=model,
        model_dir=tmp_path / "none",
        data_dir=tmp_path,
    )
    job = TrainJob(
        plan=plan,
        settings=evaluation_settings,
        model=model,
        model_dir=tmp_path,
        data_dir=tmp_path,
        work_dir=tmp_path,
        total_steps=1,
    )
    trained = TrainingResult(job=job, metrics=(metrics(1),), memory_peak=None, exported_step=1)
    run._export(scheduler_run, node_address({}), start, trained, tmp_path / "work")
    assert (tmp_path / "out" / result / "README.md").exists()
    assert run._is_finished(scheduler_run, node_address({}))
    output = capsys.readouterr()
    assert f"model: {tmp_path / 'out' / result}" in output.out
    stored_metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert stored_metrics["evaluation"] is None
    assert stored_metrics["evaluation_failed"].startswith("The evaluation of ")
    assert stored_metrics["evaluation_failed"] in output.err


def test_reserved_memory_is_stored_with_its_prediction() -> None:
    peak = MemoryPeak(size_bytes=32 * GIB, counter="reserved")
    predicted, measured = run._memory(make_plan({}, "kubernetes"), peak)
    assert predicted == {
        "memory_bytes": 33 * GIB,
        "memory_upper_bytes": 39 * GIB,
        "memory_counter": "reserved",
    }
    assert measured == {"memory_peak_bytes": 32 * GIB, "memory_counter": "reserved"}
    predicted, measured = run._memory(make_plan({}, "local"), None)
    assert (predicted["memory_bytes"], predicted["memory_counter"]) == (600 << 20, "resident")
    assert measured["memory_peak_bytes"] is None


def test_a_full_disk_is_reported_in_two_lines(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match="No space left") as caught,
        full_disk_explained(tmp_path, run.RESUME_ADVICE),
    ):
        Path("/dev/full").write_text("anything")
    assert "Free some space" in caught.value.advice
    with pytest.raises(FileNotFoundError), full_disk_explained(tmp_path, run.RESUME_ADVICE):
        (tmp_path / "none").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_run_stopped_by_a_signal_resumes_and_finishes_once(tmp_path: Path, dataset: Path) -> None:
    arguments = [*QUICK, "--set", f"dataset={dataset}", "--set", "epochs=3", "--set", "max_steps=30"]
    arguments += ["--set", "checkpoint_every=5"]
    process = start(tmp_path, *arguments)
    try:
        deadline = time.monotonic() + 240
        while not list(tmp_path.glob("out/run/checkpoints/*/*/step-*/checkpoint.json")):
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.05)
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:  # as Slurm pre-empts
            each.send_signal(signal.SIGTERM)
        assert process.wait(120) == 75, (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()
    log_text = (tmp_path / "log").read_text()
    assert "has to leave (SIGTERM); all have stopped, and the checkpoint of step" in log_text
    assert "resume from the newest checkpoint" in log_text
    assert not list((tmp_path / "work").glob("*/*")), "nothing is left in the work folder"

    assert start(tmp_path, *arguments).wait(500) == 0, (tmp_path / "log").read_text()
    log_text = (tmp_path / "log").read_text()
    assert "from the checkpoint of step" in log_text
    stored_metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert stored_metrics["attempts"] == 2
    assert [step["step"] for step in stored_metrics["steps"]] == list(range(1, 31))

    assert start(tmp_path, *arguments).wait(500) == 2
    assert "already contains a finished model" in (tmp_path / "log").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_outlives_its_shell_and_its_ranks_end_with_the_run(tmp_path: Path, dataset: Path) -> None:
    arguments = [*QUICK, "--set", f"dataset={dataset}", "--set", "max_steps=100000", "--set", "epochs=100000"]
    arguments += ["--set", "log_every=1"]
    log = tmp_path / "log"
    log.touch()
    line = f"{sys.executable} -m launchers --output {tmp_path / 'out'} {' '.join(arguments)} > log 2>&1 & "
    shell = subprocess.Popen(
        ["bash", "-c", line + "echo $!; sleep 600"],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        start_new_session=True,
        # also where these tests run under nohup, which leaves it ignored
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    launcher = int(shell.stdout.readline())

    def wait_for(action: Callable[[], object], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not action():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)

    try:
        wait_for(lambda: "step 3/" in log.read_text(), 120)
        before = log.read_text().count("\nstep ")
        os.killpg(shell.pid, signal.SIGHUP)
        assert shell.wait(60) == -signal.SIGHUP
        wait_for(lambda: log.read_text().count("\nstep ") > before + 20, 120)

        ranks = [json.loads(file.read_text())["pid"] for file in tmp_path.glob("work/**/ranks/rank-*.json")]
        assert ranks
        assert all(map(is_running, ranks))
    finally:
        os.kill(launcher, signal.SIGKILL)
        shell.kill()
    wait_for(lambda: not any(map(is_running, ranks)), 60)
