"""Which checkpoints FSDP2 goes on from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from estimator.errors import UserError
from launchers.engines.fsdp2 import checkpoint
from launchers.gang.job import TrainJob
from tests.launchers.engines.loop import runs


def job_from(folder: Path, **values: Any) -> TrainJob:
    """A job that resumes from a checkpoint which was written by a run with these values."""
    written = {"engine": "fsdp2", "method": "full", "precision": "fp32", "optimizer": "adamw"}
    (folder / "engine.json").write_text(json.dumps(written | values))
    return runs.make_job(folder, folder, folder, steps=4, engine="fsdp2", sharding="fsdp", resume_dir=folder)


@pytest.mark.parametrize("values", [{"method": "lora"}, {"precision": "bf16"}, {"optimizer": "sgd"}])
def test_a_checkpoint_of_another_kind_of_run_is_refused(tmp_path: Path, values: dict[str, str]) -> None:
    with pytest.raises(UserError, match=next(iter(values.values()))):
        checkpoint._check(job_from(tmp_path, **values))


def test_a_checkpoint_of_another_engine_is_refused(tmp_path: Path) -> None:
    job = job_from(tmp_path)
    (tmp_path / "engine.json").write_text(json.dumps({"stage": 2, "world_size": 2}))  # DeepSpeed's
    with pytest.raises(UserError, match="FSDP2"):
        checkpoint._check(job)
    (tmp_path / "engine.json").unlink()
    with pytest.raises(UserError, match="not a whole checkpoint"):
        checkpoint._check(job)
