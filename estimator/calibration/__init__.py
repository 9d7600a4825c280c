"""Calibration: what finished runs have measured, and how that corrects the next estimate.

Each finished run leaves a line in a local file (``finished.py``): what was predicted before any correction,
and what was measured. Runs of one engine, method and GPU that today's formulas predicted make a
:class:`Correction`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from estimator.calibration.finished import VARIABLE, Finished, Records, Store
from estimator.plan import MemoryEstimate
from estimator.setup import Engine, Setup

__all__ = [
    "VARIABLE",
    "Calibration",
    "Correction",
    "Finished",
    "Records",
    "Store",
    "apply",
    "correction",
    "formulas",
    "load",
    "method_of",
]

# The formulas' own evidence counts as this many runs. A choice: one run moves an estimate by a third of what
# it found, three runs by 60 %, twenty by 91 %.
PRIOR_RUNS = 2
# The largest of n ratios covers the next run's with probability n / (n + 1), if runs are alike. The upper
# bound promises 95 %, so this many runs can set it alone; fewer can only raise it.
RUNS_FOR_A_BOUND = 19
# Taken from first where runs need less than predicted: their sizes are empirical. The others are arithmetic
# on shapes and types.
UNCERTAIN = ("fragmentation", "activations", "communication buffers", "optimizer temporaries", "runtime")
ADDED = "calibration"  # the category of what runs need beyond the formulas


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """What finished runs of one engine, method and GPU say about an estimate of the same kind."""

    gpu: str  # "cpu" where it is one
    factor: float  # on the likely value
    largest_ratio: float  # measured over predicted, of all these runs: the upper bound is never below it
    runs: int

    @property
    def basis(self) -> str:
        """The evidence in words, for an estimate's ``basis``: number of runs, factor, largest ratio."""
        runs = "1 run" if self.runs == 1 else f"{self.runs} runs"
        return f"calibrated on {runs}: x{self.factor:.2f}, at most x{self.largest_ratio:.2f} measured"


class Calibration:
    """Corrections by engine, method and GPU, from the finished runs of a store."""

    def __init__(self, finished: Iterable[Finished] = ()) -> None:
        self._ratios: dict[tuple[str, str, str, str], list[float]] = {}
        for run in finished:
            key = (run.engine, run.method, run.gpu, run.formulas)
            self._ratios.setdefault(key, []).append(run.ratio)

    def correction(self, engine: str, method: str, gpu: str) -> Correction | None:
        """The correction from runs of this engine, method and GPU; None where today's formulas made none.

        ``gpu`` is a GPU's name of the table or "cpu". factor = exp(n / (n + PRIOR_RUNS) x the median of
        ln(measured / predicted)): shrunk towards 1 while runs are few, and not moved far by one odd run.
        """
        same = (engine, method, gpu)
        if not any(key[:3] == same for key in self._ratios):
            return None
        ratios = self._ratios.get((*same, formulas(engine, method)))
        if not ratios:
            return None
        n = len(ratios)
        middle = statistics.median(math.log(ratio) for ratio in ratios)
        factor = math.exp(n / (n + PRIOR_RUNS) * middle)
        return Correction(gpu=gpu, factor=factor, largest_ratio=max(ratios), runs=n)

    def of(self, setup: Setup, gpu: str | None) -> Correction | None:
        """The correction for a training step on a GPU of that name; None where GPU or runs are unknown."""
        where = "cpu" if setup.device == "cpu" else gpu
        return self.correction(setup.engine, method_of(setup), where) if where else None

    def corrected(self, estimate: MemoryEstimate, setup: Setup, gpu: str | None) -> MemoryEstimate:
        """The estimate as earlier runs correct it, marked with today's formulas (:func:`formulas`)."""
        correction = self.of(setup, gpu)
        uncorrected = dataclasses.replace(estimate, formulas=formulas(setup.engine, method_of(setup)))
        return apply(uncorrected, correction) if correction else uncorrected


