"""A run on packed rows resumes exactly from its checkpoint after the rows are prepared again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from launchers.dataset.prepare import prepare
from launchers.dataset.prepared import Prepared
from launchers.models import tiny_llama
from launchers.settings import build
from tests.launchers.dataset.chats import some
from tests.launchers.engines.loop import runs

pytestmark = pytest.mark.slow
STEPS, BATCH, AT = 4, 4, 2


@pytest.mark.parametrize(
    ("engine", "sharding", "method"),
    [
        ("fsdp2", "fsdp", "lora"),
        pytest.param("deepspeed", "zero2", "full", marks=pytest.mark.nightly),
        pytest.param("torchtune", "fsdp", "full", marks=pytest.mark.nightly),
    ],
)
def test_the_losses_after_the_checkpoint_are_the_same_to_the_last_bit(
    tmp_path: Path, engine: str, sharding: str, method: str
) -> None:
    model = tiny_llama.make(tmp_path / "model")
    values = {"global_batch_size": BATCH, "packing": True, "max_steps": STEPS, "epochs": 9}
    for name in ("data", "again"):
        info = prepare(some(40), model, build(values), 128, tmp_path / name)
    assert info.packed
    assert max(len(Prepared(tmp_path / "data").row(index).lengths) for index in range(info.rows)) > 1
    job = runs.make_job(
        tmp_path / "work",
        model,
        tmp_path / "data",
        steps=STEPS,
        engine=engine,
        sharding=sharding,
        settings={"method": method, "packing": True},
        checkpoint_every=AT,
    )
    full_losses = runs.losses(runs.run(job))
    resumed = runs.resumed(job, tmp_path / "resumed", AT)
    resumed_steps = runs.losses(runs.run(dataclasses.replace(resumed, data_dir=tmp_path / "again")))
    assert len(full_losses) == STEPS
    assert resumed_steps == full_losses[AT:]
