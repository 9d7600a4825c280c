"""Simulate a 24-hour run on spot nodes with random interruptions, and compare it with the planner's formula.

    python -m benchmarks.spot    # about 10 seconds; writes benchmarks/results/spot.*

Each node is interrupted at random at the same rate; the run then waits for a replacement, continues from the
newest stored checkpoint, and may lose a node while it waits. Compared are the hours until the work is done,
and the share of runs that stay within an interruption budget.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from estimator.plan import Interruptions
from estimator.planning import interruptions

RESULTS = Path(__file__).parent / "results"
NODES = (1, 8, 64)
HOURS = 24
RATE = 0.05  # interruptions per node and hour
CHECKPOINT_S, STORE_S, RESTART_S = 60.0, 60.0, 600.0
BUDGETS = (2, 20)


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """Results of many simulated runs of the same work."""

    hours: tuple[float, ...]
    interruptions: tuple[int, ...]

    @property
    def mean_hours(self) -> float:
        return statistics.fmean(self.hours)

    def within(self, budget: int) -> float:
        """Return the share of runs with at most ``budget`` interruptions."""
        return sum(count <= budget for count in self.interruptions) / len(self.interruptions)


def gang(nodes: int, rate: float = RATE) -> Interruptions:
    """Build a run on ``nodes`` spot nodes with the checkpoint interval of the formula."""
    interval = interruptions.interval(CHECKPOINT_S, 3600 / (rate * nodes))
    return Interruptions(
        nodes=nodes,
        per_node_hour=rate,
        source="as given",
        checkpoint_seconds=CHECKPOINT_S,
        checkpoint_basis="as given",
        store_seconds=STORE_S,
        restart_seconds=RESTART_S,
        interval_seconds=max(interval, STORE_S),
    )


def simulate(spot: Interruptions, *, work_hours: float, runs: int, seed: int) -> Simulated:
    """Simulate ``runs`` runs of the work, each with random interruptions."""
    draw = random.Random(seed)  # no secret
    ended = [_run(spot, work_hours * 3600, draw) for _ in range(runs)]
    return Simulated(
        hours=tuple(seconds / 3600 for seconds, _ in ended), interruptions=tuple(count for _, count in ended)
    )


def _run(spot_run: Interruptions, work: float, draw: random.Random) -> tuple[float, int]:
    """Simulate one run; return its seconds and its number of interruptions."""
    rate = spot_run.per_node_hour * spot_run.nodes / 3600
    interval, pause = spot_run.interval_seconds, spot_run.checkpoint_seconds
    total, count, stored = 0.0, 0, 0.0
    while True:
        remaining = work - stored
        checkpoints = max(0, -int(-remaining // interval) - 1)  # none at the end
        needed, time_to_interruption = remaining + checkpoints * pause, draw.expovariate(rate)
        if time_to_interruption >= needed:
            return total + needed, count
        safe = int((time_to_interruption - spot_run.store_seconds) // (interval + pause))
        stored += min(max(safe, 0), checkpoints) * interval
        total, count = total + time_to_interruption, count + 1
        while (next_interruption := draw.expovariate(rate)) < spot_run.restart_seconds:
            total, count = total + next_interruption, count + 1
        total += spot_run.restart_seconds


def measure(runs: int) -> list[dict[str, Any]]:
    """Build a row per number of nodes, with the planned interval and with a tenth of the run."""
    rows = []
    for nodes in NODES:
        best = gang(nodes)
        for cadence, spot in (
            ("planned", best),
            ("every tenth", replace(best, interval_seconds=HOURS * 360.0)),
        ):
            planned = interruptions.wall_hours(HOURS, spot)
            row: dict[str, Any] = {
                "nodes": nodes,
                "cadence": cadence,
                "interval_minutes": spot.interval_seconds / 60,
                "formula_hours": planned,
                "formula_interruptions": interruptions.expected(planned, spot),
            }
            if planned < 100 * HOURS:
                simulated = simulate(spot, work_hours=HOURS, runs=runs, seed=nodes)
                row |= {
                    "hours": simulated.mean_hours,
                    "hours_5_95": statistics.quantiles(simulated.hours, n=20)[::18],
                    "interruptions": statistics.fmean(simulated.interruptions),
                    "within": {budget: simulated.within(budget) for budget in BUDGETS},
                    "formula_within": {
                        budget: interruptions.completion_probability(planned, spot, budget)
                        for budget in BUDGETS
                    },
                }
            rows.append(row)
    return rows


def markdown(command: str, machine: dict[str, Any], runs: int, rows: list[dict[str, Any]]) -> str:
    lines = [
        "# Spot: 24 hours of training, simulated and by formula",
        "",
        f"`{command}`, {machine['text']}",
        "",
        f"{runs:,} runs of {HOURS} h of training per row. A node is interrupted {RATE:g} times an hour, "
        f"training pauses {CHECKPOINT_S:.0f} s for a checkpoint, stored {STORE_S:.0f} s later, and "
        f"{RESTART_S / 60:.0f} min pass from an interruption to the next step. `planned`: an interval of "
        "sqrt(2 x checkpoint x time between interruptions); `every tenth`: as without `--spot`.",
        "",
        "| nodes | checkpoints | every | hours by formula | hours simulated (5 to 95 %) | interruptions "
        "by formula, simulated | "
        + " | ".join(f"at most {budget}: formula, simulated" for budget in BUDGETS)
        + " |",
        "|---" * (6 + len(BUDGETS)) + "|",
    ]
    for row in rows:
        cells = [str(row["nodes"]), row["cadence"], f"{row['interval_minutes']:.0f} min"]
        if "hours" in row:
            low, high = row["hours_5_95"]
            cells += [f"{row['formula_hours']:.1f}", f"{row['hours']:.1f} ({low:.1f} to {high:.1f})"]
            cells += [f"{row['formula_interruptions']:.1f}, {row['interruptions']:.1f}"]
            cells += [
                f"{row['formula_within'][budget]:.1%}, {row['within'][budget]:.1%}" for budget in BUDGETS
            ]
        else:
            cells += [f"{row['formula_hours']:,.0f}", "not simulated", "", *[""] * len(BUDGETS)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    command = shlex.join(["python", "-m", "benchmarks.spot", *sys.argv[1:]])
    machine, rows = describe(), measure(options.runs)
    options.out.mkdir(parents=True, exist_ok=True)
    text = markdown(command, machine, options.runs, rows)
    result = {"command": command, "machine": machine, "runs": options.runs, "rows": rows}
    (options.out / "spot.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.out / "spot.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
