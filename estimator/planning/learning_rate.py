"""Initial learning rates: that of a published run, scaled to another batch size by the two common rules.

Hints only: the best rate depends on data and model, and neither rule holds for every batch size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from estimator.data import load_rows, parse_row
from estimator.job import Job
from estimator.plan import LearningRate

TABLE = Path(__file__).parents[1] / "data" / "learning_rates.csv"

# The noise of Adam's normalized steps decreases with the square root of the batch size; that of SGD's steps
# in proportion to it. Values in between must be tried.
SOURCES: dict[Literal["sqrt", "linear"], str] = {
    "sqrt": "Malladi et al. 2022, arXiv:2205.10287, for Adam",
    "linear": "Goyal et al. 2017, arXiv:1706.02677, for SGD",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """Batch size and learning rate of one published run."""

    method: str
    batch: int  # sequences per optimizer step
    learning_rate: float
    run: str
    source: str


def hints(job: Job) -> tuple[LearningRate, ...]:
    """Return the rates of both rules for the job's batch; empty without a published AdamW run of the method.

    With the batch size of the published run, both rules agree.
    """
    run = references().get(job.method)
    # The published runs used AdamW; its 8-bit and paged forms take the same steps
    if run is None or "adamw" not in job.optimizer or job.task != "sft":
        return ()
    ratio = job.global_batch_size / run.batch
    rates = {"sqrt": run.learning_rate * math.sqrt(ratio), "linear": run.learning_rate * ratio}
    origin = f"{run.learning_rate:g} at batch {run.batch}: {run.run} ({run.source})"
    return tuple(
        LearningRate(rule=rule, value=rates[rule], source=source, run=origin)
        for rule, source in SOURCES.items()
    )


@lru_cache(maxsize=1)
def references() -> dict[str, Reference]:
    """Read the published runs of ``data/learning_rates.csv``, by method."""
    return {row["method"]: Reference(**parse_row(Reference, row)) for row in load_rows(TABLE)}
