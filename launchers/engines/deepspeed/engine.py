"""DeepSpeed: transformers models on deepspeed.initialize, ZeRO 0 to 3, optimizer offload, LoRA by peft."""

from __future__ import annotations

from typing import TYPE_CHECKING

from launchers.base.imports import collector_paused
from launchers.engines import Needs
from launchers.engines.loop.engine import LoopEngine
from launchers.gang.job import TrainJob

if TYPE_CHECKING:
    from launchers.settings import Settings


class DeepSpeed(LoopEngine):
    """The Engine for DeepSpeed; see launchers.engines.Engine."""

    def unsupported_settings(self, settings: Settings) -> str | None:
        if settings.zero.offload != "none" and settings.zero.stage == 0:
            return (
                f"zero.offload={settings.zero.offload} with zero.stage=0: only the optimizer of stages"
                " 1 to 3 can be offloaded"
            )
        return None

    def train(self, job: TrainJob) -> None:
        with collector_paused():
            from launchers.engines.deepspeed.sharding import Zero
            from launchers.engines.loop.train import train

        train(job, Zero())


ENGINE = DeepSpeed()
NEEDS = Needs(
    packages=("torch", "deepspeed", "accelerate", "peft", "transformers"),
    modules=("launchers.engines.deepspeed.sharding", "launchers.engines.loop.train"),
    distribution="deepspeed",
    extra="deepspeed",
)
