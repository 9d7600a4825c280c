"""A profiler's trace, read: where the time and the memory of a few optimizer steps went.

The trace is what ``torch.profiler`` exports (Chrome's trace event format, as Kineto writes it). Everything
here is arithmetic on its events: no torch is needed. Every moment of a step belongs to exactly one kind, so
that the kinds add up to the step:

on a CPU
    the thread that trains: to the kind of the innermost operator that runs. Where none runs but Python, to a
    collective if one is under way on another thread (exposed), else it is idle: Python, between operators.
on a GPU
    the streams: to the kind of the operator that has launched the kernel that runs, to a collective where
    only one runs (exposed), else it is idle: no kernel runs.

Reading data, the optimizer and drawing answers are told by annotations (of ``launchers.engines.profiling``
and of torch itself) and take all that runs in them, save collectives. A collective that runs beside other
work costs nothing: it is *hidden*, and told apart.
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

STEP = "finetune step "  # how the annotation of a step begins; its number follows
PHASE = "finetune phase "  # and that of a part of a step; its name follows
DATA, OPTIMIZER, GENERATION = "data", "optimizer", "generation"
PRODUCTS, ATTENTION, OTHER, IDLE = "products", "attention", "other operators", "idle"
# In names of operators, of Gloo's and NCCL's spans and of kernels, without what joins their words; a word
# comes before those that it holds
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
MOST_OPERATORS = 10
# Categories of memory; the first four are read off the tensors themselves
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
# Operators in C++; a node of autograd also runs hooks, which may wait
_COMPUTES = re.compile(r"^(?!autograd::|torch::autograd::)\w+::")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_MICROSECOND = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """An operator's own time: without that of operators which it calls."""

    name: str
    seconds: float  # of one step
    calls: float  # in one step; on a GPU, kernels


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """The mean step of a window. ``seconds`` add up to ``step_seconds``; ``hidden`` comes on top."""

    device: str  # "cuda" or "cpu": whose time this is
    steps: int
    step_seconds: float
    seconds: tuple[tuple[str, float], ...]  # by kind, in the order of KINDS; collectives: what is exposed
    hidden: tuple[tuple[str, float], ...]  # collectives behind other work
    operators: tuple[Operator, ...]  # the dearest, dearest first


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a trace, gzipped or not."""
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    return events


def split(events: Iterable[Mapping[str, Any]]) -> Split:
    """Where the time of the annotated steps went; raises ValueError where the trace has none."""
    spans = [_Span.of(each) for each in events if each.get("ph") == "X" and "dur" in each]
    steps = sorted(
        (each for each in spans if each.category == "user_annotation" and each.name.startswith(STEP)),
        key=lambda each: each.begin,
    )
    if not steps:
        raise ValueError("the trace has no annotated step")
    rest = [each for each in spans if not each.name.startswith(STEP)]
    on_gpu = any(each.category == "kernel" for each in rest)
    count = _Count()
    work = _Gpu(rest, steps[0].thread) if on_gpu else _Cpu(rest, steps[0].thread)
    for step in steps:
        work.add_to(count, step.begin, step.end)
    each = _MICROSECOND / len(steps)
    dearest = sorted(count.operators.items(), key=lambda item: -item[1])[:MOST_OPERATORS]
    return Split(
        device="cuda" if on_gpu else "cpu",
        steps=len(steps),
        step_seconds=sum(step.end - step.begin for step in steps) * each,
        seconds=tuple((kind, count.kinds[kind] * each) for kind in KINDS if count.kinds[kind] > 0),
        hidden=tuple((kind, count.hidden[kind] * each) for kind in KINDS if count.hidden[kind] > 0),
        operators=tuple(
            Operator(name=name, seconds=spent * each, calls=count.calls[name] / len(steps))
            for name, spent in dearest
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocated:
    """Memory of tensors during a trace, in bytes: at its beginning, and at most.

    What torch's allocators count. That of a CPU counts from the trace's beginning on, where it is 0.
    """

    before: int
    peak: int


def allocated(events: Iterable[Mapping[str, Any]], *, gpu: bool) -> Allocated | None:
    """From the trace's memory events (``profile_memory``), of GPU or host; None where there is none."""
    before, peak = None, 0
    kind = 1 if gpu else 0  # c10's DeviceType
    for event in sorted((each for each in events if each.get("name") == "[memory]"), key=lambda e: e["ts"]):
        values = event["args"]
        if values["Device Type"] != kind:
            continue
        total = int(values["Total Allocated"])
        before = total - int(values["Bytes"]) if before is None else before
        peak = max(peak, total)
    if before is None:
        return None
    return Allocated(before=before, peak=peak) if gpu else Allocated(before=0, peak=peak - before)


