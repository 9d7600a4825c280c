"""Names of the arguments of ``@gpu_profile``, and roles of a flow's steps."""

from __future__ import annotations

from typing import Literal

Role = Literal["train", "encode", "evaluate", "generate", "score", "compare", "inference", "data", "none"]
"""Part of a plan that a step requests."""

OWN_ARGUMENTS = ("plan", "request", "interval", "rightsize")  # those that are no options of `finetune plan`
INFERENCE_ARGUMENTS = ("model", "seq_len", "gpus", "gpu")  # with request="inference"
SIZE_ARGUMENTS = ("cpu", "memory", "gpus", "gpu", "gpu_memory")  # of a step without a model
