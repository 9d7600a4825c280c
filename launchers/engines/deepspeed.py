"""DeepSpeed: transformers models on deepspeed.initialize, ZeRO 0 to 3, optimizer offload, LoRA by peft."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from launchers.job import TrainJob

if TYPE_CHECKING:
    from estimator.models import ModelSpec
    from launchers.settings import Settings

# What a tokenizer and its chat template consist of.
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
)


class DeepSpeed:
    """The Engine for DeepSpeed; see launchers.engines.Engine."""

    def unsupported(self, settings: Settings, spec: ModelSpec) -> str | None:  # noqa: ARG002
        if settings.method == "qlora":
            return (
                "qlora: its 4-bit base weights need bitsandbytes on CUDA, and ZeRO can't shard them here;"
                " use --launcher torchtune"
            )
        if settings.compile:
            return "compile: not together with ZeRO's hooks; use --launcher torchtune"
        if settings.zero.offload != "none" and settings.zero.stage == 0:
            return (
                f"zero.offload={settings.zero.offload} with zero.stage=0: only the optimizer of stages"
                " 1 to 3 can be offloaded"
            )
        return None

    def train(self, job: TrainJob) -> None:
        from launchers.engines.deepspeed_train import train

        train(job)

    def collect(self, job: TrainJob, destination: Path) -> None:
        for name in ("model", "adapter"):
            if (job.output_dir / name).is_dir():
                shutil.rmtree(destination / name, ignore_errors=True)
                shutil.copytree(job.output_dir / name, destination / name, copy_function=_link_or_copy)
        for pattern in _TOKENIZER_FILES:
            for path in job.model_dir.glob(pattern):
                shutil.copy2(path, destination / "model" / path.name)


def _link_or_copy(source: str, destination: str) -> str:
    """No second copy of the weights where both folders are on one disk."""
    try:
        os.link(source, destination)
    except OSError:
        shutil.copy2(source, destination)
    return destination
