"""Tables of measurements with the rows of a test."""

import csv
from functools import lru_cache
from pathlib import Path

from benchmarks.published import rows, scoring
from benchmarks.published.held_out import compare_held_out

CARRIED = rows.TABLE


@lru_cache(maxsize=1)
def carried() -> scoring.Comparison:
    """Scores of the measurements in the repository."""
    return scoring.compare(CARRIED)


@lru_cache(maxsize=1)
def carried_held_out() -> scoring.Comparison:
    """Scores of the measurements in the repository, each source with ranges fitted to the others."""
    return compare_held_out(CARRIED)


LLAMA_7B = {
    "model": "llama2-7b",
    "n_params": "6738415616",
    "hidden": "4096",
    "layers": "32",
    "heads": "32",
    "kv_heads": "32",
    "ffn": "11008",
    "vocab": "32000",
    "tied": "0",
}


BASE = {
    "id": "x1",
    "source": "a report",
    "method": "full",
    "framework": "torchtitan",
    "gpu": "H100-80GB",
    "n_gpus": "8",
    "fsdp_shard": "8",
    "zero_stage": "3",
    "micro_batch": "1",
    "seq_len": "2048",
    "optimizer": "AdamW",
    "act_ckpt": "full",
    "mem_kind": "reserved",
    "peak_mem_GiB": "40",
    "quality": "A",
    "tps_per_gpu": "5000",
    **LLAMA_7B,
}


def table(folder: Path, *lines: dict[str, str]) -> Path:
    with CARRIED.open(newline="", encoding="utf-8") as file:
        names = next(csv.reader(file))
    path = folder / "table.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows({**BASE, **line} for line in lines)
    return path


def read(folder: Path, **cells: str) -> rows.PublishedRow:
    return rows.read(table(folder, cells))[0]
