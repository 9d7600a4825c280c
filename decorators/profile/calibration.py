"""Calibration: store the record of a planned and measured step for later estimates."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
from dataclasses import dataclass

from decorators.profile.measured import GpuMeasured, Measured, process_peak
from estimator import calibration, hardware
from estimator.calibration import Finished, Store, speed
from estimator.errors import UserError
from estimator.plan import Plan
from estimator.vocabulary import TASKS
from launchers.report.state import RankMeasured
from launchers.run.trial import WARM_UP, TrialResult

# optimizer states are created at the end of the first step, so memory peaks in the second at the earliest
MIN_STEPS = 2
# Speed is comparable from here on: the median of four steps without the first, which includes warm-up
MIN_SPEED_STEPS = 5
# Below this share of the planned tokens per step, short rows explain a difference
FULL_STEP = 0.9
# Above this share of a step that waits for data, the input limits the speed
DATA_WAIT = 0.05


@dataclass(frozen=True, slots=True)
class _TrialPeaks:
    """Measurements of a trial that a record needs; without device memory, because trials share the device."""

    ranks: tuple[RankMeasured, ...]
    steps: int
    node: int = 0
    gpus: tuple[GpuMeasured, ...] = ()
    device_names: tuple[str, ...] = ()
    checkpoint_seconds: float | None = None
    own_loop: bool = False
    tokens_per_second: float | None = None
    step_tokens: float | None = None
    data_wait_share: float | None = None


def finished(
    plan: Plan,
    measured: Measured | _TrialPeaks,
    *,
    run: str,
    date: str,
    formulas: str,
    speed_formulas: str = "",
) -> Finished | None:
    """Build the record of a plan and the measurement of one node; None if they are not comparable.

    ``formulas``, ``speed_formulas``: ids of the formulas of memory and speed that predicted the plan.

    Raises UserError if the two do not belong together.
    """
    peak = comparable_peak(plan, measured)
    if peak is None or measured.node != 0 or measured.steps < MIN_STEPS:
        return None
    memory = plan.prediction.memory.uncorrected or plan.prediction.memory
    rate = comparable_speed(plan, measured) if speed_formulas else None
    reserved = [rank.reserved_peak_bytes for rank in measured.ranks if rank.reserved_peak_bytes]
    allocated = [rank.allocated_peak_bytes for rank in measured.ranks if rank.allocated_peak_bytes]
    return Finished(
        engine=plan.engine,
        own_loop=measured.own_loop,
        method=plan.method,
        gpu=_gpu(plan, measured),
        model=_name(plan.model),
        setup=_setup(plan),
        formulas=formulas,
        predicted_bytes=memory.shows_bytes,
        predicted_upper_bytes=memory.shows_range[1],
        predicted_live_bytes=memory.live_bytes,
        predicted_categories=memory.categories,
        measured_bytes=peak[0],
        measured_kind=peak[1],
        reserved_bytes=max(reserved, default=None),
        allocated_bytes=max(allocated, default=None),
        checkpoint_bytes=plan.prediction.checkpoint_bytes,
        checkpoint_seconds=measured.checkpoint_seconds,
        measured_tokens_per_second=rate,
        predicted_tokens_per_second=None if rate is None else _predicted_speed(plan),
        speed_formulas="" if rate is None else speed_formulas,
        torch=_torch_version(),
        date=date,
        run=run,
    )


def comparable_peak(plan: Plan, measured: Measured | _TrialPeaks) -> tuple[int, str] | None:
    """Return the largest process's memory as a device shows it, and how it was determined; None if unknown.

    Comparable to the prediction ``shows_bytes``. If NVML was not sampled or reported less than torch
    reserved, the predicted memory outside of torch is added to the reserved memory. On a CPU, resident
    memory.
    """
    peak = process_peak(measured.ranks, measured.gpus)
    if peak is None or (peak.counter == "resident") != (plan.layout.device == "cpu"):
        return None
    if peak.counter != "reserved":
        return peak.size_bytes, peak.counter
    memory = plan.prediction.memory.uncorrected or plan.prediction.memory
    device, reserved = memory.counted("device"), memory.counted("reserved")
    if device is None or reserved is None:
        return None
    outside = device.likely_bytes - reserved.likely_bytes
    return peak.size_bytes + outside, "reserved, plus predicted memory outside of torch"


def comparable_speed(plan: Plan, measured: Measured | _TrialPeaks) -> float | None:
    """Return the measured tokens/s if they are comparable with the prediction, else None.

    They are not for few steps, for steps with fewer tokens than planned (short rows, padding), for a loop
    that waits for its data, and for tasks that generate answers, whose length the data decides.
    """
    prediction = plan.prediction
    rate, planned_seconds = prediction.tokens_per_second, sum(seconds for _, seconds in prediction.step_parts)
    if rate is None or not planned_seconds or not measured.step_tokens or measured.steps < MIN_SPEED_STEPS:
        return None
    if measured.step_tokens < FULL_STEP * rate * planned_seconds:
        return None
    if measured.data_wait_share is not None and measured.data_wait_share > DATA_WAIT:
        return None
    if TASKS[plan.task].draws_answers:
        return None
    return measured.tokens_per_second


def _predicted_speed(plan: Plan) -> float | None:
    return plan.prediction.uncorrected_tokens_per_second or plan.prediction.tokens_per_second


def store_trial(result: TrialResult, *, run: str, in_container: bool) -> str | None:
    """Store one plan's trial, like :func:`store` a finished step.

    Failed trials are skipped: their memory when they ran out is not what the plan needs.
    """
    if result.failure is not None:
        return None
    peaks = _TrialPeaks(result.ranks, result.steps + WARM_UP)
    return store(result.plan, peaks, run=run, in_container=in_container)


def store(plan: Plan | None, measured: Measured | _TrialPeaks, *, run: str, in_container: bool) -> str | None:
    """Store a finished step. Returns an error line, or None; never raises."""
    if plan is None or (in_container and not os.environ.get(calibration.VARIABLE)):
        return None  # files of a container are lost with it
    try:
        formulas = plan.prediction.memory.formulas or calibration.formulas(plan.engine, plan.method)
        speed_formulas = plan.prediction.speed_formulas or speed.formulas(plan.engine, plan.method)
        record = finished(
            plan, measured, run=run, date=_now(), formulas=formulas, speed_formulas=speed_formulas
        )
        if record is not None:
            Store().add(record)
    except UserError as error:
        return f"calibration: this run is not stored: {error.problem}"
    except Exception as error:  # noqa: BLE001  # measuring never breaks a run
        return f"calibration: this run could not be stored: {type(error).__name__}: {error}"
    return None


def _gpu(plan: Plan, measured: Measured | _TrialPeaks) -> str:
    """Return the measured device's name in the GPU table, else the driver's name."""
    if plan.layout.device == "cpu":
        return "cpu"
    reported = [rank.device.partition(" ")[2] for rank in measured.ranks]  # "cuda:0 NVIDIA H200"
    names = [*measured.device_names, *reported, plan.request.gpu_type or ""]
    name = next((name for name in names if name), "unknown GPU")
    gpu = hardware.find_gpu_by_nvml_name(name)
    return gpu.name if gpu else name


def _name(model: str) -> str:
    """Return a model's public name; for a folder or a bucket only the last part of the path."""
    hub = model.count("/") <= 1 and not model.startswith(("/", ".", "~"))
    return model if hub and "://" not in model else model.rstrip("/").rpartition("/")[2]


def _setup(plan: Plan) -> str:
    layout = plan.layout
    checkpointing = "checkpointing" if layout.activation_checkpointing else "no checkpointing"
    return (
        f"{layout.nodes} x {layout.processes_per_node} processes, {layout.sharding}, micro batch "
        f"{layout.micro_batch_size} x {layout.accumulation}, {layout.seq_len} tokens, {layout.precision}, "
        f"{layout.optimizer}, {checkpointing}"
    )


def _torch_version() -> str | None:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
