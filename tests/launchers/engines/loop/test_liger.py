"""Kernels of Liger-Kernel compared with the model code, on a CPU in Triton's interpreter, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from estimator.engines.liger import BLOCK_FAMILIES, FAMILIES
from launchers.cluster.endpoint import unused_port
from tests.launchers.engines import ranks
from tests.launchers.engines.loop import families, runs

pytest.importorskip("liger_kernel", reason="liger-kernel is not installed here")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
COMMAND = [sys.executable, "-m", "tests.launchers.engines.loop.interpreted"]


def environment(**overrides: Any) -> dict[str, str]:
    values = {"TRITON_INTERPRET": 1, "OMP_NUM_THREADS": 1, "HF_HUB_OFFLINE": 1, **overrides}
    return {**os.environ, **{name: str(value) for name, value in values.items()}}


def test_loss_and_gradients_equal_those_of_the_model_without_liger() -> None:
    done = subprocess.run(
        [*COMMAND, "families"], env=environment(), cwd=ranks.ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    apart = json.loads(done.stdout.splitlines()[-1])
    assert set(apart) == {*FAMILIES, "cohere"} | {f"{family} blocks" for family in BLOCK_FAMILIES}
    assert all(loss < 1e-6 and gradient < 1e-4 for loss, gradient in apart.values()), apart


@pytest.mark.parametrize(
    ("engine", "sharding", "method", "task", "family"),
    [
        ("deepspeed", "zero3", "full", "sft", "gemma2"),
        ("fsdp2", "fsdp", "lora", "sft", "llama"),
        pytest.param("fsdp2", "fsdp", "full", "sft", "gemma2", marks=pytest.mark.nightly),
        pytest.param("deepspeed", "zero3", "full", "orpo", "llama", marks=pytest.mark.nightly),
        pytest.param("fsdp2", "fsdp", "full", "orpo", "llama", marks=pytest.mark.nightly),
    ],
)
def test_a_run_of_two_processes_has_the_losses_and_evaluations_of_a_run_without_liger(
    tmp_path: Path, engine: str, sharding: str, method: str, task: str, family: str
) -> None:
    rows = runs.documents if task == "sft" else runs.pairs
    model = tmp_path / "model"
    families.network(family).save_pretrained(model)
    data = runs.make_data(tmp_path / "data", rows(2), batch=2, steps=2)
    # Of three rows one process has less to do than the other
    runs.make_data(data / "heldout", rows(3, seed=5), batch=1, steps=3)
    jobs = {
        liger: runs.make_job(
            tmp_path / str(liger),
            model,
            data,
            steps=2,
            micro=1,
            engine=engine,
            sharding=sharding,
            settings={"method": method, "task": task, "liger": liger, "evaluation": {"every_steps": 1}},
        )
        for liger in (False, True)
    }
    world = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": unused_port()}
    started = [
        subprocess.Popen(
            [*COMMAND, str(jobs[True].save())],
            env=environment(RANK=rank, LOCAL_RANK=rank, GLOO_SOCKET_IFNAME="lo", **world),
            cwd=ranks.ROOT,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        for process in started:
            _, errors = process.communicate(timeout=600)
            assert process.returncode == 0, errors[-4000:]
    finally:
        for process in started:
            process.kill()
    plain = runs.losses(runs.run(jobs[False]))
    assert runs.losses(runs.steps(jobs[True])) == pytest.approx(plain, rel=1e-5)
    curves, expected = (runs.held_out_losses(jobs[liger]) for liger in (True, False))
    assert list(curves) == [1, 2]
    assert curves == pytest.approx(expected, rel=1e-5)
