"""Published runs of generation by transformers' ``generate``: ``data/generation.csv``."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from estimator import hardware
from estimator.hardware import Gpu
from estimator.memory.generation import Batch
from estimator.models import ModelSpec, find

TABLE = Path(__file__).parent / "data" / "generation.csv"


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedGeneration:
    """One run in bf16 or fp16 in which every answer reaches the maximum length."""

    model: ModelSpec
    gpu: Gpu
    gpus: int  # that share one copy layer by layer
    batch: Batch
    tokens_per_second: float  # new tokens of all sequences, over the time with the prompts
    peak_gib: float | None  # allocated by torch on all GPUs; None: not published, or another figure
    cache_copies: int  # alive at once: 2 before transformers had DynamicCache
    doubtful: str  # reason why the row is excluded from comparisons; "": it is included
    source: str

    @property
    def name(self) -> str:
        """Short label of the run."""
        batch = self.batch
        return f"{self.model.name}-{self.gpu.name.split()[0]}-{batch.sequences}x{batch.prompt_tokens}"


@lru_cache(maxsize=1)
def runs() -> tuple[PublishedGeneration, ...]:
    """Read all rows of the table."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return tuple(_run(row) for row in csv.DictReader(file))


def _run(row: dict[str, str]) -> PublishedGeneration:
    batch = Batch(
        sequences=int(row["sequences"]),
        prompt_tokens=int(row["prompt_tokens"]),
        new_tokens=int(row["new_tokens"]),
    )
    # Qwen3's tables divide all tokens, the prompt's too, by the time
    counted = 1.0 if row["counted"] == "new" else batch.new_tokens / batch.tokens
    return PublishedGeneration(
        model=find(row["model"]),
        gpu=hardware.gpu(row["gpu"]),
        gpus=int(row["gpus"]),
        batch=batch,
        tokens_per_second=float(row["tokens_per_second"]) * counted,
        peak_gib=float(row["peak_gib"]) if row["peak_gib"] else None,
        cache_copies=int(row["cache_copies"]),
        doubtful=row["doubtful"],
        source=row["source"],
    )
