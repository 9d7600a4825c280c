"""Support of fp16 with loss scaling: engine fsdp2, by default on GPUs that have tensor cores but no bf16."""

from __future__ import annotations

from estimator.job import Job
from estimator.vocabulary import ENGINES, LAUNCHED_ENGINES, TASKS, LaunchedPrecision

PRECISION: LaunchedPrecision = "fp16-mixed"
# tests/launchers/engines/fsdp2/test_loss_scaling.py trains each of them. Activations of other families may
# exceed fp16's largest value, 65,504, as those of Gemma do
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def unsupported(engine: str, job: Job) -> str | None:
    """Return the reason why an engine cannot train in fp16, as one clause; None if it can."""
    if PRECISION not in ENGINES[engine].precisions:
        engines = " and ".join(name for name in LAUNCHED_ENGINES if PRECISION in ENGINES[name].precisions)
        return f"precision {PRECISION}: only {engines} scales the loss here"
    if TASKS[job.task].images:
        return f"precision {PRECISION}: not tested with image models"
    if job.model.family not in FAMILIES:
        return f"precision {PRECISION}: tested with {', '.join(FAMILIES)} models only, not {job.model.family}"
    if job.liger:
        return f"liger: its loss computes gradients before {PRECISION} scales them"
    if job.fp8 != "none":
        return f"fp8 {job.fp8}: it replaces products in bf16, not in {PRECISION}"
    return None
