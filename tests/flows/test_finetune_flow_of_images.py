"""An image model in the complete flow: training, faults, evaluation, export."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from launchers.dataset import drawn_shapes
from launchers.engines import _pipeline_layout
from tests.flows.conftest import FlowRun, environment, left_behind, run_flow, start_flow

pytest.importorskip("diffusers")
pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(900)]

STEPS = 12
QUICK = (
    "--model=tiny-sdxl",
    f"--max-steps={STEPS}",
    "--global-batch-size=8",
    "--epochs=3",
    "--checkpoint-every=3",
    "--set=evaluation.generations=1",
)
LIMIT_S = 600.0


def shapes(folder: Path) -> str:
    return f"--dataset={drawn_shapes.write(folder / 'shapes', 160)}"


def losses(run: FlowRun) -> list[float]:
    return [metrics["loss"] for metrics in run.artifacts()["metrics"]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> FlowRun:
    """LoRA on two local nodes, without faults."""
    home = tmp_path_factory.mktemp("undisturbed")
    while_it_trains = ("--set=evaluation.every_steps=6", "--set=images.ema_decay=0.9")
    arguments = ["run", *QUICK, *while_it_trains, shapes(home), "--nodes=2", "--method=lora"]
    run = run_flow(home, *arguments, timeout=LIMIT_S)
    assert run.returncode == 0, run.output
    return run


def test_lora_on_two_nodes_learns_and_is_exported_in_both_formats(undisturbed: FlowRun) -> None:
    artifacts = undisturbed.artifacts()
    evaluation = artifacts["evaluation"]
    assert evaluation.finetuned.loss < evaluation.base.loss
    assert set(evaluation.finetuned.metrics) == {
        f"loss at {name}" for name in ("least noise", "less noise", "more noise", "most noise")
    }
    evaluations = artifacts["outcome"].evaluations
    assert [each.step for each in evaluations] == [6, STEPS]
    assert evaluations[-1].loss == pytest.approx(evaluation.finetuned.loss, abs=1e-4)
    (pictures,) = evaluation.pictures
    assert pictures.base != pictures.finetuned
    model = Path(artifacts["model_path"])
    assert (model / "model_index.json").is_file()
    assert "StableDiffusionXLPipeline" in (model / "README.md").read_text()
    adapter = model.parent / "adapter"
    assert {path.name for path in adapter.iterdir()} >= {_pipeline_layout.LORA, _pipeline_layout.KOHYA}
    assert "images/s" in undisturbed.output
    assert "images/s" in dict(artifacts["facts"])


def killed(home: Path, pattern: str, when: Callable[[], bool]) -> None:
    """Kill a process of this run whose command line has ``pattern``, at the given moment."""
    deadline = time.monotonic() + LIMIT_S / 2
    while time.monotonic() < deadline:
        for process in filter(lambda each: _is_of(each, home, pattern), psutil.process_iter()):
            if when():
                os.kill(process.pid, signal.SIGKILL)
                return
        time.sleep(0.1)
    raise AssertionError(f"no {pattern} was there to be killed: {(home / 'log').read_text()}")


def _is_of(process: psutil.Process, home: Path, pattern: str) -> bool:
    try:
        of_this_run = process.environ().get("FINETUNE_WORK_DIR") == str(home / "work")
        return of_this_run and pattern in " ".join(process.cmdline())
    except psutil.Error:
        return False


def test_a_run_killed_during_latents_and_training_ends_with_the_same_losses(
    undisturbed: FlowRun, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    process = start_flow(tmp_path, ["run", *QUICK, shapes(tmp_path), "--nodes=1", "--method=lora"])
    killed(tmp_path, "launchers.precompute.latents", lambda: "latents: 1 of" in log.read_text())
    killed(tmp_path, "launchers.run.worker", lambda: "checkpoint after step 3" in log.read_text())
    try:
        assert process.wait(LIMIT_S) == 0, log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
    text = log.read_text()
    assert re.search(r"latents: \d of \d parts are already stored", text), text
    assert re.search(r"from the checkpoint of step \d", text), text
    assert left_behind(tmp_path) == []
    run_id = (tmp_path / "run_id").read_text()
    run = FlowRun(tmp_path, environment(tmp_path), returncode=0, output=text, seconds=0.0, run_id=run_id)
    assert losses(run) == pytest.approx(losses(undisturbed), abs=1e-4)
