"""Weights dequantized per second on one core, for the rates of estimator/models/weight_formats.py.

python -m benchmarks.dequantize    # a minute; prints a line for each format
"""

from __future__ import annotations

import time
from typing import Any

import torch

from estimator.models.weight_formats import FORMATS
from launchers.models.dequantize import dequantize

ROWS, COLUMNS, GROUP = 4096, 4096, 128


def parts_of(method: str) -> dict[str, torch.Tensor]:
    """Build random parts of one matrix in a published format."""
    words = torch.randint(-(2**31), 2**31, (ROWS, COLUMNS // 8), dtype=torch.int32)
    halves = torch.ones(ROWS // GROUP, COLUMNS, dtype=torch.float16)
    zeros = words[: ROWS // GROUP]
    if method == "mxfp4":
        blocks = torch.randint(0, 256, (1, ROWS, COLUMNS // 32, 16), dtype=torch.uint8)
        return {"_blocks": blocks, "_scales": torch.full(blocks.shape[:-1], 127, dtype=torch.uint8)}
    if method == "fp8":
        weight = torch.randn(ROWS, COLUMNS).to(torch.float8_e4m3fn)
        return {".weight": weight, ".weight_scale_inv": torch.ones(ROWS // GROUP, COLUMNS // GROUP)}
    if method == "awq":
        return {".qweight": words, ".qzeros": zeros, ".scales": halves}
    if method == "gptq":
        rows = (torch.arange(ROWS) // GROUP).to(torch.int32)
        return {".qweight": words.T.contiguous(), ".qzeros": zeros, ".scales": halves, ".g_idx": rows}
    if method == "compressed-tensors":
        return {".weight_packed": words, ".weight_scale": torch.ones(ROWS, COLUMNS // 32)}
    from bitsandbytes.functional import quantize_4bit

    codes, state = quantize_4bit(torch.randn(ROWS, COLUMNS), quant_type="nf4", compress_statistics=True)
    return {"weight": codes, **state.as_dict(packed=True)}


def main() -> None:
    """Time each format's dequantization to bf16 on one thread: the best of three passes."""
    torch.set_num_threads(1)
    options: dict[str, Any] = {
        "weight_block_size": [GROUP, GROUP],
        "bits": 4,
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
    }
    for method in FORMATS:
        parts, seconds = parts_of(method), []
        for _ in range(3):
            start = time.perf_counter()
            dequantize(method, options, dict(parts)).to(torch.bfloat16).contiguous()
            seconds.append(time.perf_counter() - start)
        print(f"{method}: {ROWS * COLUMNS / min(seconds) / 1e6:.0f} million weights a second")


if __name__ == "__main__":
    main()
