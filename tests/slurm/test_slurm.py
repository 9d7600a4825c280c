"""The shipped sbatch scripts on a real Slurm: two nodes train, are stopped or lost, and resume.

The ranks of the run that is stopped don't train (tests.lab.small_engine).
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import write_sums
from tests.lab import small_engine
from tests.lab.small_engine import SMALL
from tests.slurm.lab import Lab

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "infra" / "slurm"
QUICK = ("--set", "global_batch_size=4", "--set", "seq_len=128", "--no-calibration")
LIMIT_S = 500.0  # of one attempt, on a busy machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder with data that all nodes see."""
    write_sums(tmp_path / "sums.jsonl")
    return tmp_path


def submit(slurm: Lab, shared: Path, *arguments: str, script: str = "finetune", **variables: str) -> int:
    environment = {
        "FINETUNE_PYTHON": sys.executable,
        "FINETUNE_WORK_DIR": str(shared / "work"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}:{small_engine.install(shared / 'site')}",
    }
    return slurm.submit(
        "--nodes=2", str(SCRIPTS / f"{script}.sbatch"), *arguments, **environment, **variables
    )


def test_two_nodes_train_and_export_a_model_with_its_settings(slurm: Lab, shared: Path) -> None:
    (shared / "run.yaml").write_text("max_steps: 8\nevaluation: {generations: 1, max_new_tokens: 4}\n")
    data = ("--set", f"dataset={shared / 'sums.jsonl'}")
    output = shared / "out"
    arguments = ("--settings", str(shared / "run.yaml"), *QUICK, *data, "--output", str(output))
    job = submit(slurm, shared, *arguments)
    assert slurm.wait_for(job, LIMIT_S) == ("COMPLETED", 0), slurm.output(job)
    job_output = slurm.output(job)
    assert "engine torchtune, backend gloo, world size 2, scheduler slurm, host h1" in job_output
    assert "rank 1 (node 1, local 0): cpu" in job_output
    assert re.search(r"peak memory of a process: predicted .* GiB .*, measured \d", job_output)
    assert "2 nodes, each: no GPU, 2 CPU" in job_output
    metrics = json.loads((output / "metrics.json").read_text())
    losses = [step["loss"] for step in metrics["steps"]]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    assert metrics["measured"]["memory_peak_bytes"] > 100 * 2**20
    assert metrics["evaluation"]["finetuned"]["loss"] < metrics["evaluation"]["base"]["loss"]
    assert json.loads((output / "plan.json").read_text())["layout"]["nodes"] == 2
    assert (output / "settings.yaml").exists()
    assert (output / "model" / "model.safetensors").stat().st_size > 2**20
    assert not (output / "run" / "checkpoints").exists(), "not needed any more"
    assert sorted(path.name for path in (output / "run" / "logs" / "attempt-0").iterdir()) == [
        "node-0",
        "node-1",
    ]
    assert not list((shared / "work").glob("*/*")), "nothing is left in the work folders"

    second_job = submit(slurm, shared, *arguments)
    assert slurm.wait_for(second_job, LIMIT_S) == ("FAILED", 2)
    assert f"already contains a finished model of job {job}" in slurm.output(second_job)


