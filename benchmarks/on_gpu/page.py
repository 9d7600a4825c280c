"""Markdown page of one session: measurements, predictions, and cases that were left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.on_gpu.cases import Scale
from benchmarks.on_gpu.checks import Checked
from benchmarks.on_gpu.data import SHORTEST_SHARE
from benchmarks.on_gpu.session import Measured
from checklist.result import Figure
from estimator.formatting import format_bytes
from estimator.plan import GIB, Plan

NONE = ""  # in a cell: not measured, or not predicted


@dataclass(frozen=True, kw_only=True, slots=True)
class Heading:
    """Figures above the tables."""

    title: str
    command: str
    machine: str
    day: str
    minutes: float  # that it took
    resolution: float


def render(heading: Heading, measured: Sequence[Measured], scale: Scale, checked: Checked) -> str:
    """Format the page in Markdown."""
    on_gpus = scale.device == "cuda"
    ran = [each for each in measured if each.ran]
    parts = [
        f"# {heading.title}",
        f"`{heading.command}`, {heading.day}, {heading.minutes:.0f} minutes, {heading.machine}.",
        _versions(checked),
        _of_runs(scale, heading),
        "## Memory of one process" if ran else "",
        _memory_words(on_gpus) if ran else "",
        _table(MEMORY, ran),
        "## Speed" if ran else "",
        _SPEED_WORDS if ran else "",
        _table(SPEED, ran),
        *(_device_memory(ran) if on_gpus and ran else []),
        "## The checklist",
        *_checklist(checked),
        *_not_measured(measured),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


# ---- texts


_SPEED_WORDS = (
    "Medians of the steps after the warm-up. Packed sequences count with their full length, as predictions "
    "do. For rows of varying lengths padding does not count, and there is no prediction."
)
_NVML = (
    "Peak use of the whole GPU by NVML, minus its use before the run, compared with `max_memory_reserved`. "
    "The difference is CUDA's context, NCCL's buffers and allocations of other libraries. Sampled as by "
    "`@gpu_profile`."
)
_MISSED = (
    "NVML's figure is omitted if it is below what torch reserved in the same run, because no sample fell on "
    "the peak. Then the memory outside of torch's allocator, and so the need of the case, is unknown:"
)


def _device_memory(ran: Sequence[Measured]) -> list[str]:
    missed = [each for each in ran if each.device_missed]
    lines = [f"{each.case.name}: {_missed(each)}" for each in missed]
    return [
        "## NVML compared with torch's counters",
        _NVML,
        _table(DEVICE, ran),
        f"{_MISSED}\n\n{_list(lines)}" if missed else "",
    ]


def _missed(measured: Measured) -> str:
    outcome = measured.outcome
    assert outcome is not None
    seen, reserved = outcome.device_bytes or 0, outcome.reserved_bytes or 0
    return f"{format_bytes(seen)} seen in {outcome.samples} samples, {format_bytes(reserved)} reserved"


def _versions(checked: Checked) -> str:
    versions = [f"{name} {value}" for name, value in checked.versions.items()]
    return f"{', '.join(versions)}." if versions else ""


def _of_runs(scale: Scale, heading: Heading) -> str:
    checkpointing = "with" if scale.checkpointing else "without"
    return (
        f"Random weights, nothing downloaded. Sequences of up to {scale.seq_len:,} tokens, micro batch "
        f"{scale.micro_batch_size}, {scale.accumulation} passes an optimizer step, {checkpointing} "
        f"activation checkpointing, {scale.steps} steps of which the first {scale.warm_up} are excluded from "
        "the speed. Lengths are log-uniform from "
        f"{scale.seq_len * SHORTEST_SHARE:.0f} tokens up; packed sequences contain several such texts. "
        f"The need of a case is found by bisection, down to {heading.resolution:.0%} of its reserved memory."
    )


def _memory_words(on_gpus: bool) -> str:
    if on_gpus:
        return (
            "GiB. Live: `max_memory_allocated`. Shows: NVML, the whole process. Needs: the smallest limit "
            "(`set_per_process_memory_fraction`) at which it ran, plus the memory outside of torch's "
            "allocator. Errors are predicted over measured, minus 1."
        )
    return (
        "GiB. Shows: resident memory. Needs: the smallest limit of private writable memory (`RLIMIT_DATA`) "
        "at which it ran. Errors are predicted over measured, minus 1. Tiny shapes on a CPU say "
        "nothing about GPUs: they test the benchmark and the estimator's CPU class."
    )


def _checklist(checked: Checked) -> list[str]:
    shown = f"`{checked.command}`"
    if checked.answer is None:
        return [f"{shown}: no result: {checked.problem.rstrip('.')}."]
    answer = checked.answer
    lines = ["| Check | Verdict | Why |", "|---|---|---|"]
    lines += [f"| {check.check} | {check.verdict} | {_cell(check.reason)} |" for check in answer.checks]
    figures = [_figure(figure) for check in answer.checks for figure in check.figures]
    table = ["| Figure | Measured | Expected |", "|---|---:|---:|", *figures]
    heading = f"{shown}: {answer.verdict}. {answer.headline}"
    return [heading, "\n".join(lines), "\n".join(table) if figures else ""]


def _figure(figure: Figure) -> str:
    size = f", {figure.bytes:,} B" if figure.bytes else ""
    expected = NONE if figure.expected is None else f"{figure.expected:.4g}"
    return f"| {figure.name}{size} | {figure.value:.4g} {figure.unit} | {expected} |"


def _not_measured(measured: Sequence[Measured]) -> list[str]:
    parts: list[str] = []
    if full := [each for each in measured if each.outcome and each.outcome.ended == "out of memory"]:
        lines = [f"{each.case.name}: {_predicted_needs(each)}" for each in full]
        parts += ["## Out of memory", _list(lines)]
    reasons: dict[str, list[str]] = {}
    for each in measured:
        if each.left_out:
            reasons.setdefault(each.left_out, []).append(each.case.name)
    if reasons:
        parts.append("## Left out")
        parts += [f"{_cell(reason)}:\n\n{_list(names)}" for reason, names in reasons.items()]
    rest = {
        trial.message
        for each in measured
        for trial in each.trials
        if trial.ended not in ("ran", "out of memory")
    }
    if rest:
        parts.append(f"Messages of runs below a limit that ended otherwise:\n\n{_list(sorted(rest))}")
    return parts


def _predicted_needs(measured: Measured) -> str:
    memory = _plan(measured).prediction.memory
    capacity = measured.outcome.device_total_bytes if measured.outcome else None
    capacity_text = f" of {capacity / GIB:.1f}" if capacity else ""
    return f"predicted to need {memory.needs_bytes / GIB:.1f} GiB{capacity_text}"


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {_cell(line)}" for line in lines)


# ---- tables


Column = tuple[str, Callable[[Measured], str]]


def _table(columns: Sequence[Column], measured: Sequence[Measured]) -> str:
    if not measured:
        return ""
    names = [name for name, _ in columns]
    lines = [f"| {' | '.join(names)} |", "|---|" + "---:|" * (len(names) - 1)]
    lines += [f"| {' | '.join(value(each) for _, value in columns)} |" for each in measured]
    return "\n".join(lines)


def _plan(measured: Measured) -> Plan:
    assert measured.outcome is not None
    assert measured.outcome.plan is not None
    return Plan.from_json(measured.outcome.plan)


def _of(name: str) -> Callable[[Measured], int | None]:
    """Return a function that reads a field of the run's outcome."""
    return lambda measured: getattr(measured.outcome, name, None)


