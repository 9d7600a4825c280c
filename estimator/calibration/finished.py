"""Store of finished runs: prediction and measurement, one line of JSON per run."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

from estimator import json_lines
from estimator.errors import UserError
from estimator.untrusted import parse_json

VARIABLE = "FINETUNE_CALIBRATION"
SCHEMA_VERSION = 1

# No prediction is that far off; such a pair measures two different things (a wrong process, a crash).
LARGEST_RATIO = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """Predicted and measured peak memory of the largest process of one finished run, in bytes.

    Raises UserError for an empty name, a size below 1, and two sizes that differ by more than a factor of
    ``LARGEST_RATIO``.
    """

    engine: str
    method: str  # of estimator.vocabulary.METHODS
    gpu: str  # name in the GPU table, otherwise of the driver; "cpu"
    model: str
    setup: str  # one line of text: processes, sharding, batch, length, precision
    formulas: str  # estimator.calibration.formulas() at the time of the prediction
    predicted_bytes: int  # of the process, before any correction
    predicted_upper_bytes: int  # upper end of its range, before any correction
    measured_bytes: int  # of the process, comparable with the prediction
    measured_kind: str  # method of the measurement
    predicted_categories: tuple[tuple[str, int], ...] = ()
    reserved_bytes: int | None = None  # peaks reported by torch; None on a CPU
    allocated_bytes: int | None = None
    predicted_live_bytes: int | None = None  # live tensors at the peak, comparable with ``allocated_bytes``
    checkpoint_bytes: int | None = None  # of one node, as planned
    checkpoint_seconds: float | None = None  # pause of the training per checkpoint; None without checkpoints
    # Of the run, over all processes. None: unknown, or not comparable, such as rows shorter than planned
    measured_tokens_per_second: float | None = None
    predicted_tokens_per_second: float | None = None  # before any correction
    speed_formulas: str = ""  # estimator.calibration.speed.formulas() at the time of the prediction
    torch: str | None = None
    date: str  # ISO 8601, UTC
    run: str  # id of the run, so that it is not counted twice
    own_loop: bool = False  # trained by a step's own code on the plan of the engine
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
                f"{self.measured_bytes} bytes measured and {self.predicted_bytes} predicted differ by more "
                f"than a factor of {LARGEST_RATIO:g}.",
                "One of the two belongs to another process.",
            )

    @property
    def ratio(self) -> float:
        """Measured bytes / predicted bytes."""
        return self.measured_bytes / self.predicted_bytes

    @property
    def live_ratio(self) -> float | None:
        """Allocated bytes / predicted live bytes; None on a CPU, where torch counts nothing."""
        if not self.allocated_bytes or not self.predicted_live_bytes:
            return None
        return self.allocated_bytes / self.predicted_live_bytes

    @property
    def speed_ratio(self) -> float | None:
        """Measured tokens/s over predicted; None if one is unknown or they differ like different things."""
        if not self.measured_tokens_per_second or not self.predicted_tokens_per_second:
            return None
        ratio = self.measured_tokens_per_second / self.predicted_tokens_per_second
        return ratio if 1 / LARGEST_RATIO <= ratio <= LARGEST_RATIO else None

    def to_json(self) -> str:
        """Format as one line of JSON with sorted keys, without a line break."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Finished:
        """Parse a line written by :meth:`to_json`; raises UserError with the reason for an invalid line."""
        try:
            values = parse_json(text)
        except ValueError:
            raise UserError("it is not JSON") from None
        if not isinstance(values, dict):
            raise UserError("it is not a record")
        if values.get("schema") != SCHEMA_VERSION:
            raise UserError(f"its schema is {values.get('schema')!r}, this version reads {SCHEMA_VERSION}")
        names = {field.name for field in dataclasses.fields(cls)}
        if set(values) - names:
            raise UserError(f"it has unknown fields: {', '.join(sorted(set(values) - names))}")
        try:
            categories = tuple((str(name), int(size)) for name, size in values["predicted_categories"])
            return cls(**{**values, "predicted_categories": categories})
        except (TypeError, ValueError, KeyError) as error:
            raise UserError(f"a field is missing or wrong: {error}") from None


@dataclass(frozen=True, slots=True)
class Records:
    """Runs of a store, and one message per line of the store that cannot be used."""

    finished: tuple[Finished, ...]
    problems: tuple[str, ...]


class Store:
    """Finished runs in a file of JSON lines, to which several processes may append concurrently."""

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = Path(path).expanduser() if path else default_path()

    def add(self, finished: Finished) -> None:
        """Append one run; raises OSError if the file cannot be written or locked."""
        json_lines.append(self.path, finished.to_json())

    def read(self) -> Records:
        """Read all runs; of several with the same id, the first. Damaged lines go to ``problems``."""
        try:
            lines = json_lines.read(self.path)
        except FileNotFoundError:
            return Records((), ())
        except OSError as error:
            return Records((), (f"Cannot read {self.path}: {error.strerror or error}.",))
        finished: dict[str, Finished] = {}
        problems = []
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                run = Finished.from_json(line)
            except UserError as error:
                problems.append(f"Skipped line {number} of {self.path}: {error.problem.removesuffix('.')}.")
                continue
            finished.setdefault(run.run, run)
        return Records(tuple(finished.values()), tuple(problems))


def default_path() -> Path:
    """Return the file: ``FINETUNE_CALIBRATION``, or calibration.jsonl in the user's XDG data folder."""
    path = os.environ.get(VARIABLE)
    if path:
        return Path(path).expanduser()
    data = os.environ.get("XDG_DATA_HOME")
    root = Path(data) if data and Path(data).is_absolute() else Path.home() / ".local" / "share"
    return root / "metaflow-finetune" / "calibration.jsonl"
