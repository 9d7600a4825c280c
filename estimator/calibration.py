"""Calibration: what finished runs have measured, and how that corrects the next estimate.

Each finished run leaves one line in a local file: what was predicted before any correction, and what was
measured. Runs of the same engine, method and GPU, predicted by the formulas as they are today, make a
:class:`Correction`. To change the file's place, set ``FINETUNE_CALIBRATION``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import math
import os
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from estimator.errors import UserError
from estimator.plan import MemoryEstimate
from estimator.setup import Engine, Setup

VARIABLE = "FINETUNE_CALIBRATION"
SCHEMA_VERSION = 1
LOCK_SECONDS = 5.0  # a writer holds the lock for one line; a longer wait is a file system without locks

# The formulas' own evidence counts as this many runs. A choice: one run moves an estimate by a third of what
# it found, three runs by 60 %, twenty by 91 %.
PRIOR_RUNS = 2
# The largest of n ratios covers the next run's with probability n / (n + 1), if runs are alike. The upper
# bound promises 95 %, so this many runs can set it alone; fewer can only raise it.
RUNS_FOR_A_BOUND = 19
# A prediction is never that far off; such a pair measures two different things (a wrong process, a crash).
LARGEST_RATIO = 10.0

# Taken from first where runs need less than predicted: their sizes are empirical. The others are arithmetic
# on shapes and types.
UNCERTAIN = ("fragmentation", "activations", "communication buffers", "optimizer temporaries", "runtime")
ADDED = "calibration"  # the category of what runs need beyond the formulas


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """One finished run: predicted and measured peak of its largest process, in bytes."""

    engine: str
    method: str  # "full", "lora", "qlora", "dora", "qdora"
    gpu: str  # the GPU table's name, else the driver's; "cpu"
    model: str
    setup: str  # a line for people: processes, sharding, batch, length, precision
    formulas: str  # :func:`formulas` when it was predicted
    predicted_bytes: int  # likely, before any correction
    predicted_upper_bytes: int  # upper bound, before any correction
    measured_bytes: int  # comparable with the prediction: the whole process
    measured_kind: str  # how ``measured_bytes`` was found
    predicted_categories: tuple[tuple[str, int], ...] = ()
    reserved_bytes: int | None = None  # torch's peaks; None on a CPU
    allocated_bytes: int | None = None
    torch: str | None = None
    date: str  # ISO 8601, UTC
    run: str  # names the run, so that it is not counted twice
    schema: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        for name in ("engine", "method", "gpu", "formulas", "run"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise UserError(f"{name} = {value!r} must be a name.")
        for name in ("predicted_bytes", "predicted_upper_bytes", "measured_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"{name} = {value!r} must be a whole number of bytes above 0.")
        if not 1 / LARGEST_RATIO <= self.ratio <= LARGEST_RATIO:
            raise UserError(
                f"{self.measured_bytes} bytes measured and {self.predicted_bytes} predicted are more than "
                f"{LARGEST_RATIO:g} times apart.",
                "One of the two is not of this run's process.",
            )

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured_bytes / self.predicted_bytes

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Finished:
        """Read :meth:`to_json`'s text; raises UserError with what is wrong with it."""
        try:
            values = json.loads(text)
        except ValueError:
            raise UserError("it is not JSON") from None
        if not isinstance(values, dict):
            raise UserError("it is not a record")
        if values.get("schema") != SCHEMA_VERSION:
            raise UserError(f"its schema is {values.get('schema')!r}, this version reads {SCHEMA_VERSION}")
        known = {field.name for field in dataclasses.fields(cls)}
        if set(values) - known:
            raise UserError(f"it has unknown fields: {', '.join(sorted(set(values) - known))}")
        try:
            categories = tuple((str(name), int(size)) for name, size in values["predicted_categories"])
            return cls(**{**values, "predicted_categories": categories})
        except (TypeError, ValueError, KeyError) as error:
            raise UserError(f"a field is missing or wrong: {error}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """What runs of one engine, method and GPU say about an estimate."""

    gpu: str  # "cpu" where it is one
    factor: float  # on the likely value
    largest_ratio: float  # measured over predicted, of all these runs: the upper bound is never below it
    runs: int

    @property
    def basis(self) -> str:
        runs = "1 run" if self.runs == 1 else f"{self.runs} runs"
        return f"calibrated on {runs}: x{self.factor:.2f}, at most x{self.largest_ratio:.2f} measured"


@dataclass(frozen=True, slots=True)
class Records:
    """What a store holds, and a line for each of its lines that can't be used."""

    finished: tuple[Finished, ...]
    problems: tuple[str, ...]


class Store:
    """Finished runs in a file of JSON lines, which several processes may add to at a time."""

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = Path(path).expanduser() if path else default_path()

    def add(self, finished: Finished) -> None:
        """Append one run; raises OSError where the file can't be written or locked."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = finished.to_json() + "\n"
        with self.path.open("a+b") as file, _locked(file.fileno(), fcntl.LOCK_EX):
            size = os.fstat(file.fileno()).st_size
            if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                line = "\n" + line  # a writer was killed in the middle of its line
            os.write(file.fileno(), line.encode())
            os.fsync(file.fileno())

    def read(self) -> Records:
        """All runs, the first of each name; damaged lines are told, not raised."""
        try:
            with self.path.open("rb") as file, _locked(file.fileno(), fcntl.LOCK_SH, needed=False):
                text = file.read().decode(errors="replace")
        except FileNotFoundError:
            return Records((), ())
        except OSError as error:
            return Records((), (f"{self.path} can't be read: {error.strerror or error}.",))
        finished: dict[str, Finished] = {}
        problems = []
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip():
                continue
            try:
                found = Finished.from_json(line)
            except UserError as error:
                problems.append(
                    f"{self.path}, line {number}, is left out: {error.problem.removesuffix('.')}."
                )
                continue
            finished.setdefault(found.run, found)
        return Records(tuple(finished.values()), tuple(problems))


class Calibration:
    """Corrections by engine, method and GPU."""

    def __init__(self, finished: Iterable[Finished] = ()) -> None:
        self._ratios: dict[tuple[str, str, str, str], list[float]] = {}
        for run in finished:
            key = (run.engine, run.method, run.gpu, run.formulas)
            self._ratios.setdefault(key, []).append(run.ratio)

    def correction(self, engine: str, method: str, gpu: str) -> Correction | None:
        """What is known of such runs; None where there are none that today's formulas predicted.

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
        """The correction for a step on a GPU of that name; None is an unknown GPU."""
        where = "cpu" if setup.device == "cpu" else gpu
        return self.correction(setup.engine, method_of(setup), where) if where else None

    def corrected(self, estimate: MemoryEstimate, setup: Setup, gpu: str | None) -> MemoryEstimate:
        """The estimate as earlier runs correct it, with a note of the formulas that it was made by."""
        found = self.of(setup, gpu)
        noted = dataclasses.replace(estimate, formulas=formulas(setup.engine, method_of(setup)))
        return apply(noted, found) if found else noted


def load(path: Path | str | None = None) -> tuple[Calibration, tuple[str, ...]]:
    """The store's corrections, and a line for each of its lines that can't be used."""
    records = Store(path).read()
    return Calibration(records.finished), records.problems


def correction(setup: Setup, gpu: str | None, *, store: Store | None = None) -> Correction | None:
    """What the local store says about a step on a GPU of that name."""
    return Calibration((store or Store()).read().finished).of(setup, gpu)


def apply(estimate: MemoryEstimate, found: Correction) -> MemoryEstimate:
    """An uncorrected estimate, corrected.

    likely = factor x likely. Where that is more, the difference is a category of its own; where it is less,
    it comes off the empirical categories in proportion, and off the others only when those are used up.

    upper = the largest of: the corrected likely; likely x the largest ratio measured; and, with fewer than
    ``RUNS_FOR_A_BOUND`` runs, the uncorrected upper bound x max(factor, 1). So a bound is never below what
    such a run has measured, scaled by the two predictions.
    """
    if estimate.uncorrected is not None:
        raise ValueError("this estimate is corrected already")
    before, upper_before = estimate.likely_bytes, estimate.upper_bytes
    categories = _scaled(estimate.categories, round(before * found.factor))
    likely = sum(size for _, size in categories)
    bounds = [likely, math.ceil(before * found.largest_ratio)]
    if found.runs < RUNS_FOR_A_BOUND:
        bounds.append(math.ceil(upper_before * max(found.factor, 1.0)))
    upper = max(bounds)
    host = estimate.host_bytes
    if found.gpu == "cpu":  # the node's memory is that of its processes; of a GPU, it says nothing
        host = math.ceil(host * upper / upper_before)
    return dataclasses.replace(
        estimate,
        categories=categories,
        upper_bytes=upper,
        host_bytes=host,
        basis=f"{estimate.basis}; {found.basis}",
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
        taken = min(-missing, total)
        for name in group:
            if total and name in sizes:
                off = taken * sizes[name] // total
                total, taken, missing = total - sizes[name], taken - off, missing + off
                sizes[name] -= off
    return tuple((name, sizes[name]) for name, _ in categories if sizes[name])


def method_of(setup: Setup) -> str:
    """The name that users give a step's method: adapters on a quantised base are qlora and qdora."""
    return f"q{setup.method}" if setup.quantization != "none" else setup.method


@lru_cache(maxsize=64)
def formulas(engine: Engine, method: str) -> str:
    """A mark of what the formulas predict for an engine and method today.

    Runs that other formulas predicted say nothing about today's error.
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


def default_path() -> Path:
    """``FINETUNE_CALIBRATION``, else calibration.jsonl in the user's data folder (XDG)."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given).expanduser()
    data = os.environ.get("XDG_DATA_HOME")
    root = Path(data) if data and Path(data).is_absolute() else Path.home() / ".local" / "share"
    return root / "metaflow-finetune" / "calibration.jsonl"


@contextlib.contextmanager
def _locked(descriptor: int, kind: int, *, needed: bool = True) -> Iterator[None]:
    """The file's lock for as long as it takes to read it or to write a line.

    Where it is not ``needed``, a lock that can't be had is gone without: half a line is left out at worst.
    """
    try:
        _lock(descriptor, kind)
    except OSError:
        if needed:
            raise
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # closing the file gives the lock back as well
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def _lock(descriptor: int, kind: int) -> None:
    deadline = time.monotonic() + LOCK_SECONDS
    while not _has_locked(descriptor, kind):
        if time.monotonic() > deadline:
            raise TimeoutError(f"another process has held the file for {LOCK_SECONDS:g} s")
        time.sleep(0.01)


def _has_locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