def _predicted(name: str) -> Callable[[Measured], int]:
    """Return a function that reads a field of the predicted memory."""
    return lambda measured: int(getattr(_plan(measured).prediction.memory, name))


def _gib(figure: Callable[[Measured], int | None]) -> Callable[[Measured], str]:
    def cell(measured: Measured) -> str:
        size = figure(measured)
        return NONE if size is None else f"{size / GIB:.2f}"

    return cell


def _error(
    predicted: Callable[[Measured], float | None], actual: Callable[[Measured], float | None]
) -> Callable[[Measured], str]:
    def cell(measured: Measured) -> str:
        ours, theirs = predicted(measured), actual(measured)
        return NONE if ours is None or not theirs else f"{ours / theirs - 1:+.1%}"

    return cell


def _shown(measured: Measured) -> int | None:
    """Return the memory of the whole process: by NVML on a GPU, resident memory on a CPU."""
    outcome = measured.outcome
    if outcome is None:
        return None
    return outcome.resident_bytes if outcome.reserved_bytes is None else measured.device_bytes


def _needed(measured: Measured) -> int | None:
    return measured.needed_bytes


def _between(measured: Measured) -> str:
    """Format the gap between the smallest limit that ran and the largest that failed, and the runs."""
    search = measured.found
    if search is None or measured.needed_bytes is None:
        return NONE
    return f"{(search.runs_bytes - search.fails_bytes) / GIB:.2f} ({len(measured.trials)} runs)"


def _speed(measured: Measured) -> float | None:
    return measured.tokens_per_second


def _predicted_speed(measured: Measured) -> float | None:
    """Return the predicted tokens/s of one process; None for varying lengths, whose padding is unknown."""
    plan = _plan(measured)
    rate = plan.prediction.tokens_per_second
    if rate is None or measured.case.lengths == "varying":
        return None
    return rate / plan.layout.world_size


def _number(figure: Callable[[Measured], float | None], digits: int) -> Callable[[Measured], str]:
    def cell(measured: Measured) -> str:
        value = figure(measured)
        return NONE if value is None else f"{value:,.{digits}f}"

    return cell


CASE: Column = ("Case", lambda measured: measured.case.name)
MEMORY: tuple[Column, ...] = (
    CASE,
    ("live, predicted", _gib(_predicted("live_bytes"))),
    ("measured", _gib(_of("live_bytes"))),
    ("error", _error(_predicted("live_bytes"), _of("live_bytes"))),
    ("shows, predicted", _gib(_predicted("shows_bytes"))),
    ("measured", _gib(_shown)),
    ("error", _error(_predicted("shows_bytes"), _shown)),
    ("needs, predicted", _gib(_predicted("needs_bytes"))),
    ("measured", _gib(_needed)),
    ("known to", _between),
    ("error", _error(_predicted("needs_bytes"), _needed)),
)
SPEED: tuple[Column, ...] = (
    CASE,
    ("tokens/s of one process, predicted", _number(_predicted_speed, 0)),
    ("measured", _number(_speed, 0)),
    ("error", _error(_predicted_speed, _speed)),
    ("s a step", _number(_of("step_seconds"), 3)),
)
DEVICE: tuple[Column, ...] = (
    CASE,
    ("NVML", _gib(lambda measured: measured.device_bytes)),
    ("reserved", _gib(_of("reserved_bytes"))),
    ("outside of torch", _gib(lambda measured: measured.outside_bytes)),
    ("in use before", _gib(_of("device_before_bytes"))),
    ("samples", _number(_of("samples"), 0)),
)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
