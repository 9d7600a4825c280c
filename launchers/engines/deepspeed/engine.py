"""DeepSpeed: transformers models on deepspeed.initialize, ZeRO 0 to 3, optimizer offload, LoRA by peft."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from estimator.planning import support
from launchers.engines import _hf_layout, training_of
from launchers.gang.job import TrainJob
from launchers.imports import collector_paused

if TYPE_CHECKING:
    from estimator.models import ModelSpec
    from launchers.settings import Settings


class DeepSpeed:
    """The Engine for DeepSpeed; see launchers.engines.Engine."""

    def unsupported(self, settings: Settings, spec: ModelSpec) -> str | None:
        if settings.zero.offload != "none" and settings.zero.stage == 0:
            return (
                f"zero.offload={settings.zero.offload} with zero.stage=0: only the optimizer of stages"
                " 1 to 3 can be offloaded"
            )
        return support.unsupported("deepspeed", spec, training_of(settings, spec))

    def train(self, job: TrainJob) -> None:
        with collector_paused():
            from launchers.engines.deepspeed.train import train

        train(job)

    def collect(self, job: TrainJob, destination: Path) -> None:
        adapter = job.output_dir / "adapter"
        for name in ("model", "adapter"):
            shutil.rmtree(destination / name, ignore_errors=True)
        weights = sorted((job.output_dir / "model").glob("*.safetensors"))
        _hf_layout.lay_out_model(weights, job.model_dir, destination / "model")
        if adapter.is_dir():
            _hf_layout.lay_out_adapter(
                adapter / "adapter_model.safetensors",
                json.loads((adapter / "adapter_config.json").read_text()),
                destination / "adapter",
                base_model=job.base_model,
            )
