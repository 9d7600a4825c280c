"""FSDP2: transformers models divided by torch's own fully_shard, LoRA by peft, checkpoints by DCP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from estimator.planning import support
from launchers.base.imports import collector_paused
from launchers.engines import Needs, training_of
from launchers.engines.loop.engine import LoopEngine
from launchers.gang.job import TrainJob

if TYPE_CHECKING:
    from estimator.models import ModelSpec
    from launchers.settings import Settings


class Fsdp2(LoopEngine):
    """The Engine for FSDP2; see launchers.engines.Engine."""

    def unsupported(self, settings: Settings, spec: ModelSpec) -> str | None:
        return support.unsupported("fsdp2", spec, training_of(settings, spec))

    def train(self, job: TrainJob) -> None:
        with collector_paused():
            from launchers.engines.fsdp2.sharding import FullyShard
            from launchers.engines.loop.train import train

        train(job, FullyShard())


ENGINE = Fsdp2()
NEEDS = Needs(
    packages=("torch", "accelerate", "peft", "transformers"),
    modules=("launchers.engines.fsdp2.sharding", "launchers.engines.loop.train"),
    distribution="torch",
    extra="fsdp2",
)
