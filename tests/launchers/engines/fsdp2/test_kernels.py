"""Which layers compute in float8."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from estimator.models import PROJECTIONS
from launchers.engines.fsdp2 import kernels
from launchers.engines.loop import model
from tests.launchers.engines.loop import runs


@pytest.mark.parametrize("method", ["full", "lora"])
def test_products_of_blocks_are_in_float8_and_no_heads_or_adapters(tmp_path: Path, method: str) -> None:
    from torchao.float8.float8_linear import Float8Linear

    folder = runs.make_model(tmp_path)
    job = runs.make_job(tmp_path, folder, tmp_path, steps=1, settings={"method": method, "fp8": "tensorwise"})
    network = model.made_trainable(
        model.pretrained(job, dtype=torch.float32, device=torch.device("cpu")), job
    )
    kernels.set_up(network, job)
    names = {
        name.removesuffix(".base_layer").rpartition(".")[2]
        for name, module in network.named_modules()
        if isinstance(module, Float8Linear)
    }
    assert names == set(PROJECTIONS)
    assert not any("lora_" in name and isinstance(m, Float8Linear) for name, m in network.named_modules())
