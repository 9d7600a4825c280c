"""Weights dequantized per second on one core, for the rates of estimator/models/weight_formats.py.

python -m benchmarks.dequantize    # a minute; prints a line for each format
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from estimator.models.weight_formats import FORMATS
from launchers.models.dequantize import dequantize

SIDE, GROUP = 4096, 128
OPTIONS: dict[str, Any] = {  # of all formats
    "weight_block_size": [GROUP, GROUP],
    "bits": 4,
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
}


def parts_of(method: str, side: int = SIDE) -> dict[str, torch.Tensor]:
    """Build random parts of one square matrix in a published format."""
    words = torch.randint(-(2**31), 2**31, (side, side // 8), dtype=torch.int32)
    halves = torch.ones(side // GROUP, side, dtype=torch.float16)
    zeros = words[: side // GROUP]
    if method == "mxfp4":
        blocks = torch.randint(0, 256, (1, side, side // 32, 16), dtype=torch.uint8)
        return {"_blocks": blocks, "_scales": torch.full(blocks.shape[:-1], 127, dtype=torch.uint8)}
    if method == "fp4":
        codes = torch.randint(-128, 128, (side, side // 2), dtype=torch.int8)
        return {".weight": codes, ".scale": torch.ones(side, side // 32).to(torch.float8_e8m0fnu)}
    if method == "fp8":
        weight = torch.randn(side, side).to(torch.float8_e4m3fn)
        return {".weight": weight, ".weight_scale_inv": torch.ones(side // GROUP, side // GROUP)}
    if method == "awq":
        return {".qweight": words, ".qzeros": zeros, ".scales": halves}
    if method == "gptq":
        rows = (torch.arange(side) // GROUP).to(torch.int32)
        return {".qweight": words.T.contiguous(), ".qzeros": zeros, ".scales": halves, ".g_idx": rows}
    if method == "compressed-tensors":
        return {".weight_packed": words, ".weight_scale": torch.ones(side, side // 32)}
    from bitsandbytes.functional import quantize_4bit

    codes, state = quantize_4bit(torch.randn(side, side), quant_type="nf4", compress_statistics=True)
    return {"weight": codes, **state.as_dict(packed=True)}


def main() -> None:
    """Time each format's dequantization to bf16 on one thread: the best of three passes."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    torch.set_num_threads(1)
    for method in FORMATS:
        parts, seconds = parts_of(method), []
        for _ in range(3):
            start = time.perf_counter()
            dequantize(method, OPTIONS, dict(parts)).to(torch.bfloat16).contiguous()
            seconds.append(time.perf_counter() - start)
        print(f"{method}: {SIDE**2 / min(seconds) / 1e6:.0f} million weights a second")


if __name__ == "__main__":
    main()
