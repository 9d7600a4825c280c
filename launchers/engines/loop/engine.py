"""Common part of the engines that run the loop, without torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from estimator.vocabulary import TASKS
from launchers.engines import _pipeline_layout
from launchers.gang.job import TrainJob
from launchers.models import hf_layout
from launchers.settings import Settings


class LoopEngine:
    """Part of launchers.engines.Engine shared by the engines with the loop. export.py writes the output."""

    def unsupported_settings(self, settings: Settings) -> str | None:  # noqa: ARG002
        return None

    def collect(self, job: TrainJob, destination: Path) -> None:
        if TASKS[job.settings.task].images:
            _pipeline_layout.lay_out(job.output_dir, job.model_dir, destination)
            return
        model, adapter = job.output_dir / "model", job.output_dir / "adapter"
        for name in ("model", "adapter"):
            shutil.rmtree(destination / name, ignore_errors=True)
        if model.is_dir():
            weights = sorted(model.glob("*.safetensors"))
            hf_layout.lay_out_model(weights, job.model_dir, destination / "model")
        if (adapter / hf_layout.ADAPTER_V2_CONFIG).is_file():
            hf_layout.lay_out_adapter_v2(adapter, destination / "adapter", base_model=job.base_model)
        elif adapter.is_dir():
            hf_layout.lay_out_adapter(
                adapter / "adapter_model.safetensors",
                json.loads((adapter / "adapter_config.json").read_text()),
                destination / "adapter",
                base_model=job.base_model,
            )
        if not model.is_dir() or (adapter.is_dir() and job.settings.new_tokens):
            hf_layout.lay_out_tokenizer(job.model_dir, destination / "adapter")
