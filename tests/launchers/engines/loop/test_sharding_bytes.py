"""Bytes held by each of two ranks compared with the estimate, for each method and sharding."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from estimator.engines.setups import setup_of
from estimator.job import Job
from estimator.memory import states
from estimator.memory.buffers import DEEPSPEED_BUCKET
from estimator.models import find
from estimator.setup import Setup
from launchers.models import tiny_llama
from tests.launchers.engines.loop import held, runs

pytestmark = pytest.mark.slow
CLOSE = 0.02  # of a category: step counts, norms and rotary tables are not counted one by one
METHODS = ("full", "lora", "dora", "qlora", "int8")
SHARDINGS = ("zero2", "zero3", "fsdp")
KINDS = {"qlora": "nf4-double", "int8": "int8"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-llama, and its rows."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama.make(folder / "model")
    runs.make_data(folder / "data", runs.documents(8), batch=4, steps=held.STEP)
    return folder


# The others run every night.
EVERY_CHANGE = [("full", "zero3"), ("qlora", "fsdp")]


def bucket(setup: Setup) -> int:
    """Return the gradient bucket of DeepSpeed that stage 3 keeps (runtime/zero/stage3.py)."""
    return 2 * min(DEEPSPEED_BUCKET, setup.trainable_parameters) if setup.sharding == "zero3" else 0


@pytest.mark.parametrize(
    ("method", "sharding"),
    [
        pytest.param(
            method, sharding, marks=[] if (method, sharding) in EVERY_CHANGE else pytest.mark.nightly
        )
        for method in METHODS
        for sharding in SHARDINGS
    ],
)
def test_each_rank_holds_the_estimated_bytes(
    tmp_path: Path, folder: Path, method: str, sharding: str
) -> None:
    engine = "fsdp2" if sharding == "fsdp" else "deepspeed"
    named, kind = "qlora" if method in KINDS else method, KINDS.get(method, "nf4-double")
    settings: dict[str, Any] = {"method": named, "lora": {"quantization": kind}}
    if engine == "deepspeed":  # else ZeRO-3 would leave a model that small undivided
        settings["engine_options"] = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
    job = runs.make_job(
        tmp_path,
        folder / "model",
        folder / "data",
        steps=held.STEP,
        engine=engine,
        sharding=sharding,
        precision="bf16-mixed",
        settings=settings,
    )
    spec = find("tiny-llama")
    job = dataclasses.replace(job, plan=dataclasses.replace(job.plan, parameters=spec.parameters))
    expected_setup = Job(
        model=spec,
        method=named,  # type: ignore[arg-type]
        engine=engine,  # type: ignore[arg-type]
        quantization=kind,  # type: ignore[arg-type]
    )
    setup = setup_of(expected_setup, job.plan.layout)
    expected = {name: size for name, size in states(setup).items() if size}
    if method == "full":  # what is trained is the model
        expected["adapters"] = expected.pop("weights")
    # DeepSpeed's gradients are in lists and buffers of its own
    elsewhere = 0 if engine == "fsdp2" else expected.pop("gradients") + bucket(setup)
    for bytes_held in held.of_each_rank(job):
        other_bytes = bytes_held.pop("others", 0)
        assert other_bytes == pytest.approx(elsewhere, rel=CLOSE, abs=CLOSE * sum(expected.values()) / 4)
        assert {name: size for name, size in bytes_held.items() if name in expected} == pytest.approx(
            expected, rel=CLOSE
        )
        assert sum(bytes_held.values()) == pytest.approx(sum(expected.values()), rel=CLOSE)
