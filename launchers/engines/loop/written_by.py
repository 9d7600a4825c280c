"""Properties of the run that wrote a checkpoint, and the check that a run can resume from it."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from estimator.errors import UserError
from estimator.vocabulary import ENGINES, SHARDINGS
from launchers.engines.loop import quantized
from launchers.gang.job import TrainJob

_FILE = "engine.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenBy:
    """Properties of a run on which the format of its checkpoints depends; ``engine.json``."""

    engine: str
    stage: int  # of ZeRO; 0 without
    world_size: int
    method: str
    precision: str
    optimizer: str
    quantization: str
    average: str  # decay of the weights' moving average

    @classmethod
    def of(cls, job: TrainJob) -> WrittenBy:
        """Return the properties that a job's checkpoints depend on."""
        return cls(
            engine=job.plan.engine,
            stage=SHARDINGS[job.plan.layout.sharding].zero_stage or 0,
            world_size=job.plan.layout.world_size,
            method=job.plan.method,
            precision=job.plan.layout.precision,
            optimizer=job.settings.optimizer.name,
            quantization=quantized.kind_of(job) or "none",
            average=str(job.settings.images.ema_decay or "none"),
        )

    def write(self, folder: Path) -> None:
        """Write engine.json into the folder of a checkpoint."""
        (folder / _FILE).write_text(json.dumps(dataclasses.asdict(self)))


def check_resumable(job: TrainJob, folder: Path) -> WrittenBy:
    """Return the properties of the run that wrote the checkpoint in ``folder``.

    Raises UserError unless the job can resume from it. The number of processes may differ.
    """
    current, path = WrittenBy.of(job), folder / _FILE
    values = json.loads(path.read_text()) if path.is_file() else {}
    title = ENGINES[job.plan.engine].title
    if values.get("engine") != current.engine:
        raise UserError(
            f"{folder}: not a whole checkpoint of the {title} engine.",
            "Resume from an earlier checkpoint, with the engine that wrote it.",
        )
    saved = WrittenBy(**values)
    for field in ("stage", "method", "precision", "optimizer", "quantization", "average"):
        if getattr(saved, field) != getattr(current, field):
            raise UserError(
                f"the checkpoint was written with {field} {getattr(saved, field)},"
                f" this run has {getattr(current, field)}.",
                f"{title} resumes only with the same ZeRO stage, method, precision, optimizer and average.",
            )
    return saved
