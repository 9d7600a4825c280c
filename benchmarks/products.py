"""Measure a GPU's matrix products over different durations, values and shapes.

    python -m benchmarks.products [--seconds 3]

Published rates depend on shape, duration and values; the rate of the check gemm is compared with them. Writes
benchmarks/results/products_<GPU>.{json,md}: the median TFLOPS of time spans after a rest, with clocks, power
and the reasons for lower clocks as NVML reports them.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import threading
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from checklist.checks.gpu.load_probe import Sample, sample

RESULTS = Path(__file__).parent / "results"
# Borders of the time spans, counted from the end of the rest
SPANS_S = (0.0, 0.02, 0.1, 0.3, 1.0, math.inf)
REST_S = 1.5  # pause before each case, until the average power is low again
SAMPLE_S = 0.05
FLUSH_BYTES = 1 << 28  # more than any cache
SHAPES = {  # m, k, n
    "4096": (4096, 4096, 4096),
    "8192": (8192, 8192, 8192),
    "16384": (16384, 16384, 16384),
    "2048 x 2048 x 13312": (2048, 2048, 13312),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="load per case in seconds (default: 3)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args()
    if not describe()["gpus"]:
        sys.exit("No NVIDIA GPU is seen here (by its driver, NVML): there is nothing to measure.")
    rows = [
        measure(shape, numbers, options.seconds, flushed=flushed)
        for shape, numbers, flushed in (
            ("4096", "normal", False),
            ("8192", "normal", False),
            ("8192", "normal", True),
            ("8192", "uniform", False),
            ("8192", "zeros", False),
            ("16384", "normal", False),
            ("2048 x 2048 x 13312", "normal", False),
            ("2048 x 2048 x 13312", "normal", True),
        )
    ]
    write(rows, options)


def measure(shape: str, numbers: str, seconds: float, *, flushed: bool) -> dict[str, Any]:
    """Measure one case. ``flushed``: the cache is overwritten before each product, untimed."""
    import torch

    m, k, n = SHAPES[shape]
    left, right = _matrix(m, k, numbers), _matrix(k, n, numbers)
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    other = torch.empty(FLUSH_BYTES, device="cuda", dtype=torch.int8)
    torch.matmul(left, right, out=out)
    torch.cuda.synchronize()
    time.sleep(REST_S)
    timings: list[tuple[float, float]] = []  # (start, duration) of each product
    start = time.perf_counter()
    with _Watch() as watch:
        while time.perf_counter() - start < seconds:
            if flushed:
                other.zero_()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            torch.matmul(left, right, out=out)
            torch.cuda.synchronize()
            timings.append((begin - start, time.perf_counter() - begin))
    speeds = [(when, 2 * m * k * n / each / 1e12) for when, each in timings]
    return {
        "shape": shape,
        "numbers": numbers,
        "flushed": flushed,
        "products": len(speeds),
        "spans": [
            statistics.median(inside)
            if (inside := [speed for when, speed in speeds if a <= when < b])
            else None
            for a, b in pairwise(SPANS_S)
        ],
        "most": max(speed for _, speed in speeds),
        **watch.summary(),
    }


def _matrix(rows: int, columns: int, numbers: str) -> Any:
    import torch

    if numbers == "zeros":
        return torch.zeros(rows, columns, device="cuda", dtype=torch.bfloat16)
    draw = torch.randn if numbers == "normal" else torch.rand
    return draw(rows, columns, device="cuda", dtype=torch.bfloat16)


class _Watch:
    """Samples clock, power and throttle reasons of the first GPU by NVML, twenty times a second."""

    def __enter__(self) -> _Watch:
        import pynvml

        pynvml.nvmlInit()
        self._nvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
        self._over, self._samples = threading.Event(), list[Sample]()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self._samples.append(sample(self._nvml, self._handle))

    def summary(self) -> dict[str, Any]:
        """Summarize the samples; "late" is the median of the second half."""
        clocks = [reading.sm_clock_mhz or 0 for reading in self._samples]
        power = [reading.power_w or 0.0 for reading in self._samples]
        half = len(self._samples) // 2
        return {
            "clock_mhz": clocks,
            "power_w": [round(watts) for watts in power],
            "clock_late_mhz": statistics.median(clocks[half:]),
            "power_late_w": statistics.median(power[half:]),
            "most_c": max(reading.temperature_c or 0 for reading in self._samples),
            "reasons": dict(Counter(reason for reading in self._samples for reason in reading.reasons or ())),
        }


def write(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Write the figures and the page."""
    machine = describe()
    gpu = machine["gpus"][0]
    name = "products_" + re.sub(r"[^a-z0-9]+", "_", gpu.lower())
    command = f"python -m benchmarks.products --seconds {options.seconds:g}"
    options.out.mkdir(parents=True, exist_ok=True)
    figures = {"command": command, "machine": machine, "rows": rows}
    (options.out / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n")
    spans = " | ".join(
        f"{a:g} to {b:g} s" if b < math.inf else f"later than {a:g} s" for a, b in pairwise(SPANS_S)
    )
    lines = [
        f"# Matrix products on {gpu}",
        "",
        f"`{command}`, {machine['text']}. bf16, each product timed by itself after {REST_S:g} s of rest.",
        "",
        f"| Shape | Numbers | Cache flushed | {spans} | Most | SM clock later | Power | Clocks held by |",
        "|---|---|---|" + "---:|" * (len(SPANS_S) + 2) + "---|",
    ]
    lines += [
        f"| {row['shape']} | {row['numbers']} | {'yes' if row['flushed'] else 'no'} "
        f"| {' | '.join('' if speed is None else f'{speed:.0f}' for speed in row['spans'])} "
        f"| {row['most']:.0f} | {row['clock_late_mhz']:.0f} MHz "
        f"| {row['power_late_w']:.0f} W | {', '.join(row['reasons'])} |"
        for row in rows
    ]
    (options.out / f"{name}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
