"""FSDP2: transformers models divided by torch's own fully_shard, LoRA by peft, checkpoints by DCP."""

from __future__ import annotations

from launchers.base.imports import collector_paused
from launchers.engines import Needs
from launchers.engines.loop.engine import LoopEngine
from launchers.gang.job import TrainJob


class Fsdp2(LoopEngine):
    """The Engine for FSDP2; see launchers.engines.Engine."""

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
