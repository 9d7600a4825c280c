"""DeepSpeed's JSON configuration of a TrainJob. Needs neither torch nor DeepSpeed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launchers.gang.job import TrainJob
from launchers.settings import overlay

# Size of the bucket of gradients that is reduced at once, in elements. DeepSpeed's default, 5e8, takes 1 GB
# in bf16 on every GPU (2 GB with overlapping communication), even for a smaller model.
# estimator/memory/buffers.py predicts it.
LARGEST_BUCKET = 200_000_000
BUCKET_MULTIPLE = 2  # DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py, nccl_start_alignment_factor


def zero_stage(job: TrainJob) -> int:
    """Return the ZeRO stage of the plan's sharding; plain data parallelism is stage 0."""
    return int(job.plan.to_deepspeed()["zero_optimization"]["stage"])


def configuration(
    job: TrainJob, *, trained: int | None = None, load_universal: bool = False
) -> dict[str, Any]:
    """Build DeepSpeed's configuration of a job; ``settings.engine_options`` overrides it.

    ``trained``: number of parameters with gradients; None: all parameters of the model.

    Optimizer and schedule are torch's, passed to ``deepspeed.initialize`` as objects, so that no CUDA or C++
    extension must be compiled. An "optimizer" or "scheduler" in ``settings.engine_options`` is created by
    DeepSpeed instead.
    """
    bucket = min(LARGEST_BUCKET, job.plan.parameters if trained is None else trained)
    bucket += bucket % BUCKET_MULTIPLE
    values = job.plan.to_deepspeed()  # bf16 has fp32 master weights in the optimizer
    values["zero_optimization"] |= {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    values |= {
        "gradient_clipping": job.settings.clip_grad_norm or 0.0,
        "zero_allow_untested_optimizer": True,  # SGD
        "zero_force_ds_cpu_optimizer": False,  # DeepSpeed's CPU Adam must be compiled
        "steps_per_print": 1_000_000_000,
        "wall_clock_breakdown": False,
    }
    if load_universal:
        values["checkpoint"] = {"load_universal": True}
    return overlay(values, job.settings.engine_options)


def write(job: TrainJob, values: dict[str, Any]) -> Path:
    """Write the configuration to engine/deepspeed.json in the work folder."""
    path = job.work_dir / "engine" / "deepspeed.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=1))
    return path