@dataclass(frozen=True, slots=True)
class _Span:
    name: str
    category: str
    thread: tuple[Any, Any]
    begin: float  # microseconds
    end: float
    correlation: int | None  # what a kernel and the call that launched it have in common

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


class _Count:
    """Microseconds so far."""

    def __init__(self) -> None:
        self.kinds: defaultdict[str, float] = defaultdict(float)
        self.hidden: defaultdict[str, float] = defaultdict(float)
        self.operators: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()


@dataclass(frozen=True, slots=True)
class _Piece:
    """A stretch of a thread, or of the streams, in which one thing runs."""

    begin: float
    end: float
    kind: str | None  # None: nothing that has a kind
    operator: str | None = None
    waits: bool = False  # whether a thread may be waiting for a collective here


@dataclass(frozen=True, slots=True)
class _Frame:
    """A span that has begun on a thread, with what it has from those around it."""

    end: float
    kind: str | None
    operator: str | None
    inside: str | None  # the kind that all within it has; None: each its own
    waits: bool = True


class _Cpu:
    """The time of the thread that trains."""

    def __init__(self, spans: Sequence[_Span], thread: tuple[Any, Any]) -> None:
        self._own = _host_spans(spans, thread)
        self._collectives = [
            each for each in spans if each.thread != thread and each.category == "user_annotation"
        ]
        self._collectives = [each for each in self._collectives if _collective(each.name)]

    def add_to(self, count: _Count, begin: float, end: float) -> None:
        """Count what ran from ``begin`` to ``end``."""
        under_way = _clipped(self._collectives, begin, end)
        for one, other, kind in under_way.stretches:
            count.hidden[kind] += other - one
        for piece in _thread_pieces(_within(self._own, begin, end), begin, end):
            left = piece.end - piece.begin
            for one, other, kind in under_way.between(piece.begin, piece.end) if piece.waits else ():
                count.kinds[kind] += other - one
                count.hidden[kind] -= other - one
                left -= other - one
            count.kinds[piece.kind or IDLE] += left
            if piece.operator is not None:
                count.operators[piece.operator] += left
        count.calls.update(
            each.name for each in self._own if each.category == "cpu_op" and begin <= each.begin < end
        )


class _Gpu:
    """The time of a GPU's streams."""

    def __init__(self, spans: Sequence[_Span], thread: tuple[Any, Any]) -> None:
        launched = _launched(spans)
        self._data = [
            each
            for each in spans
            if each.thread == thread and each.category == "user_annotation" and _phase(each.name) == DATA
        ]
        self._work: list[tuple[_Piece, bool]] = []
        for each in spans:
            if each.category not in _DEVICE:
                continue
            collective = _collective(each.name)
            kind, operator = launched.get(each.correlation, (None, None))
            if collective is None and kind in (None, OTHER):
                kind = _kind_by_name(each.name) if each.category == "kernel" else kind or OTHER
            piece = _Piece(each.begin, each.end, collective or kind, operator or each.name)
            self._work.append((piece, collective is not None))
        self._work.sort(key=lambda item: item[0].begin)

    def add_to(self, count: _Count, begin: float, end: float) -> None:
        """Count what ran from ``begin`` to ``end``."""
        inside = [(p, c) for p, c in self._work if p.begin < end and p.end > begin]
        computing = _cut([p for p, is_collective in inside if not is_collective], begin, end)
        moving = _cut([p for p, is_collective in inside if is_collective], begin, end)
        data = _clipped(self._data, begin, end, kind=DATA)
        for one, other, kind in computing.stretches:
            count.kinds[kind] += other - one
        for one, other, kind in moving.stretches:
            covered = computing.covered(one, other)
            count.hidden[kind] += covered
            count.kinds[kind] += other - one - covered
        cursor = begin
        busy = _Timeline([*computing.stretches, *moving.stretches])
        for one, other, _ in [*busy.stretches, (end, end, IDLE)]:
            waiting = data.covered(cursor, one)
            count.kinds[DATA] += waiting
            count.kinds[IDLE] += one - cursor - waiting
            cursor = other
        for piece, _ in inside:
            if piece.operator is not None:
                count.operators[piece.operator] += min(piece.end, end) - max(piece.begin, begin)
                count.calls[piece.operator] += begin <= piece.begin


def _launched(spans: Sequence[_Span]) -> dict[int | None, tuple[str | None, str | None]]:
    """Kind and operator of each call that launches work on the GPU, by what the work knows it by."""
    found: dict[int | None, tuple[str | None, str | None]] = {}
    by_thread: defaultdict[tuple[Any, Any], list[_Span]] = defaultdict(list)
    for each in spans:
        if each.category in ("cpu_op", "user_annotation", *_LAUNCHES):
            by_thread[each.thread].append(each)
    for own in by_thread.values():
        stack: list[_Frame] = []
        for span in sorted(own, key=lambda each: (each.begin, -each.end)):
            while stack and stack[-1].end <= span.begin:
                stack.pop()
            around = stack[-1] if stack else None
            if span.category in _LAUNCHES:
                if span.correlation is not None and around is not None:
                    found[span.correlation] = (around.kind, around.operator)
            else:
                stack.append(_frame(span, around))
    return found


