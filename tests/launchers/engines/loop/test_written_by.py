"""Checkpoints from which FSDP2 and DeepSpeed can resume."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from estimator.errors import UserError
from launchers.engines.loop.written_by import WrittenBy, check_resumable
from launchers.gang.job import TrainJob
from tests.launchers.engines.loop import runs


def job_of(folder: Path, engine: str, sharding: str) -> TrainJob:
    return runs.make_job(folder, folder, folder, steps=4, engine=engine, sharding=sharding)


@pytest.mark.parametrize(("engine", "sharding"), [("fsdp2", "fsdp"), ("deepspeed", "zero2")])
@pytest.mark.parametrize(
    "values",
    [
        {"stage": 3},
        {"method": "lora"},
        {"precision": "bf16"},
        {"optimizer": "sgd"},
        {"quantization": "nf4"},
        {"average": "0.99"},
    ],
    ids=lambda values: next(iter(values)),
)
def test_a_checkpoint_of_another_kind_of_run_is_refused(
    tmp_path: Path, engine: str, sharding: str, values: dict[str, Any]
) -> None:
    job = job_of(tmp_path, engine, sharding)
    written = WrittenBy.of(job)
    dataclasses.replace(written, **values).write(tmp_path)
    ((name, value),) = values.items()
    with pytest.raises(UserError, match=f"written with {name} {value}, this run has"):
        check_resumable(job, tmp_path)
    dataclasses.replace(written, world_size=8).write(tmp_path)
    assert check_resumable(job, tmp_path).world_size == 8


def test_a_checkpoint_of_another_engine_is_refused(tmp_path: Path) -> None:
    job = job_of(tmp_path, "fsdp2", "fsdp")
    with pytest.raises(UserError, match="not a whole checkpoint of the FSDP2 engine"):
        check_resumable(job, tmp_path)
    WrittenBy.of(job_of(tmp_path, "deepspeed", "zero2")).write(tmp_path)
    with pytest.raises(UserError, match="with the engine that wrote it"):
        check_resumable(job, tmp_path)
