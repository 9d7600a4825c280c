"""TRL's GRPO: answers are sampled in each step, scored, and compared within their group."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from estimator.vocabulary import TASKS
from launchers.base.imports import collector_paused
from launchers.engines import Needs
from launchers.engines.loop.engine import LoopEngine
from launchers.gang.job import TrainJob

if TYPE_CHECKING:
    from launchers.settings import Settings

# Fields of GRPOConfig that follow from the plan and from other settings
_PLANNED = frozenset(
    {
        *("output_dir", "max_steps", "num_train_epochs", "per_device_train_batch_size"),
        *("gradient_accumulation_steps", "steps_per_generation", "generation_batch_size", "num_generations"),
        *("save_strategy", "save_steps", "logging_strategy", "logging_steps", "shuffle_dataset", "use_cpu"),
        *("bf16", "fp16", "deepspeed", "fsdp", "num_iterations", "optim", "optim_args", "report_to"),
        *("gradient_checkpointing", "seed", "max_completion_length", "beta", "loss_type", "temperature"),
        *("learning_rate", "lr_scheduler_type", "warmup_steps", "max_grad_norm"),
    }
)


class Trl(LoopEngine):
    """The Engine for TRL; see launchers.engines.Engine."""

    def unsupported_settings(self, settings: Settings) -> str | None:
        if TASKS[settings.task].draws_answers:
            for key in sorted(settings.engine_options):
                if key in _PLANNED:
                    return f"engine_options.{key} cannot be set by hand: it follows from other settings"
                if key.startswith(("use_vllm", "vllm_")):
                    return f"engine_options.{key}: no vLLM server is started here; transformers draws answers"
        return None

    def train(self, job: TrainJob) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all files are local
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        with collector_paused():
            from launchers.engines.trl.trainer import train

        train(job)


ENGINE = Trl()
NEEDS = Needs(
    packages=("torch", "trl", "accelerate", "peft", "transformers"),
    modules=("launchers.engines.trl.trainer",),
    distribution="trl",
    extra="rl",
)
