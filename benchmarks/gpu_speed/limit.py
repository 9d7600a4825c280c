"""Rate of a large matrix product on this device: ``python -m benchmarks.gpu_speed.limit DEVICE``.

The rate bounds the speed of any trainer in 16 bits. Prints FLOP/s as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

SIDE = {"cuda": 8192, "cpu": 512}
SECONDS = {"cuda": 3.0, "cpu": 0.5}


def measure(device: str) -> dict[str, Any]:
    """Multiply two square matrices for some seconds; return the second half's median rate."""
    import torch

    side = SIDE[device]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    rates, end = [], time.perf_counter() + SECONDS[device]
    while time.perf_counter() < end:
        wait()
        begin = time.perf_counter()
        torch.matmul(left, right)
        wait()
        rates.append(2 * side**3 / (time.perf_counter() - begin))
    rate = statistics.median(rates[len(rates) // 2 :])
    return {"flops": rate, "side": side, "driver": _driver() if device == "cuda" else ""}


def _driver() -> str:
    import pynvml

    pynvml.nvmlInit()
    return str(pynvml.nvmlSystemGetDriverVersion())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("device", choices=("cuda", "cpu"))
    print(json.dumps(measure(parser.parse_args().device)))
