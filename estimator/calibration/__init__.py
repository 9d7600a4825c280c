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
from estimator.setup import Setup
from estimator.vocabulary import Engine

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
UNCERTAIN = ("allocator", "activations", "communication buffers", "optimizer temporaries", "runtime")
ADDED = "calibration"  # the category of what runs need beyond the formulas


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """Correction of an estimate, from finished runs of the same engine, method and GPU."""

    gpu: str  # "cpu" where it is one
    factor: float  # on what is shown
    largest_ratio: float  # measured over predicted, of all these runs: the upper end is never below it
    runs: int
    live_factor: float = 1.0  # on the tensors, of what is needed
    largest_live_ratio: float = 1.0

    @property
    def basis(self) -> str:
        """The evidence in words, for an estimate's ``basis``: number of runs, factor, largest ratio."""
        runs = "1 run" if self.runs == 1 else f"{self.runs} runs"
        return f"calibrated on {runs}: x{self.factor:.2f}, at most x{self.largest_ratio:.2f} measured"


class Calibration:
    """Corrections by engine, method and GPU, from the finished runs of a store."""

    def __init__(self, finished: Iterable[Finished] = ()) -> None:
        self._ratios: dict[tuple[str, str, str, str], list[float]] = {}
        self._live_ratios: dict[tuple[str, str, str, str], list[float]] = {}
        self._checkpoints: dict[tuple[str, str], list[float]] = {}
        for run in finished:
            if run.checkpoint_bytes and run.checkpoint_seconds:
                rates = self._checkpoints.setdefault((run.engine, run.gpu), [])
                rates.append(run.checkpoint_bytes / run.checkpoint_seconds)
            key = (run.engine, run.method, run.gpu, run.formulas)
            self._ratios.setdefault(key, []).append(run.ratio)
            if run.live_ratio is not None:
                self._live_ratios.setdefault(key, []).append(run.live_ratio)

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
        live = self._live_ratios.get((*same, formulas(engine, method)), [])
        return Correction(
            gpu=gpu,
            factor=_shrunk(ratios),
            largest_ratio=max(ratios),
            runs=len(ratios),
            live_factor=_shrunk(live),
            largest_live_ratio=max(live, default=1.0),
        )

    def checkpoint_rate(self, engine: str, gpu: str) -> float | None:
        """Bytes a second that a node has written checkpoints with, the runs' median; None where none has."""
        rates = self._checkpoints.get((engine, gpu))
        return statistics.median(rates) if rates else None

    def of(self, setup: Setup, gpu: str | None) -> Correction | None:
        """The correction for a training step on a GPU of that name; None where GPU or runs are unknown."""
        where = "cpu" if setup.device == "cpu" else gpu
        return self.correction(setup.engine, method_of(setup), where) if where else None

    def corrected(self, estimate: MemoryEstimate, setup: Setup, gpu: str | None) -> MemoryEstimate:
        """The estimate as earlier runs correct it, marked with today's formulas (:func:`formulas`)."""
        correction = self.of(setup, gpu)
        uncorrected = dataclasses.replace(estimate, formulas=formulas(setup.engine, method_of(setup)))
        return apply(uncorrected, correction) if correction else uncorrected


def _shrunk(ratios: list[float]) -> float:
    """The factor that so many ratios make: 1 without any."""
    if not ratios:
        return 1.0
    n = len(ratios)
    return math.exp(n / (n + PRIOR_RUNS) * statistics.median(math.log(ratio) for ratio in ratios))


def load(path: Path | str | None = None) -> tuple[Calibration, tuple[str, ...]]:
    """Read the store at ``path`` (default: :func:`~estimator.calibration.finished.default_path`).

    Returns its corrections, and one line for each line of the file that cannot be used.
    """
    records = Store(path).read()
    return Calibration(records.finished), records.problems


def correction(setup: Setup, gpu: str | None, *, store: Store | None = None) -> Correction | None:
    """The local store's correction for a training step on a GPU of that name; None where it has none."""
    return Calibration((store or Store()).read().finished).of(setup, gpu)


def apply(estimate: MemoryEstimate, correction: Correction) -> MemoryEstimate:
    """Correct an estimate that has not been corrected yet; raises ValueError for one that has.

    Each figure by the measurement of its own kind: what is shown by the whole process's memory, what is
    needed by the tensors that were alive (on a CPU, where those aren't counted, by the process's memory).
    figure = factor x figure. Where that is more, the difference is a category of its own; where it is less,
    it comes off the empirical categories in proportion, and off the others only when those are used up.

    upper end = the largest of: the corrected figure; the figure x the largest ratio measured; and, with fewer
    than ``RUNS_FOR_A_BOUND`` runs, the uncorrected upper end x max(factor, 1). So it is never below what such
    a run has measured, scaled by the two predictions.
    """
    if estimate.uncorrected is not None:
        raise ValueError("this estimate is corrected already")
    shown, lower, upper = _corrected(
        estimate.shows_bytes, estimate.shows_range, correction.factor, correction.largest_ratio, correction
    )
    if correction.gpu == "cpu":  # a process needs the most that it may show
        needed, needs_lower, needs_upper = upper, shown, upper
    else:
        live = estimate.live_bytes / estimate.needs_bytes
        needed, needs_lower, needs_upper = _corrected(
            estimate.needs_bytes,
            estimate.needs_range,
            1 + live * (correction.live_factor - 1),
            1 + live * (correction.largest_live_ratio - 1),
            correction,
        )
    host, outside = estimate.host_bytes, estimate.outside_bytes
    if correction.gpu == "cpu":  # the node's memory is that of its processes; of a GPU, it says nothing
        host = math.ceil(host * needed / estimate.needs_bytes)
    return dataclasses.replace(
        estimate,
        categories=_scaled(estimate.categories, needed),
        needs_range=(needs_lower, needs_upper),
        shows_bytes=shown,
        shows_range=(lower, upper),
        host_bytes=host,
        needs_basis=f"{estimate.needs_basis}; {correction.basis}",
        shows_basis=f"{estimate.shows_basis}; {correction.basis}",
        uncorrected=estimate,
        outside_bytes=None if outside is None else round(outside * correction.factor),
    )


def _corrected(
    figure: int, ends: tuple[int, int], factor: float, largest_ratio: float, correction: Correction
) -> tuple[int, int, int]:
    """A figure and the ends of its range as finished runs correct them."""
    likely = round(figure * factor)
    bounds = [likely, math.ceil(figure * largest_ratio)]
    if correction.runs < RUNS_FOR_A_BOUND:
        bounds.append(math.ceil(ends[1] * max(factor, 1.0)))
    return likely, min(round(ends[0] * factor), likely), max(bounds)


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

    It is a hash of a few predictions, so it changes when the formulas do. Runs that other formulas predicted
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
        estimate = memory.estimate(setup)
        sizes += [estimate.needs_bytes, estimate.shows_bytes]
    return hashlib.sha256(repr(sizes).encode()).hexdigest()[:12]
