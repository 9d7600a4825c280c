"""Matrix products of the blocks: in float8 by torchao, and compiled by torch."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from torch import nn

from estimator.models import COMPRESSED_PROJECTIONS, LATENT_PROJECTIONS, PROJECTIONS
from estimator.models.architectures import names_in_transformers
from launchers.engines.loop.compiled import compile_blocks
from launchers.engines.loop.families import blocks
from launchers.gang.job import TrainJob

# Float8 kernels need matrix sides that are multiples of this (torchao 0.15, float8/README.md)
FLOAT8_MULTIPLE = 16


def set_up(network: Any, job: TrainJob) -> None:
    """Apply ``settings.fp8`` and ``settings.compile`` to the blocks, before they are sharded."""
    if job.settings.fp8 != "none":
        _use_float8(network, job)
    if job.settings.compile:
        compile_blocks(network, required="compile" not in job.settings.automatic_choices)


def _use_float8(network: Any, job: TrainJob) -> None:
    """Compute the products of attention and MLPs in float8, except the head's and the adapters'.

    A CPU emulates float8: it rounds the values to float8 and computes in its usual types. A weight's gradient
    is a product over the tokens, which are filled up to a multiple of 16 where needed (``pad_inner_dim``).
    """
    logging.getLogger("torchao").setLevel(logging.ERROR)  # warns that its kernels need another torch
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe = Float8LinearConfig.from_recipe_name(job.settings.fp8)
    config = dataclasses.replace(recipe, emulate=job.plan.layout.device == "cpu", pad_inner_dim=True)
    linear_names = (*PROJECTIONS, *LATENT_PROJECTIONS, *COMPRESSED_PROJECTIONS)
    names = set(names_in_transformers(network.config.get_text_config().model_type, linear_names))

    def converted(module: nn.Module, name: str) -> bool:
        *_, last = (part for part in name.split(".") if part != "base_layer")
        shape = (module.in_features, module.out_features) if isinstance(module, nn.Linear) else (1,)
        return last in names and all(side % FLOAT8_MULTIPLE == 0 for side in shape)

    for block in blocks(network):
        convert_to_float8_training(block, module_filter_fn=converted, config=config)
