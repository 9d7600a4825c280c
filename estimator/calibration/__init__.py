"""Calibration: correct estimates by the measurements of finished runs.

Each finished run adds a line to a local file (``finished.py``): the prediction before any correction, and the
measurement. Runs of the same engine, method and GPU that were predicted by the current formulas form a
:class:`Correction`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from estimator.calibration import speed as speeds
from estimator.calibration.finished import VARIABLE, Finished, Records, Store
from estimator.calibration.speed import RUNS_FOR_A_BOUND, SpeedCorrection, shrunk
from estimator.plan import MemoryEstimate
from estimator.setup import Setup
from estimator.vocabulary import ENGINES, METHODS, Engine

if TYPE_CHECKING:
    from estimator.throughput import Speed

__all__ = [
    "VARIABLE",
    "Calibration",
    "Correction",
    "Finished",
    "Records",
    "Store",
    "apply",
    "corrected_alike",
    "correction",
    "formulas",
    "load",
    "method_of",
]

# Categories that are reduced first if runs need less than predicted: their sizes are empirical. The others
# are arithmetic on shapes and types.
UNCERTAIN = ("allocator", "activations", "communication buffers", "optimizer temporaries", "runtime")
ADDED = "calibration"  # category of memory that runs need beyond the formulas


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """Correction of an estimate, from finished runs of the same engine, method and GPU."""

    gpu: str  # "cpu" for a CPU
    factor: float  # correction of the memory shown by nvidia-smi
    largest_ratio: float  # measured / predicted over all these runs: lower limit of the upper end
    runs: int
    live_factor: float = 1.0  # correction of the live tensors in the needed memory
    largest_live_ratio: float = 1.0

    @property
    def basis(self) -> str:
        """Describe the evidence for the ``basis`` of an estimate: number of runs, factor, largest ratio."""
        runs = "1 run" if self.runs == 1 else f"{self.runs} runs"
        return (
            f"calibrated on {runs}: scaled by {self.factor:.2f} "
            f"(measured up to {self.largest_ratio:.2f} times the estimate)"
        )


class Calibration:
    """Corrections by engine, method and GPU, from the finished runs of a store."""

    def __init__(self, finished: Iterable[Finished] = ()) -> None:
        self._ratios: dict[tuple[str, str, str, str], list[float]] = {}
        self._live_ratios: dict[tuple[str, str, str, str], list[float]] = {}
        self._checkpoints: dict[tuple[str, str], list[float]] = {}
        self._speed_ratios: dict[str, dict[tuple[str, str, str], list[float]]] = {}
        for run in finished:
            if run.checkpoint_bytes and run.checkpoint_seconds:
                rates = self._checkpoints.setdefault((run.engine, run.gpu), [])
                rates.append(run.checkpoint_bytes / run.checkpoint_seconds)
            if run.speed_ratio is not None:
                of_gpu = self._speed_ratios.setdefault(run.gpu, {})
                speed_key = (run.engine, run.method, run.speed_formulas)
                of_gpu.setdefault(speed_key, []).append(run.speed_ratio)
            key = (run.engine, run.method, run.gpu, run.formulas)
            self._ratios.setdefault(key, []).append(run.ratio)
            if run.live_ratio is not None:
                self._live_ratios.setdefault(key, []).append(run.live_ratio)

    def correction(self, engine: str, method: str, gpu: str) -> Correction | None:
        """Return the correction from runs of this engine, method and GPU, or None if there are no such runs.

        Only runs that the current formulas predicted count. ``gpu``: name in the GPU table, or "cpu".
        factor = exp(n / (n + PRIOR_RUNS) x median of ln(measured / predicted)): shrunk towards 1 for few
        runs, and robust to one outlier.
        """
        prefix = (engine, method, gpu)
        if not any(key[:3] == prefix for key in self._ratios):
            return None
        ratios = self._ratios.get((*prefix, formulas(engine, method)))
        if not ratios:
            return None
        live = self._live_ratios.get((*prefix, formulas(engine, method)), [])
        return Correction(
            gpu=gpu,
            factor=shrunk(ratios),
            largest_ratio=max(ratios),
            runs=len(ratios),
            live_factor=shrunk(live),
            largest_live_ratio=max(live, default=1.0),
        )

    def checkpoint_rate(self, engine: str, gpu: str) -> float | None:
        """Return the median rate of checkpoint writes in bytes per second and node, or None without runs."""
        rates = self._checkpoints.get((engine, gpu))
        if not rates:
            return None
        import statistics  # 5 ms, and most plans have no finished runs

        return statistics.median(rates)

    def of(self, setup: Setup, gpu: str | None) -> Correction | None:
        """Return the correction for a training step on this GPU, or None if GPU or runs are unknown."""
        hardware_name = "cpu" if setup.device == "cpu" else gpu
        return self.correction(setup.engine, method_of(setup), hardware_name) if hardware_name else None

    def speed_correction(self, engine: str, method: str, gpu: str) -> SpeedCorrection | None:
        """Return the correction of the speed on this GPU, or None without runs of the current formulas."""
        of_gpu = {
            (run_engine, run_method): ratios
            for (run_engine, run_method, used), ratios in self._speed_ratios.get(gpu, {}).items()
            if run_engine in ENGINES
            and run_method in METHODS
            and used == speeds.formulas(run_engine, run_method)
        }
        return speeds.correction(
            of_gpu.get((engine, method), []), [ratio for ratios in of_gpu.values() for ratio in ratios]
        )

    def corrected_speed(self, speed: Speed, setup: Setup, gpu: str | None) -> Speed:
        """Return the speed corrected by earlier runs on this GPU, with the id of the current formulas."""
        if speed.tokens_per_second is None or gpu is None:
            return speed
        method = method_of(setup)
        speed = dataclasses.replace(speed, formulas=speeds.formulas(setup.engine, method))
        correction = self.speed_correction(setup.engine, method, gpu)
        return speeds.apply(speed, correction) if correction else speed

    def corrected(self, estimate: MemoryEstimate, setup: Setup, gpu: str | None) -> MemoryEstimate:
        """Return the estimate corrected by earlier runs, with the id of the current formulas."""
        correction = self.of(setup, gpu)
        uncorrected = dataclasses.replace(estimate, formulas=formulas(setup.engine, method_of(setup)))
        return apply(uncorrected, correction) if correction else uncorrected


def load(path: Path | str | None = None, *, own_loops: bool = False) -> tuple[Calibration, tuple[str, ...]]:
    """Read the store at ``path`` (default: :func:`~estimator.calibration.finished.default_path`).

    Returns the corrections, and one message per line of the file that cannot be used. ``own_loops``: from
    runs of training loops in users' steps instead of runs of the launched engines; the two differ in memory.
    """
    records = Store(path).read()
    return Calibration(run for run in records.finished if run.own_loop == own_loops), records.problems


def apply(estimate: MemoryEstimate, correction: Correction) -> MemoryEstimate:
    """Correct an estimate; raises ValueError if it has been corrected already.

    Each figure is corrected by the measurement of its kind: shown memory by the memory of the process, needed
    memory by the live tensors (on a CPU, where they are not counted, by the memory of the process).
    corrected = factor x predicted. An increase becomes a category; a decrease reduces the empirical
    categories in proportion, and the others only if these reach 0.

    upper end = the largest of: the corrected figure; the predicted figure x the largest measured ratio; and,
    with fewer than ``RUNS_FOR_A_BOUND`` runs, the uncorrected upper end x max(factor, 1).
    """
    if estimate.uncorrected is not None:
        raise ValueError("this estimate is corrected already")
    shows, lower, upper = _corrected(
        estimate.shows_bytes, estimate.shows_range, correction.factor, correction.largest_ratio, correction
    )
    if correction.gpu == "cpu":  # the needed memory of a process is its maximum
        needs, needs_lower, needs_upper = upper, shows, upper
    else:
        live = estimate.live_bytes / estimate.needs_bytes
        needs, needs_lower, needs_upper = _corrected(
            estimate.needs_bytes,
            estimate.needs_range,
            1 + live * (correction.live_factor - 1),
            1 + live * (correction.largest_live_ratio - 1),
            correction,
        )
    host, outside = estimate.host_bytes, estimate.outside_bytes
    if correction.gpu == "cpu":  # host memory is that of the processes; GPU measurements say nothing about it
        host = math.ceil(host * needs / estimate.needs_bytes)
    return dataclasses.replace(
        estimate,
        categories=_scaled(estimate.categories, needs),
        needs_range=(needs_lower, needs_upper),
        shows_bytes=shows,
        shows_range=(lower, upper),
        host_bytes=host,
        needs_basis=f"{estimate.needs_basis}; {correction.basis}",
        shows_basis=f"{estimate.shows_basis}; {correction.basis}",
        uncorrected=estimate,
        outside_bytes=None if outside is None else round(outside * correction.factor),
    )


def corrected_alike(estimate: MemoryEstimate, example: MemoryEstimate) -> MemoryEstimate:
    """Correct an estimate in the proportions in which ``example`` was corrected, if it was."""
    before = example.uncorrected
    if before is None:
        return estimate

    def scaled(figure: int, ends: tuple[int, int], uncorrected: int) -> tuple[int, int]:
        return round(figure * ends[0] / uncorrected), round(figure * ends[1] / uncorrected)

    shows, needs = estimate.shows_bytes, estimate.needs_bytes
    return dataclasses.replace(
        estimate,
        categories=_scaled(estimate.categories, round(needs * example.needs_bytes / before.needs_bytes)),
        needs_range=scaled(needs, example.needs_range, before.needs_bytes),
        shows_bytes=round(shows * example.shows_bytes / before.shows_bytes),
        shows_range=scaled(shows, example.shows_range, before.shows_bytes),
        needs_basis=example.needs_basis,
        shows_basis=example.shows_basis,
        uncorrected=estimate,
        outside_bytes=example.outside_bytes,
    )


def _corrected(
    figure: int, bounds_before: tuple[int, int], factor: float, largest_ratio: float, correction: Correction
) -> tuple[int, int, int]:
    """Return a figure and the ends of its range, corrected by finished runs."""
    corrected = round(figure * factor)
    bounds = [corrected, math.ceil(figure * largest_ratio)]
    if correction.runs < RUNS_FOR_A_BOUND:
        bounds.append(math.ceil(bounds_before[1] * max(factor, 1.0)))
    return corrected, min(round(bounds_before[0] * factor), corrected), max(bounds)


def _scaled(categories: tuple[tuple[str, int], ...], target: int) -> tuple[tuple[str, int], ...]:
    """Scale the categories to the sum ``target``; none below 0."""
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
    """Return the method of a step as users name it: full, lora, dora; with a quantized base qlora, qdora."""
    return f"q{setup.method}" if setup.quantization != "none" else setup.method


@lru_cache(maxsize=64)
def formulas(engine: Engine, method: str) -> str:
    """Return an id (12 hexadecimal digits) of the current formulas for an engine and method.

    It is a hash of a few predictions, so it changes with the formulas. Runs predicted by other formulas say
    nothing about the error of the current ones.
    """
    from estimator import memory

    sizes = []
    for shard, checkpointing, device in ((1, "none", "cuda"), (8, "full", "cuda"), (1, "none", "cpu")):
        setup = speeds.reference_step(engine, method, shard, checkpointing=checkpointing, device=device)
        estimate = memory.estimate(setup)
        sizes += [estimate.needs_bytes, estimate.shows_bytes]
    return speeds.digest(sizes)
