"""Build the table of docs/estimator.md: this package's own runs on an H200, predicted and measured."""

from __future__ import annotations

from itertools import groupby

from benchmarks.published.rows import TABLE, PublishedRow, read
from benchmarks.published.scoring import Scored, compare_rows

SOURCE = "benchmarks.on_gpu on 1x NVIDIA H200, 2026-11-26"
NAMES = {"torchtune": "torchtune", "deepspeed": "DeepSpeed", "fsdp2": "FSDP2"}
METHODS = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}


def table() -> str:
    """Build a line for each run; figures that were not measured or are not scored are left empty."""
    scored = compare_rows(row for row in read(TABLE) if row.source == SOURCE)
    lines = ["| Run | Live | Reserved | Shown by NVML | Tokens/s | |", "|---|---|---|---|---|---|"]
    for run, rows in groupby(scored.rows, _run):
        ids = {row.id for row in rows}
        peaks = {item.row.kind: item for item in scored.memory if item.row.id in ids}
        (speed,) = (item for item in scored.throughput if item.row.id in ids)
        cells = [run, *(_pair(peaks.get(kind), ".2f") for kind in ("allocated", "reserved", "process"))]
        lines.append("| " + " | ".join([*cells, _pair(speed, ",.0f"), f"{speed.error:+.0%}"]) + " |")
    return "\n".join(lines)


def _run(row: PublishedRow) -> str:
    assert row.setup is not None
    size = f"{row.setup.model.parameters / 1e9:.0f}B"
    return f"{size} {METHODS[row.method]}, {NAMES[row.framework.split()[0]]}"


def _pair(item: Scored | None, form: str) -> str:
    return "" if item is None else f"{item.predicted:{form}} / {item.measured:{form}}"
