"""The bandwidth that the checklist reports, over what a bare loop of the same collective reaches.

    python -m benchmarks.collectives [--repeats 5] [--nodes 2] [--seconds 240]

Writes benchmarks/results/collectives.{json,md}. In each run the checklist's timing and the collective with
nothing around it take turns in random order, over the same group and buffers, each after a barrier, and the
slowest rank counts (checklist/analysis/ratios.py). A ratio below 1 is what our timing costs. Sizes below 64
KiB are latency and not compared. Turns of all repeats count together; a size that the time has left with few
of them has a wide interval.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from benchmarks import ratios
from checklist.options import Options
from checklist.run.local import run_local

RESULTS = Path(__file__).parent / "results"
GOAL = 0.98


def gathered(runs: list[dict[ratios.Cell, ratios.Turns]]) -> dict[ratios.Cell, ratios.Turns]:
    """The turns of all runs, by operation, type and size."""
    found: dict[ratios.Cell, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for run in runs:
        for cell, (ours, bare) in run.items():
            found[cell][0].extend(ours)
            found[cell][1].extend(bare)
    return dict(sorted(found.items()))


def rows(cells: dict[ratios.Cell, ratios.Turns]) -> list[dict[str, Any]]:
    """One row for each cell."""
    made = []
    for (op, dtype, size), turns in cells.items():
        ratio = ratios.of_cell(turns)
        made.append({"op": op, "dtype": dtype, "bytes": size, "turns": ratio.turns, **_interval(ratio)})
    return made


def _interval(ratio: ratios.Ratio) -> dict[str, float]:
    return {"ratio": round(ratio.value, 4), "low": round(ratio.low, 4), "high": round(ratio.high, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=240.0, help="at most, for each run")
    asked = parser.parse_args()
    limits = {"world": asked.seconds}
    options = Options(profile="standard", nodes=asked.nodes, only=("bandwidth",), time_limits_s=limits)  # type: ignore[arg-type]
    measured = [run_local(options) for _ in range(asked.repeats)]
    cells = gathered([ratios.cells(run.collectives) for run in measured])
    overall = ratios.overall(cells.values())
    table = rows(cells)
    command = (
        f"python -m benchmarks.collectives --repeats {asked.repeats} --nodes {asked.nodes} "
        f"--seconds {asked.seconds:g}"
    )
    told = {
        "command": command,
        "machine": describe(),
        "device": measured[0].device,
        "backend": measured[0].backend,
        "goal": GOAL,
        "overall": {**_interval(overall), "turns": overall.turns},
        "rows": table,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "collectives.json").write_text(json.dumps(told, indent=1) + "\n")
    lines = [
        "# Reported bandwidth against a bare loop",
        "",
        f"`{command}`, {describe()['text']}; {measured[0].backend}.",
        "",
        f"Ratio over all operations, types and sizes: **{overall.value:.3f}** (95 % interval "
        f"{overall.low:.3f} to {overall.high:.3f}, {overall.turns} turns; goal: {GOAL} or better). "
        "A cell's ratio is the median of its turns, the whole is the median of the cells.",
        "",
        "| Operation | Type | Bytes | Turns | Ratio | 95 % interval |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['op']} | {row['dtype']} | {row['bytes']} | {row['turns']} | {row['ratio']:.3f} "
        f"| {row['low']:.3f} to {row['high']:.3f} |"
        for row in table
    ]
    (RESULTS / "collectives.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
