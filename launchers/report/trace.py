"""Analysis of a profiler trace: time and memory of a few optimizer steps by kind of work.

The trace is an export of ``torch.profiler`` (Chrome's trace event format, as Kineto writes it). The analysis
is arithmetic on the events and needs no torch. Every moment of a step belongs to exactly one kind of work, so
the times by kind add up to the step:

on a CPU
    Time of the training thread. A moment belongs to the kind of the innermost running operator. If no
    operator runs, it belongs to a collective that is in progress on another thread (exposed), else it is
    idle.
on a GPU
    Time of the streams. A moment belongs to the kind of the operator that launched the running kernel, to a
    collective if nothing else runs (exposed), else it is idle.

Data loading, the optimizer and sampling of answers are marked by annotations (of
``launchers.engines.profiling`` and of torch itself), which cover everything inside them except collectives. A
collective that overlaps other work costs no time: it is *hidden* and counted separately.
"""

from __future__ import annotations

import bisect
import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEP = "finetune step "  # prefix of a step's annotation, followed by its number
PHASE = "finetune phase "  # prefix of a phase's annotation, followed by its name
DATA, OPTIMIZER, GENERATION = "data", "optimizer", "generation"
PRODUCTS, ATTENTION, OTHER, IDLE = "products", "attention", "other operators", "idle"
# Collective by a substring of the name of an operator, of a span of Gloo or NCCL, or of a kernel (lower case,
# letters only); substrings precede the ones that they contain
COLLECTIVES = {
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "send": "send and receive",
    "recv": "send and receive",
    "scatter": "scatter",
    "gather": "gather",
    "reduce": "reduce",
}
KINDS = (PRODUCTS, ATTENTION, OTHER, OPTIMIZER, GENERATION, DATA, *dict.fromkeys(COLLECTIVES.values()), IDLE)
MAX_OPERATORS = 10
# Categories of memory; the first four are recognized by their tensors
WEIGHTS, MASTERS, GRADIENTS, STATES = "weights", "master weights", "gradients", "optimizer"
REST = "activations and all else"

_COLLECTIVE = re.compile(
    r"^(c10d::|c10d_functional::|_c10d_functional::|gloo:|nccl:|mpi:|ucc:|nccl(Dev)?Kernel)"
)
_ATTENTION = re.compile(r"scaled_?dot_?product|flash|fmha|(mem_|_)?efficient_attention|flex_attention", re.I)
_PRODUCTS = re.compile(
    r"^aten::(_?(scaled_|int_|grouped_|scaled_grouped_)?mm|addmm|addmm_|bmm|baddbmm|mv|addmv|dot|linear|matmul)$"
    r"|mkldnn_linear|gemm|gemv|cutlass|nvjet|xmma"
)
# C++ operators, which do not wait for collectives; autograd nodes may, because they run hooks
_COMPUTES = re.compile(r"^(?!autograd::|torch::autograd::)\w+::")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_MICROSECOND = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """Time of an operator, without the operators that it calls."""

    name: str
    seconds: float  # per step
    calls: float  # per step; on a GPU, kernels


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Mean step of a window by kind of work. ``seconds`` add up to ``step_seconds``, without ``hidden``."""

    device: str  # "cuda" or "cpu": the device whose time is split
    steps: int
    step_seconds: float
    seconds: tuple[tuple[str, float], ...]  # by kind, in the order of KINDS; only exposed collectives
    hidden: tuple[tuple[str, float], ...]  # collectives that overlap other work
    operators: tuple[Operator, ...]  # most expensive first, at most MAX_OPERATORS


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Read the events of a trace, which may be gzipped."""
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return events


