"""What is in flight beside states and activations: FSDP2's copies, also in one process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.published import rows
from estimator import memory
from estimator.memory.buffers import dequantized_bytes
from estimator.models import find
from estimator.plan import GIB
from estimator.setup import Setup

ON_H200 = [
    row
    for row in rows.read(rows.TABLE)
    if row.source.startswith("benchmarks.on_gpu") and row.kind == "allocated" and row.n_gpus == 1
]


@pytest.mark.parametrize("row", ON_H200, ids=[row.id for row in ON_H200])
def test_predicted_live_memory_is_within_1_percent_of_measured_runs(row: rows.PublishedRow) -> None:
    assert row.setup is not None
    assert memory.range_of(row.setup, "allocated").likely_bytes / GIB == pytest.approx(row.gib, rel=0.01)


def test_the_largest_quantized_matrix_is_dequantized_to_16_bits_and_in_litgpt_also_the_head() -> None:
    setup = Setup(model=find("llama-8b"), engine="fsdp2", method="lora", quantization="nf4")
    assert dequantized_bytes(setup) == 2 * 4096 * 14336
    assert dequantized_bytes(replace(setup, tensor=2)) == 4096 * 14336
    assert dequantized_bytes(replace(setup, engine="litgpt")) == 2 * 128256 * 4096
    assert dequantized_bytes(replace(setup, quantization="none")) == 0
    fp32_scales = 4 * 4096 * 14336 // 64
    assert dequantized_bytes(replace(setup, quantization="nf4-double")) == 2 * 4096 * 14336 + fp32_scales
