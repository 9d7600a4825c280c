"""Correct predicted speed by finished runs on the same GPU.

Two factors multiply: one of the GPU, from all its runs, because a power limit or a slow host slows every
engine; and one of the engine and method, from their runs relative to the first. An engine without runs is
corrected by the first factor, so that a measured engine does not lose its rank by its measurement alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any

from estimator.setup import Setup
from estimator.vocabulary import Engine

if TYPE_CHECKING:
    from estimator.throughput import Speed

# Weight of the formulas, in runs. A choice: one run moves an estimate by a third of the measured difference,
# three runs by 60 %, twenty by 91 %.
PRIOR_RUNS = 2
# The largest of n ratios covers that of the next run with probability n / (n + 1), if runs are exchangeable.
# A bound is for 95 %: this many runs determine it; fewer can only widen it.
RUNS_FOR_A_BOUND = 19
# GPUs whose predictions identify the formulas: one of each architecture with its own coefficients
GPUS = ("A100 SXM 80GB", "H100 SXM", "L40S", "B200 SXM")


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedCorrection:
    """Correction of predicted tokens per second. Ratios: measured over predicted."""

    factor: float
    ratios: tuple[float, ...]  # of runs of the same engine and method; empty: only other runs on the GPU
    gpu_runs: int  # runs of all engines and methods on the GPU

    @property
    def basis(self) -> str:
        """Describe the evidence for the basis of an estimate."""
        of = "" if self.ratios else " of other engines or methods"
        count = len(self.ratios) or self.gpu_runs
        runs = "1 run" if count == 1 else f"{count} runs"
        return f"calibrated on {runs}{of} on this GPU: scaled by {self.factor:.2f}"


def correction(own: Sequence[float], on_gpu: Sequence[float]) -> SpeedCorrection | None:
    """Return the correction from the ratios of an engine and method, and of all runs on the GPU.

    ``on_gpu`` contains ``own``. Returns None without runs.
    """
    if not on_gpu:
        return None
    of_gpu = shrunk(on_gpu)
    relative = shrunk([ratio / of_gpu for ratio in own])
    return SpeedCorrection(factor=of_gpu * relative, ratios=tuple(own), gpu_runs=len(on_gpu))


def shrunk(ratios: Sequence[float]) -> float:
    """Return exp(n / (n + PRIOR_RUNS) x median of ln(ratio)) of n ratios; 1 without any."""
    if not ratios:
        return 1.0
    import statistics  # 5 ms, and most plans have no finished runs

    n = len(ratios)
    return math.exp(n / (n + PRIOR_RUNS) * statistics.median(math.log(ratio) for ratio in ratios))


def apply(speed: Speed, correction: SpeedCorrection) -> Speed:
    """Correct a predicted speed; raises ValueError if it has been corrected already.

    Every part of the step is scaled by the same factor. With fewer than ``RUNS_FOR_A_BOUND`` runs of the
    engine and method, the range can only become wider; it always contains what was measured.
    """
    rate = speed.tokens_per_second
    if rate is None or speed.step_seconds is None:
        return speed
    if speed.uncorrected is not None:
        raise ValueError("this speed is corrected already")
    factor, ratios = correction.factor, correction.ratios
    low, high = [rate * ratio for ratio in (factor, *ratios)], [rate * ratio for ratio in (factor, *ratios)]
    if len(ratios) < RUNS_FOR_A_BOUND and speed.tokens_per_second_range is not None:
        low.append(speed.tokens_per_second_range[0] * min(factor, 1.0))
        high.append(speed.tokens_per_second_range[1] * max(factor, 1.0))
    known_range = speed.tokens_per_second_range is not None or len(ratios) >= RUNS_FOR_A_BOUND
    return dataclasses.replace(
        speed,
        tokens_per_second=rate * factor,
        basis=f"{speed.basis}; {correction.basis}",
        mfu=None if speed.mfu is None else speed.mfu * factor,
        step_seconds=speed.step_seconds / factor,
        parts=None if speed.parts is None else speed.parts.scaled(1 / factor),
        tokens_per_second_range=(min(low), max(high)) if known_range else None,
        uncorrected=rate,
    )


@lru_cache(maxsize=64)
def formulas(engine: Engine, method: str) -> str:
    """Return an id (12 hexadecimal digits) of the current formulas of speed for an engine and method.

    A hash of a few predictions, as :func:`estimator.calibration.formulas` for memory.
    """
    from estimator import hardware, throughput

    rates = []
    for gpu, shard, compiled in product(GPUS, (1, 8), (False, True)):
        setup = reference_step(engine, method, shard, compile=compiled)
        rates.append(throughput.speed(setup, hardware.gpu(gpu)).tokens_per_second)
    return digest(rates)


def reference_step(engine: Engine, method: str, shard: int, **options: Any) -> Setup:
    """Return a training step of llama-8b, whose prediction identifies the formulas.

    ``shard``: processes that share the states. ``options``: further fields of the step.
    """
    from estimator import models

    base_method = method.removeprefix("q") if method.startswith("q") else method
    sharding = "zero3" if engine == "deepspeed" else "fsdp"
    return Setup(
        model=models.find("llama-8b"),
        engine=engine,
        method=base_method,  # type: ignore[arg-type]
        quantization="nf4-double" if base_method != method else "none",
        sharding=sharding if shard > 1 else "none",  # type: ignore[arg-type]
        shard=shard,
        **options,
    )


def digest(predictions: Sequence[float | None]) -> str:
    """Return an id (12 hexadecimal digits) of predictions."""
    import hashlib

    return hashlib.sha256(repr(list(predictions)).encode()).hexdigest()[:12]