def load(path: Path | str | None = None) -> tuple[Calibration, tuple[str, ...]]:
    """Read the store at ``path`` (default: :func:`~estimator.calibration.finished.default_path`).

    Returns its corrections, and one line for each line of the file that can't be used.
    """
    records = Store(path).read()
    return Calibration(records.finished), records.problems


def correction(setup: Setup, gpu: str | None, *, store: Store | None = None) -> Correction | None:
    """The local store's correction for a training step on a GPU of that name; None where it has none."""
    return Calibration((store or Store()).read().finished).of(setup, gpu)


def apply(estimate: MemoryEstimate, correction: Correction) -> MemoryEstimate:
    """Correct an estimate that has not been corrected yet; raises ValueError for one that has.

    likely = factor x likely. Where that is more, the difference is a category of its own; where it is less,
    it comes off the empirical categories in proportion, and off the others only when those are used up.

    upper = the largest of: the corrected likely; likely x the largest ratio measured; and, with fewer than
    ``RUNS_FOR_A_BOUND`` runs, the uncorrected upper bound x max(factor, 1). So a bound is never below what
    such a run has measured, scaled by the two predictions.
    """
    if estimate.uncorrected is not None:
        raise ValueError("this estimate is corrected already")
    before, upper_before = estimate.likely_bytes, estimate.upper_bytes
    categories = _scaled(estimate.categories, round(before * correction.factor))
    likely = sum(size for _, size in categories)
    bounds = [likely, math.ceil(before * correction.largest_ratio)]
    if correction.runs < RUNS_FOR_A_BOUND:
        bounds.append(math.ceil(upper_before * max(correction.factor, 1.0)))
    upper = max(bounds)
    host = estimate.host_bytes
    if correction.gpu == "cpu":  # the node's memory is that of its processes; of a GPU, it says nothing
        host = math.ceil(host * upper / upper_before)
    return dataclasses.replace(
        estimate,
        categories=categories,
        upper_bytes=upper,
        host_bytes=host,
        basis=f"{estimate.basis}; {correction.basis}",
        uncorrected=estimate,
    )


def _scaled(categories: tuple[tuple[str, int], ...], target: int) -> tuple[tuple[str, int], ...]:
    """The categories with the sum ``target``; none below 0."""
    missing = target - sum(size for _, size in categories)
    if missing >= 0:
        return (*categories, (ADDED, missing)) if missing else categories
    sizes = dict(categories)
    for group in (UNCERTAIN, tuple(sizes)):
        total = sum(sizes.get(name, 0) for name in group)
        reduction = min(-missing, total)
        for name in group:
            if total and name in sizes:
                deducted = reduction * sizes[name] // total
                total, reduction, missing = total - sizes[name], reduction - deducted, missing + deducted
                sizes[name] -= deducted
    return tuple((name, sizes[name]) for name, _ in categories if sizes[name])


def method_of(setup: Setup) -> str:
    """The user's name of a step's method: full, lora, dora; with a quantised base qlora, qdora."""
    return f"q{setup.method}" if setup.quantization != "none" else setup.method


@lru_cache(maxsize=64)
def formulas(engine: Engine, method: str) -> str:
    """A mark (12 hexadecimal digits) of what the formulas predict for an engine and method today.

    It is a hash of three predictions, so it changes when the formulas do. Runs that other formulas predicted
    say nothing about today's error.
    """
    from estimator import memory, models

    plain = method.removeprefix("q") if method.startswith("q") else method
    sharding = "zero3" if engine == "deepspeed" else "fsdp"
    sizes = []
    for shard, checkpointing, device in ((1, "none", "cuda"), (8, "full", "cuda"), (1, "none", "cpu")):
        setup = Setup(
            model=models.find("llama-8b"),
            engine=engine,
            method=plain,  # type: ignore[arg-type]
            quantization="nf4-double" if plain != method else "none",
            sharding=sharding if shard > 1 else "none",  # type: ignore[arg-type]
            shard=shard,
            checkpointing=checkpointing,  # type: ignore[arg-type]
            device=device,  # type: ignore[arg-type]
        )
        sizes.append(memory.estimate(setup).likely_bytes)
    return hashlib.sha256(repr(sizes).encode()).hexdigest()[:12]
