"""Collectives of phase 3: operations, sizes, types and iterations, and evaluation of their times."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

from checklist.analysis import busbw
from checklist.analysis.soundness import unsound_times
from checklist.measurements import Collective
from checklist.run.requests import Outcome
from checklist.run.session import Session

DTYPES = {"float32": 4, "bfloat16": 2}
_CHECKED = 4099  # elements of a rank's part: prime, so that no chunk ends where another begins
OPERATIONS = {
    "quick": ("all_reduce", "barrier"),
    "standard": (
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "all_to_all_v",
        "broadcast",
        "send_recv",
        "barrier",
    ),
    "deep": tuple(busbw.OPS),
}
GROWTH = {"quick": 8, "standard": 4, "deep": 2}
_SMALLEST = 8
_FEWEST = 3  # minimum number of iterations
_FAST_S = 5e-3  # shorter operations are repeated more often, because their times scatter more
_MORE_WHERE_FAST = 5
_SHARE = 0.7  # maximum share of the phase's time limit that the sweep takes


def store(run: Session) -> tuple[str, int] | None:
    """Start the rendezvous store of the groups; return its address, None if rank 0 cannot serve it."""
    if 0 not in run.ranks:
        return None
    address = run.rendezvous.host
    limit = 2 * run.limits.operation  # includes the import of torch if no earlier check imported it
    outcome = run.request("store", {0: {"address": address}}, limit_s=limit)
    return (address, int(outcome.replies[0])) if 0 in outcome.replies else None


def correctness(run: Session, ranks: tuple[int, ...]) -> str | None:
    """Run every operation once per type, with values that a wrong result cannot match."""
    if not _is_selected(run, "correctness"):
        return None
    for op in busbw.OPS:
        for dtype in DTYPES if op != "barrier" else ("float32",):
            problem = _run_collective(run, ranks, "correct", op, dtype, _CHECKED, 0)
            if problem is not None:
                return problem
    return None


def sweep(run: Session, ranks: tuple[int, ...]) -> str | None:
    """Time the operations over sizes, from the smallest to the largest that fits in memory and in the
    phase's time.
    """
    if not (_is_selected(run, "latency") or _is_selected(run, "bandwidth")):
        return None
    profile = run.options.profile
    cases = [
        (op, dtype)
        for op in OPERATIONS[profile]
        for dtype in (DTYPES if op != "barrier" and profile != "quick" else ("float32",))
    ]
    deadline = time.monotonic() + _SHARE * (run.phase_ends - time.monotonic())
    for number, (op, dtype) in enumerate(cases):
        # An equal part of what is left for each: the first must not take the time of the last.
        share = (deadline - time.monotonic()) / (len(cases) - number)
        problem = _sizes(run, ranks, op, dtype, time.monotonic() + share)
        if problem is not None:
            return problem
    return None


def _sizes(run: Session, ranks: tuple[int, ...], op: str, dtype: str, deadline: float) -> str | None:
    """Time one operation and type over all sizes, until ``deadline``."""
    effort, growth = run.options.effort, GROWTH[run.options.profile]
    largest = effort.largest_cuda if run.device == "cuda" else effort.largest_cpu
    expected = 0.0  # seconds of one iteration, from the size before
    for size in sizes(op, largest, growth):
        remaining_s = deadline - time.monotonic()
        if remaining_s < 0 or expected * (_FEWEST + 2) > remaining_s:
            run.notes.append(f"{op} ({dtype}) was not timed from {size} bytes on: out of time.")
            return None
        iterations = effort.iterations
        if expected:
            iterations *= _MORE_WHERE_FAST if _paced(run) and expected < _FAST_S else 1
            iterations = max(_FEWEST, min(iterations, int(remaining_s / 3 / expected)))
        elements = busbw.buffer_elements(op, size, DTYPES[dtype], len(ranks))
        problem = _run_collective(run, ranks, "time", op, dtype, elements, iterations)
        if problem == "memory":
            run.notes.append(f"{op} ({dtype}) of {size} bytes does not fit into memory.")
            return None
        if problem is not None:
            return problem
        results = [item for item in run.results.collectives if (item.op, item.dtype) == (op, dtype)]
        expected = (results[-1].seconds_median or 0.0) * growth if results else 0.0
    return None


def sizes(op: str, largest: int, growth: int) -> list[int]:
    """Return the sizes from 8 B to ``largest``, which is always included."""
    if busbw.OPS[op].counts == "nothing":
        return [0]
    steps = math.ceil(math.log(largest / _SMALLEST, growth))
    return [*(_SMALLEST * growth**step for step in range(steps)), largest]


def _paced(run: Session) -> bool:
    """Return whether each timing starts on all ranks together, after a barrier; quick has no time for it."""
    return run.options.profile != "quick"


def _is_selected(run: Session, check: str) -> bool:
    return any(item.name == check for item in run.options.checks)


def _run_collective(
    run: Session, ranks: tuple[int, ...], kind: str, op: str, dtype: str, elements: int, iterations: int
) -> str | None:
    arguments: dict[str, Any] = {"op": op, "dtype": dtype, "elements": elements}
    if kind == "time":
        arguments |= {"iterations": iterations, "paced": _paced(run)}
    outcome = run.request(
        kind,
        dict.fromkeys(ranks, arguments),
        limit_s=run.limits.operation,
        collective=True,
        operation=op,
    )
    size = busbw.actual_bytes(op, elements, DTYPES[dtype], len(ranks))
    if not outcome.complete:
        errors = " ".join(outcome.errors.values())
        if "OutOfMemory" in errors and not outcome.unfinished:
            return "memory"
        error = outcome.reason or next(iter(outcome.errors.values()))
        run.results.collectives.append(_collective(run, op, dtype, size, ranks, error=error))
        return error
    if any("unavailable" in reply for reply in outcome.replies.values()):
        run.notes.append(f"{op} ({dtype}) is not available with {run.backend}.")
        return None
    run.results.collectives.append(_measured(run, op, dtype, size, ranks, outcome))
    return None


def _measured(
    run: Session, op: str, dtype: str, size: int, ranks: tuple[int, ...], outcome: Outcome
) -> Collective:
    """Record the slowest rank's time of each iteration and the wrong values of all ranks; impossible
    times are dropped.
    """
    unsound = [
        item
        for rank, reply in sorted(outcome.replies.items())
        for item in unsound_times(
            reply["seconds"],
            check="latency" if size <= busbw.SMALL_BYTES else "bandwidth",
            what=f"{op} of {size} bytes ({dtype})",
            node=run.nodes[rank],
            rank=rank,
        )
    ]
    run.results.unsound += unsound
    wrong = {rank: int(reply["wrong"]) for rank, reply in outcome.replies.items() if reply["wrong"]}
    return _collective(
        run,
        op,
        dtype,
        size,
        ranks,
        seconds=None if unsound else _slowest(outcome),
        wrong=wrong,
        chosen=next(
            (reply["chosen"] for _, reply in sorted(outcome.replies.items()) if reply["chosen"]), None
        ),
    )


def _slowest(outcome: Outcome) -> list[float]:
    """Return the seconds of the slowest rank of each iteration."""
    times = zip(*(reply["seconds"] for reply in outcome.replies.values()), strict=True)
    return [max(seconds) for seconds in times]


def _collective(
    run: Session,
    op: str,
    dtype: str,
    size: int,
    ranks: tuple[int, ...],
    *,
    seconds: list[float] | None = None,
    wrong: dict[int, int] | None = None,
    error: str | None = None,
    chosen: tuple[str, str] | None = None,
) -> Collective:
    median = statistics.median(seconds) if seconds else None
    rated = median is not None and size > 0
    return Collective(
        op=op,
        dtype=dtype,
        bytes=size,
        ranks=len(ranks),
        nodes=len(run.leaders),
        seconds_median=median,
        seconds_p95=p95(seconds) if seconds else None,
        algbw_gbytes_per_s=busbw.algbw(size, median) if rated and median else None,
        busbw_gbytes_per_s=busbw.busbw(op, size, median, len(ranks)) if rated and median else None,
        correct=None if wrong is None else not wrong,
        wrong_values=None if wrong is None else sum(wrong.values()),
        wrong_ranks=tuple(sorted(wrong or ())),
        algorithm=chosen[0] if chosen else None,
        protocol=chosen[1] if chosen else None,
        iterations=len(seconds or ()),
        error=error,
    )


def p95(seconds: list[float]) -> float:
    """Return the time that 95 % of the iterations did not exceed."""
    ordered = sorted(seconds)
    return ordered[max(0, math.ceil(0.95 * len(ordered)) - 1)]
