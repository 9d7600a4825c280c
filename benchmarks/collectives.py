"""The bandwidth that the checklist reports, over what a bare loop of the same collective reaches.

    python -m benchmarks.collectives [--repeats 5] [--nodes 2]

Writes benchmarks/results/collectives.{json,md}. Within each run the checklist's timing and a loop with
nothing in it but the collective take turns, over the same group and buffers. A ratio below 1 is what our
timing costs. Sizes below 64 KiB are latency and not compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path

from benchmarks.machine import describe
from checklist.local import run_local
from checklist.measurements import Measurements
from checklist.options import Options

RESULTS = Path(__file__).parent / "results"
GOAL = 0.98
SMALLEST = 64 << 10


def ratios(measured: Measurements) -> dict[tuple[str, str, int], float]:
    """Reported busbw over the bare loop's, by operation, type and size."""
    rates: dict[tuple[str, str, int], dict[bool, float]] = defaultdict(dict)
    for item in measured.collectives:
        if item.busbw_gbytes_per_s and item.bytes >= SMALLEST:
            rates[item.op, item.dtype, item.bytes][item.bare] = item.busbw_gbytes_per_s
    return {key: both[False] / both[True] for key, both in rates.items() if len(both) == 2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=100.0, help="for each run; all sizes need more")
    asked = parser.parse_args()
    limits = {"world": asked.seconds}
    options = Options(profile="standard", nodes=asked.nodes, only=("bandwidth",), time_limits_s=limits)  # type: ignore[arg-type]
    found: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for _ in range(asked.repeats):
        measured = run_local(options)
        for key, ratio in ratios(measured).items():
            found[key].append(ratio)
    rows = [
        {
            "op": op,
            "dtype": dtype,
            "bytes": size,
            "ratio_median": round(statistics.median(values), 4),
            "ratios": [round(value, 4) for value in values],
        }
        for (op, dtype, size), values in sorted(found.items())
    ]
    overall = statistics.median(value for values in found.values() for value in values)
    told = {
        "command": f"python -m benchmarks.collectives --repeats {asked.repeats} --nodes {asked.nodes} "
        f"--seconds {asked.seconds:g}",
        "machine": describe(),
        "device": measured.device,
        "backend": measured.backend,
        "goal": GOAL,
        "ratio_median": round(overall, 4),
        "rows": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "collectives.json").write_text(json.dumps(told, indent=1) + "\n")
    lines = [
        "# Reported bandwidth against a bare loop",
        "",
        f"`{told['command']}`, {describe()['text']}; {measured.backend}.",
        "",
        f"Median ratio {overall:.3f} (goal: {GOAL} or better).",
        "",
        "| Operation | Type | Bytes | Ratio, median of runs | Least | Most |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {op} | {dtype} | {size} | {statistics.median(v):.3f} | {min(v):.3f} | {max(v):.3f} |"
        for (op, dtype, size), v in sorted(found.items())
    ]
    (RESULTS / "collectives.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
