"""Build the table of examples/README.md: need and cost of each example by its plan.

    python -m benchmarks.examples

plans every settings file for the machines and prices of the tables, and writes the table. The first line of a
file describes what it trains; the second line is the command.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from estimator.formatting import format_bytes
from estimator.job import Target
from estimator.plan import Plan
from launchers import settings
from launchers.run import preparation

FOLDER = Path(__file__).parents[1] / "examples"
README = FOLDER / "README.md"
FILES = tuple(sorted(FOLDER.glob("*.yaml")))
_TABLE = re.compile(r"(<!-- generated: examples -->\n).*?(<!-- end -->)", re.DOTALL)


def plan(path: Path) -> Plan:
    """Plan an example on the machines of the tables."""
    chosen = settings.build(settings.parse_yaml(path.read_text(), path.parent))
    return preparation.plan_run(chosen, Target(kind="catalogue"), calibrated=False).plan


def row(path: Path, example_plan: Plan) -> str:
    """Format an example as a line of the table."""
    purpose, command = (line.removeprefix("# ") for line in path.read_text().splitlines()[:2])
    request, prediction = example_plan.request, example_plan.prediction
    machine = f"{request.nodes * request.gpus_per_node} x {request.gpu_type} ({request.instance_type})"
    need = (
        f"{format_bytes(prediction.memory.needs_bytes)} of {format_bytes(prediction.memory.capacity_bytes)}"
    )
    cells = (f"[{path.name}]({path.name})", purpose, machine, need, *_price(prediction), f"`{command}`")
    return f"| {' | '.join(cells)} |"


def _price(prediction: Any) -> tuple[str, str]:
    """Format USD per hour and per million tokens; unknown if speed or price is."""
    hour, speed = prediction.usd_per_hour, prediction.tokens_per_second
    if hour is None:
        return "unknown", "unknown"
    return f"{hour:,.2f}", "unknown" if speed is None else f"{hour / speed / 3600 * 1e6:,.2f}"


def table(rows: list[str]) -> str:
    head = "| File | What it trains | GPUs | Memory of each | $ per hour | $ per million tokens | Command |"
    return "\n".join([head, "|---|---|---|---|---|---|---|", *rows])


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    content = table([row(path, plan(path)) for path in FILES])
    README.write_text(_TABLE.sub(lambda found: f"{found[1]}\n{content}\n\n{found[2]}", README.read_text()))
