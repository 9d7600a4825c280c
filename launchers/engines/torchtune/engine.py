"""torchtune 0.6.1: full fine-tuning, LoRA and QLoRA of dense models, on one process or several (FSDP2).

This module implements Engine. The others are ``config`` (TrainJob -> YAML), ``recipe`` (running torchtune's
own recipes) with ``checkpoint`` and ``clock``, and ``parts`` (what the YAML names).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import yaml

from launchers.base.imports import collector_paused
from launchers.engines import Needs
from launchers.engines.torchtune import config as torchtune_config
from launchers.gang.job import TrainJob
from launchers.gang.rank import RankEnv, RankReporter
from launchers.models import hf_layout
from launchers.settings import Settings

_FINAL = "epoch_0"  # the recipes run one epoch, and name their output after it


class Torchtune:
    """See :class:`launchers.engines.Engine`."""

    def unsupported_settings(self, settings: Settings) -> str | None:
        for key in torchtune_config.PLANNED_KEYS.keys() & settings.engine_options.keys():
            advice = (
                f"; set {torchtune_config.PLANNED_KEYS[key]} instead"
                if torchtune_config.PLANNED_KEYS[key]
                else ""
            )
            return (
                f"engine_options.{key} cannot be set by hand, the run's own accounting depends on it{advice}"
            )
        return None

    def train(self, job: TrainJob) -> None:
        env = RankEnv.read()
        reporter = RankReporter(job.telemetry_dir, env)
        reporter.phase("load", job.start_step)
        values = torchtune_config.recipe_config(job)
        if env.local_rank == 0:
            folder = job.work_dir / "engine"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "torchtune.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all files are local

        with collector_paused():
            from launchers.engines.torchtune import recipe  # imports torchtune: 3 CPU seconds

        recipe.run(job, env, reporter, torchtune_config.recipe_name(job), values)
        reporter.close()

    def collect(self, job: TrainJob, destination: Path) -> None:
        saved, adapters = job.output_dir / _FINAL, job.plan.adapters
        merged = job.output_dir / "model" if adapters else saved
        if job.settings.merges(job.plan.method):
            weights = sorted(path for path in merged.glob("*.safetensors"))
            hf_layout.lay_out_model(weights, job.model_dir, destination / "model")
        if adapters:
            hf_layout.lay_out_adapter(
                saved / "adapter_model.safetensors",
                json.loads((saved / "adapter_config.json").read_text()),
                destination / "adapter",
                base_model=job.base_model,
            )
            if not job.settings.merges(job.plan.method):
                hf_layout.lay_out_tokenizer(job.model_dir, destination / "adapter")


ENGINE = Torchtune()
NEEDS = Needs(
    packages=("torch", "torchtune", "torchao", "accelerate", "transformers"),
    modules=("launchers.engines.torchtune.recipe",),
    distribution="torchtune",
    extra="torchtune",
)
