"""Compare plans with published practice: ``python -m benchmarks.choices`` writes results/choices.md.

``practice.csv`` has one row per recipe: the options of ``finetune plan``, the number of GPUs and their
labeled memory in GB (``gpus``, ``gb``; blank: not stated), the source, and the reason where the plan differs.
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from estimator import hardware
from estimator.cli.app import app
from estimator.planning.measured_gpus import UNMEASURED

PRACTICE = Path(__file__).with_name("practice.csv")
RESULTS = Path(__file__).parent / "results" / "choices.md"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One plan (a row of ``finetune plan --json``; None: nothing fits) compared with a source."""

    model: str
    method: str
    options: str
    gpus: int
    gb: float | None
    says: str
    source: str
    difference: str
    plan: dict[str, Any] | None
    measured: bool = True  # a training run was published on this GPU or a similar one
    refused: str  # why nothing fits

    @property
    def differs(self) -> bool:
        """Whether the plan takes other GPUs than the source, or another number of them."""
        if self.plan is None:
            return True
        if self.plan["nodes"] * self.plan["gpus_per_node"] != self.gpus:
            return True
        return self.gb is not None and hardware.gpu(self.plan["gpu_type"]).label_gb != self.gb

    @property
    def machine(self) -> str:
        """Machines that the plan requests, as text."""
        plan = self.plan
        if plan is None:
            return f"nothing: {self.refused}"
        nodes = f"{plan['nodes']} " if plan["nodes"] > 1 else ""
        gpus = f"{plan['nodes'] * plan['gpus_per_node']}x {plan['gpu_type']}"
        mark = "" if self.measured else ", not measured"
        return f"{gpus} ({nodes}{plan['instance_type'] or 'own'}){mark}"

    @property
    def speed(self) -> str:
        """Predicted tokens per second, or "" if unknown."""
        rate = self.plan["tokens_per_second"] if self.plan else None
        return "" if rate is None else f"{rate:,.0f}"

    @property
    def layout(self) -> str:
        """Layout of the plan, as text."""
        plan = self.plan
        if plan is None:
            return ""
        recomputed = ", checkpointing" if plan["activation_checkpointing"] else ""
        batch = f"batch {plan['micro_batch_size']} x {plan['accumulation']}"
        return f"{plan['engine']}: {plan['layout']}, {batch}{recomputed}"


def choices() -> list[Choice]:
    """Plan all rows of the table, without corrections from runs of this machine."""
    with PRACTICE.open(newline="", encoding="utf-8") as file:
        return [_planned(row) for row in csv.DictReader(file)]


def _planned(row: dict[str, str]) -> Choice:
    arguments = ["plan", "--model", row["model"], "--method", row["method"], *shlex.split(row["options"])]
    done = CliRunner().invoke(app, [*arguments, "--top", "1", "--json", "--no-calibration"])
    plan, refused, measured = None, "", True
    if done.exit_code == 0:
        answer = json.loads(done.stdout)
        plan, measured = answer["summary"][0], UNMEASURED not in answer["plans"][0]["why"]
    else:
        problem = " ".join(done.stderr.split(". ")[0].split())
        refused = problem.rpartition("nearest: ")[2].partition(" Available ")[0].removesuffix(".")
    return Choice(
        model=row["model"],
        method=row["method"],
        options=row["options"],
        gpus=int(row["gpus"]),
        gb=float(row["gb"]) if row["gb"] else None,
        says=row["says"],
        source=row["source"],
        difference=row["difference"],
        plan=plan,
        measured=measured,
        refused=refused,
    )


def page(plans: list[Choice]) -> str:
    """Format the table as Markdown."""
    lines = [
        "# Plans compared with published practice",
        "",
        "`python -m benchmarks.choices`; the rows and their sources are `benchmarks/practice.csv`. A plan is",
        "the first of `finetune plan --model MODEL --method METHOD OPTIONS`: 2,048 tokens, a batch of 16",
        "unless the options differ, any machine of the catalogue.",
        "",
        f"{sum(not choice.differs for choice in plans)} of {len(plans)} plans take the GPUs that the source",
        "takes; the last column has the reasons of the others. Not measured: no published training run on",
        "this GPU, or its architecture with the same links "
        f"({sum(not choice.measured for choice in plans)} of {len(plans)}).",
        "",
        "| Model | Method | Options | Plan | Layout | Tokens/s | $ per hour | Practice | "
        "Where ours differs |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for choice in plans:
        price = choice.plan["usd_per_hour"] if choice.plan else None
        cells = (
            choice.model,
            choice.method,
            f"`{choice.options}`" if choice.options else "",
            choice.machine,
            choice.layout,
            choice.speed,
            "" if price is None else f"{price:,.2f}",
            f"{choice.says} ({choice.source})",
            choice.difference if choice.differs else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    RESULTS.write_text(page(choices()))
    print(RESULTS.read_text())


if __name__ == "__main__":
    main()