def split(events: Iterable[Mapping[str, Any]]) -> Split:
    """Split the time of the annotated steps by kind of work; raises ValueError if the trace has no steps."""
    spans = [_Span.of(event) for event in events if event.get("ph") == "X" and "dur" in event]
    steps = sorted(
        (event for event in spans if event.category == "user_annotation" and event.name.startswith(STEP)),
        key=lambda event: event.begin,
    )
    if not steps:
        raise ValueError("the trace has no annotated step")
    work_spans = [event for event in spans if not event.name.startswith(STEP)]
    on_gpu = any(event.category == "kernel" for event in work_spans)
    totals = _Totals()
    work = _GpuTime(work_spans, steps[0].thread) if on_gpu else _CpuTime(work_spans, steps[0].thread)
    for step in steps:
        work.add_to(totals, step.begin, step.end)
    scale = _MICROSECOND / len(steps)  # converts microseconds of all steps to seconds per step
    most_expensive = sorted(totals.operators.items(), key=lambda item: -item[1])[:MAX_OPERATORS]
    return Split(
        device="cuda" if on_gpu else "cpu",
        steps=len(steps),
        step_seconds=sum(step.end - step.begin for step in steps) * scale,
        seconds=tuple((kind, totals.kinds[kind] * scale) for kind in KINDS if totals.kinds[kind] > 0),
        hidden=tuple((kind, totals.hidden[kind] * scale) for kind in KINDS if totals.hidden[kind] > 0),
        operators=tuple(
            Operator(name=name, seconds=seconds * scale, calls=totals.calls[name] / len(steps))
            for name, seconds in most_expensive
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocated:
    """Tensor memory by torch's allocators in bytes: at the beginning of a trace and at its peak.

    On a CPU, only memory allocated since the beginning is counted, so ``before`` is 0.
    """

    before: int
    peak: int


def allocated(events: Iterable[Mapping[str, Any]], *, gpu: bool) -> Allocated | None:
    """Read the tensor memory of GPU or host from memory events (``profile_memory``); None without them."""
    first_total, peak = None, 0
    kind = 1 if gpu else 0  # c10's DeviceType
    for event in sorted((item for item in events if item.get("name") == "[memory]"), key=lambda e: e["ts"]):
        values = event["args"]
        if values["Device Type"] != kind:
            continue
        total = int(values["Total Allocated"])
        first_total = total - int(values["Bytes"]) if first_total is None else first_total
        peak = max(peak, total)
    if first_total is None:
        return None
    return Allocated(before=first_total, peak=peak) if gpu else Allocated(before=0, peak=peak - first_total)


@dataclass(frozen=True, slots=True)
class _Span:
    """Event of the trace with a duration."""

    name: str
    category: str
    thread: tuple[Any, Any]
    begin: float  # microseconds
    end: float
    correlation: int | None  # id shared by a kernel and the call that launched it

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> _Span:
        begin = float(event["ts"])
        return cls(
            name=str(event["name"]),
            category=str(event.get("cat", "")),
            thread=(event.get("pid"), event.get("tid")),
            begin=begin,
            end=begin + float(event["dur"]),
            correlation=event.get("args", {}).get("correlation"),
        )


class _Totals:
    """Sums over all steps: microseconds by kind, of hidden collectives and by operator; calls by operator."""

    def __init__(self) -> None:
        self.kinds: defaultdict[str, float] = defaultdict(float)
        self.hidden: defaultdict[str, float] = defaultdict(float)
        self.operators: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()


@dataclass(frozen=True, slots=True)
class _Piece:
    """Interval of the training thread or of a GPU stream with a single running operator."""

    begin: float
    end: float
    kind: str | None  # None: idle
    operator: str | None = None
    waits: bool = False  # whether the thread may be waiting for a collective


@dataclass(frozen=True, slots=True)
class _Frame:
    """Running span on the stack of a thread, with properties inherited from the enclosing spans."""

    end: float
    kind: str | None
    operator: str | None
    inherited: str | None  # kind of all spans inside this one; None: each span determines its kind
    waits: bool = True


class _CpuTime:
    """Time split of a CPU run, from the operators of the training thread and collectives on other threads."""

    def __init__(self, spans: Sequence[_Span], thread: tuple[Any, Any]) -> None:
        annotated = [span for span in spans if span.category in ("cpu_op", "user_annotation")]
        self._spans = sorted(
            (span for span in annotated if span.thread == thread), key=lambda span: (span.begin, -span.end)
        )
        self._collectives = [
            span
            for span in annotated
            if span.thread != thread and span.category == "user_annotation" and _collective(span.name)
        ]

    def add_to(self, totals: _Totals, begin: float, end: float) -> None:
        """Add the work from ``begin`` to ``end`` to ``totals``."""
        in_progress = _clipped(self._collectives, begin, end)
        for start, stop, kind in in_progress.stretches:
            totals.hidden[kind] += stop - start
        within = [span for span in self._spans if span.begin < end and span.end > begin]
        for piece in _thread_pieces(within, begin, end):
            remaining = piece.end - piece.begin
            for start, stop, kind in in_progress.between(piece.begin, piece.end) if piece.waits else ():
                totals.kinds[kind] += stop - start
                totals.hidden[kind] -= stop - start
                remaining -= stop - start
            totals.kinds[piece.kind or IDLE] += remaining
            if piece.operator is not None:
                totals.operators[piece.operator] += remaining
        totals.calls.update(
            span.name for span in self._spans if span.category == "cpu_op" and begin <= span.begin < end
        )


class _GpuTime:
    """Time split of a GPU run, from the work of all streams and data loading on the training thread."""

    def __init__(self, spans: Sequence[_Span], thread: tuple[Any, Any]) -> None:
        launched = _launched(spans)
        self._data = [
            span
            for span in spans
            if span.thread == thread and span.category == "user_annotation" and _phase(span.name) == DATA
        ]
        self._work: list[tuple[_Piece, bool]] = []
        for span in spans:
            if span.category not in _DEVICE:
                continue
            collective = _collective(span.name)
            kind, operator = launched.get(span.correlation, (None, None))
            if collective is None and kind in (None, OTHER):
                kind = _kind_by_name(span.name) if span.category == "kernel" else kind or OTHER
            piece = _Piece(span.begin, span.end, collective or kind, operator or span.name)
            self._work.append((piece, collective is not None))
        self._work.sort(key=lambda item: item[0].begin)

    def add_to(self, totals: _Totals, begin: float, end: float) -> None:
        """Add the work from ``begin`` to ``end`` to ``totals``."""
        overlapping = [(p, c) for p, c in self._work if p.begin < end and p.end > begin]
        computing = _timeline_of_pieces(
            [p for p, is_collective in overlapping if not is_collective], begin, end
        )
        communicating = _timeline_of_pieces(
            [p for p, is_collective in overlapping if is_collective], begin, end
        )
        data = _clipped(self._data, begin, end, kind=DATA)
        for start, stop, kind in computing.stretches:
            totals.kinds[kind] += stop - start
        for start, stop, kind in communicating.stretches:
            covered = computing.covered(start, stop)
            totals.hidden[kind] += covered
            totals.kinds[kind] += stop - start - covered
        cursor = begin
        busy = _Timeline([*computing.stretches, *communicating.stretches])
        for start, stop, _ in [*busy.stretches, (end, end, IDLE)]:
            waiting = data.covered(cursor, start)
            totals.kinds[DATA] += waiting
            totals.kinds[IDLE] += start - cursor - waiting
            cursor = stop
        for piece, _ in overlapping:
            if piece.operator is not None:
                totals.operators[piece.operator] += min(piece.end, end) - max(piece.begin, begin)
                totals.calls[piece.operator] += begin <= piece.begin


def _launched(spans: Sequence[_Span]) -> dict[int | None, tuple[str | None, str | None]]:
    """Return the correlation id of each launching call -> (kind, operator) of the work that it launches."""
    launched: dict[int | None, tuple[str | None, str | None]] = {}
    by_thread: defaultdict[tuple[Any, Any], list[_Span]] = defaultdict(list)
    for item in spans:
        if item.category in ("cpu_op", "user_annotation", *_LAUNCHES):
            by_thread[item.thread].append(item)
    for thread_spans in by_thread.values():
        stack: list[_Frame] = []
        for span in sorted(thread_spans, key=lambda item: (item.begin, -item.end)):
            while stack and stack[-1].end <= span.begin:
                stack.pop()
            enclosing = stack[-1] if stack else None
            if span.category in _LAUNCHES:
                if span.correlation is not None and enclosing is not None:
                    launched[span.correlation] = (enclosing.kind, enclosing.operator)
            else:
                stack.append(_frame(span, enclosing))
    return launched


def _frame(span: _Span, enclosing: _Frame | None) -> _Frame:
    """Build the frame of a span that runs inside the frame ``enclosing``."""
    inherited_phase = enclosing.inherited if enclosing else None
    if span.category == "user_annotation":
        phase = _phase(span.name) or inherited_phase
        operator = enclosing.operator if enclosing else None
        return _Frame(span.end, phase or (enclosing.kind if enclosing else None), operator, phase)
    waits = not _COMPUTES.match(span.name)
    kind = _collective(span.name) or inherited_phase or _kind_by_name(span.name)
    inherited_kind = (
        kind
        if kind in (ATTENTION, DATA, OPTIMIZER, GENERATION) or _collective(span.name)
        else inherited_phase
    )
    return _Frame(span.end, kind, span.name, inherited_kind, waits)


def _thread_pieces(spans: Sequence[_Span], begin: float, end: float) -> Iterator[_Piece]:
    """Split a thread's time from ``begin`` to ``end`` into pieces by the innermost running span."""
    stack: list[_Frame] = []
    cursor = begin

    def pieces_until(time: float) -> Iterator[_Piece]:
        """Yield the pieces from ``cursor`` to ``time``, and end the spans that end before it."""
        nonlocal cursor
        while stack and stack[-1].end <= time:
            frame = stack.pop()
            if frame.end > cursor:
                yield _Piece(cursor, frame.end, frame.kind, frame.operator, frame.waits)
                cursor = frame.end
        if time > cursor:
            frame = stack[-1] if stack else _Frame(time, None, None, None)
            yield _Piece(cursor, time, frame.kind, frame.operator, frame.waits)
            cursor = time

    for span in spans:
        yield from pieces_until(min(max(span.begin, begin), end))
        stack.append(_frame(span, stack[-1] if stack else None))
    yield from pieces_until(end)


def _phase(name: str) -> str | None:
    """Return the kind of all work inside an annotation; None if the annotation does not determine it."""
    if name.startswith("Optimizer."):  # annotations of torch.optim.Optimizer: step and zero_grad
        return OPTIMIZER
    if name.startswith("enumerate(DataLoader)"):
        return DATA
    phase = name.removeprefix(PHASE)
    return phase if phase != name and phase in (DATA, OPTIMIZER, GENERATION) else None


def _collective(name: str) -> str | None:
    """Return the collective that an operator, span or kernel belongs to; None for other work."""
    if not _COLLECTIVE.match(name):
        return None
    letters = re.sub(r"[^a-z]", "", name.partition("<")[0].lower())
    return next((kind for keyword, kind in COLLECTIVES.items() if keyword in letters), None)


def _kind_by_name(name: str) -> str:
    """Return the kind of an operator or kernel that is not a collective."""
    if _ATTENTION.search(name):
        return ATTENTION
    return PRODUCTS if _PRODUCTS.search(name) else OTHER


_Stretch = tuple[float, float, str]  # begin, end, kind


class _Timeline:
    """Stretches of time with a kind, without overlaps: where two overlap, the later one is cut."""

    def __init__(self, stretches: Iterable[_Stretch]) -> None:
        self.stretches: list[_Stretch] = []
        for begin, end, kind in sorted(stretches):
            start = max(begin, self.stretches[-1][1]) if self.stretches else begin
            if start < end:
                self.stretches.append((start, end, kind))
        self._ends = [end for _, end, _ in self.stretches]

    def between(self, begin: float, end: float) -> Iterator[_Stretch]:
        """Iterate over the stretches between ``begin`` and ``end``, clipped to that interval."""
        for start, stop, kind in self.stretches[bisect.bisect_right(self._ends, begin) :]:
            if start >= end:
                return
            yield max(start, begin), min(stop, end), kind

    def covered(self, begin: float, end: float) -> float:
        """Return the total length of the stretches between ``begin`` and ``end``."""
        return sum(stop - start for start, stop, _ in self.between(begin, end))


def _clipped(spans: Iterable[_Span], begin: float, end: float, kind: str | None = None) -> _Timeline:
    """Build the timeline of spans, clipped to an interval. ``kind`` applies to all; None: by their names."""
    return _Timeline(
        (max(span.begin, begin), min(span.end, end), kind or _collective(span.name) or OTHER)
        for span in spans
        if span.begin < end and span.end > begin
    )


def _timeline_of_pieces(pieces: Iterable[_Piece], begin: float, end: float) -> _Timeline:
    """Build the timeline of pieces, clipped to the interval from ``begin`` to ``end``."""
    return _Timeline((max(piece.begin, begin), min(piece.end, end), piece.kind or OTHER) for piece in pieces)