@pytest.mark.nightly
def test_stopped_jobs_and_jobs_that_lost_a_node_resume_from_checkpoints(slurm: Lab, shared: Path) -> None:
    output = shared / "out"
    steps = ("--set", "epochs=10", "--set", "max_steps=60", "--set", "checkpoint_every=5")
    nothing_held_out = ("--set", "evaluation.fraction=0", "--set", "evaluation.generations=0")
    data = ("--set", f"dataset={shared / 'sums.jsonl'}")
    small = [word for value in SMALL for word in ("--set", value)]
    arguments = (*QUICK, *steps, *nothing_held_out, *small, *data, "--output", str(output))
    job = submit(slurm, shared, *arguments)

    wait_for_checkpoint(slurm, job, output, attempt=0)
    slurm.command("scancel", "--signal=USR1", str(job))  # what --signal=USR1@180 does before the time limit
    slurm.wait_until(
        lambda: slurm.output(job).count("(not counted)") == 1,
        90,
        "it is requeued",
        lambda: slurm.output(job),
    )
    assert "has to leave (SIGUSR1); all have stopped, and the checkpoint of step" in slurm.output(job)
    assert "ended with status 75" in slurm.output(job)

    wait_for_checkpoint(slurm, job, output, attempt=1)
    slurm.command("scancel", "--signal=TERM", str(job))  # what a job gets first that is pre-empted
    slurm.wait_until(
        lambda: slurm.output(job).count("(not counted)") == 2,
        90,
        "it is requeued",
        lambda: slurm.output(job),
    )
    assert "has to leave (SIGTERM); all have stopped, and the checkpoint of step" in slurm.output(job)

    wait_for_checkpoint(slurm, job, output, attempt=2)
    assert "from the checkpoint of step" in slurm.output(job)
    assert slurm.job(job)["Restarts"] == "2"
    before = len(slurm.output(job))
    lost = time.monotonic()
    slurm.lose_node(2)
    slurm.wait_until(
        lambda: (
            "node 1 (h2) was lost" in slurm.output(job)[before:] and slurm.job(job)["JobState"] == "PENDING"
        ),
        120,
        "the other node ends, and the job waits for nodes",
        lambda: slurm.output(job),
    )
    ended = time.monotonic() - lost
    slurm.start_node(2)

    assert slurm.wait_for(job, LIMIT_S) == ("COMPLETED", 0), slurm.output(job)
    metrics = json.loads((output / "metrics.json").read_text())
    assert ended < 120
    assert metrics["attempts"] == 4
    assert metrics["resumed_from"] > 0
    assert [step["step"] for step in metrics["steps"]] == list(range(1, 61)), "no step is missing or double"
    assert (output / "model" / "model.safetensors").exists()


def wait_for_checkpoint(slurm: Lab, job: int, output: Path, attempt: int) -> None:
    """Wait until this attempt has committed a checkpoint."""
    pattern = f"run/checkpoints/*/*/step-*.{attempt}/checkpoint.json"
    slurm.wait_until(
        lambda: any(output.glob(pattern)),
        LIMIT_S,
        f"attempt {attempt} has made a checkpoint",
        lambda: slurm.output(job),
    )


def test_a_job_that_the_nodes_cannot_run_is_refused_at_once_and_not_retried(slurm: Lab, shared: Path) -> None:
    job = submit(slurm, shared, "--set", "model=llama-70b", "--output", str(shared / "out"))
    assert slurm.wait_for(job, LIMIT_S) == ("FAILED", 2)
    job_output = slurm.output(job)
    assert "70.6 billion parameters, too many to train on CPUs in a useful time" in job_output
    assert "Traceback" not in job_output
    assert "goes back into the queue" not in job_output
    assert not (shared / "out" / "model").exists()


def test_the_checklist_judges_the_nodes_and_its_status_is_the_verdict(slurm: Lab, shared: Path) -> None:
    result = shared / "result.json"
    checks = ("--only", "ranks,mesh,correctness,hostname", "--device", "cpu")
    job = submit(slurm, shared, *checks, script="checklist", CHECKLIST_RESULT=str(result))
    state, status = slurm.wait_for(job, LIMIT_S)
    job_output = slurm.output(job)
    checklist_result = json.loads(result.read_text())
    assert checklist_result["verdict"] in ("PASS", "WARN"), job_output
    assert (state, status) == ("COMPLETED", 0), job_output
    assert {"h1", "h2"} <= set(re.findall(r'"(h\d)"', result.read_text()))
    assert "mesh" in job_output


@pytest.mark.parametrize("script", ["finetune", "checklist"])
def test_options_decide_whether_a_job_has_whole_nodes(slurm: Lab, script: str) -> None:
    shown = []
    for options in (("--exclusive", "--mem=0"), ("--mem=1000M",)):
        job = slurm.submit("--hold", *options, str(SCRIPTS / f"{script}.sbatch"))
        shown.append((slurm.job(job)["OverSubscribe"], slurm.job(job)["MinMemoryNode"]))
        slurm.command("scancel", str(job))
    assert shown == [("NO", "0"), ("OK", "1000M")]