def _frame(span: _Span, around: _Frame | None) -> _Frame:
    inside = around.inside if around else None
    if span.category == "user_annotation":
        phase = _phase(span.name) or inside
        operator = around.operator if around else None
        return _Frame(span.end, phase or (around.kind if around else None), operator, phase)
    waits = not _COMPUTES.match(span.name)
    kind = _collective(span.name) or inside or _kind_by_name(span.name)
    lasting = kind if kind in (ATTENTION, DATA, OPTIMIZER, GENERATION) or _collective(span.name) else inside
    return _Frame(span.end, kind, span.name, lasting, waits)


def _thread_pieces(spans: Sequence[_Span], begin: float, end: float) -> Iterator[_Piece]:
    """What runs on a thread at each moment: the innermost operator, or the phase that it is in."""
    stack: list[_Frame] = []
    cursor = begin

    def until(moment: float) -> Iterator[_Piece]:
        nonlocal cursor
        while stack and stack[-1].end <= moment:
            frame = stack.pop()
            if frame.end > cursor:
                yield _Piece(cursor, frame.end, frame.kind, frame.operator, frame.waits)
                cursor = frame.end
        if moment > cursor:
            frame = stack[-1] if stack else _Frame(moment, None, None, None)
            yield _Piece(cursor, moment, frame.kind, frame.operator, frame.waits)
            cursor = moment

    for span in spans:
        yield from until(min(max(span.begin, begin), end))
        stack.append(_frame(span, stack[-1] if stack else None))
    yield from until(end)


def _host_spans(spans: Sequence[_Span], thread: tuple[Any, Any]) -> list[_Span]:
    own = [each for each in spans if each.thread == thread and each.category in ("cpu_op", "user_annotation")]
    return sorted(own, key=lambda each: (each.begin, -each.end))


def _within(spans: Sequence[_Span], begin: float, end: float) -> list[_Span]:
    return [each for each in spans if each.begin < end and each.end > begin]


def _phase(name: str) -> str | None:
    """The kind of all that runs within an annotation; None: it says nothing of that."""
    if name.startswith("Optimizer."):  # torch.optim.Optimizer's own: step and zero_grad
        return OPTIMIZER
    if name.startswith("enumerate(DataLoader)"):
        return DATA
    phase = name.removeprefix(PHASE)
    return phase if phase != name and phase in (DATA, OPTIMIZER, GENERATION) else None


def _collective(name: str) -> str | None:
    """Which collective an operator, a span or a kernel is; None: none."""
    if not _COLLECTIVE.match(name):
        return None
    letters = re.sub(r"[^a-z]", "", name.partition("<")[0].lower())
    return next((kind for word, kind in COLLECTIVES.items() if word in letters), None)


def _kind_by_name(name: str) -> str:
    if _ATTENTION.search(name):
        return ATTENTION
    return PRODUCTS if _PRODUCTS.search(name) else OTHER


_Stretch = tuple[float, float, str]  # begin, end, kind


class _Timeline:
    """Which kind runs at each moment: of several at a time, that which began first."""

    def __init__(self, stretches: Iterable[_Stretch]) -> None:
        self.stretches: list[_Stretch] = []
        for begin, end, kind in sorted(stretches):
            free = max(begin, self.stretches[-1][1]) if self.stretches else begin
            if free < end:
                self.stretches.append((free, end, kind))
        self._ends = [end for _, end, _ in self.stretches]

    def between(self, begin: float, end: float) -> Iterator[_Stretch]:
        """What runs from ``begin`` to ``end``."""
        for one, other, kind in self.stretches[bisect.bisect_right(self._ends, begin) :]:
            if one >= end:
                return
            yield max(one, begin), min(other, end), kind

    def covered(self, begin: float, end: float) -> float:
        """Of that time, how much anything runs in."""
        return sum(other - one for one, other, _ in self.between(begin, end))


def _clipped(spans: Iterable[_Span], begin: float, end: float, kind: str | None = None) -> _Timeline:
    return _Timeline(
        (max(each.begin, begin), min(each.end, end), kind or _collective(each.name) or OTHER)
        for each in spans
        if each.begin < end and each.end > begin
    )


def _cut(pieces: Iterable[_Piece], begin: float, end: float) -> _Timeline:
    return _Timeline((max(each.begin, begin), min(each.end, end), each.kind or OTHER) for each in pieces)
