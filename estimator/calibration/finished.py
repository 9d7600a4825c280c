"""The store of finished runs: what was predicted and what was measured, a line of JSON for each run."""

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

# A prediction is never that far off; such a pair measures two different things (a wrong process, a crash).
LARGEST_RATIO = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """One finished run: the predicted and the measured peak memory of its largest process, in bytes.

    Raises UserError for a name that is empty, a size below 1, and two sizes that are more than
    ``LARGEST_RATIO`` times apart.
    """

    engine: str
    method: str  # of estimator.vocabulary.METHODS
    gpu: str  # the GPU table's name, else the driver's; "cpu"
    model: str
    setup: str  # a line for people: processes, sharding, batch, length, precision
    formulas: str  # estimator.calibration.formulas() when it was predicted
    predicted_bytes: int  # what the whole process should show, before any correction
    predicted_upper_bytes: int  # the upper end of its range, before any correction
    measured_bytes: int  # comparable with the prediction: the whole process
    measured_kind: str  # how ``measured_bytes`` was found
    predicted_categories: tuple[tuple[str, int], ...] = ()
    reserved_bytes: int | None = None  # torch's peaks; None on a CPU
    allocated_bytes: int | None = None
    predicted_live_bytes: int | None = None  # tensors alive at the peak, which ``allocated_bytes`` counts
    checkpoint_bytes: int | None = None  # of the node, as planned
    checkpoint_seconds: float | None = None  # that training stood still for one; None: there was none
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
        """Measured bytes over predicted bytes."""
        return self.measured_bytes / self.predicted_bytes

    @property
    def live_ratio(self) -> float | None:
        """Allocated over predicted live bytes; None where torch counted nothing, on a CPU."""
        if not self.allocated_bytes or not self.predicted_live_bytes:
            return None
        return self.allocated_bytes / self.predicted_live_bytes

    def to_json(self) -> str:
        """One line of JSON, keys sorted, without a line break."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Finished:
        """The run of a line that :meth:`to_json` wrote; raises UserError with what is wrong with the line."""
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
    """The runs of a store, and one line for each of the store's lines that cannot be used."""

    finished: tuple[Finished, ...]
    problems: tuple[str, ...]


class Store:
    """Finished runs in a file of JSON lines, which several processes may add to at a time."""

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = Path(path).expanduser() if path else default_path()

    def add(self, finished: Finished) -> None:
        """Append one run; raises OSError where the file cannot be written or locked."""
        json_lines.append(self.path, finished.to_json())

    def read(self) -> Records:
        """All runs; of several with one name the first. Damaged lines end up in ``problems``; no error."""
        try:
            lines = json_lines.read(self.path)
        except FileNotFoundError:
            return Records((), ())
        except OSError as error:
            return Records((), (f"{self.path} can't be read: {error.strerror or error}.",))
        finished: dict[str, Finished] = {}
        problems = []
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                run = Finished.from_json(line)
            except UserError as error:
                problems.append(
                    f"{self.path}, line {number}, is left out: {error.problem.removesuffix('.')}."
                )
                continue
            finished.setdefault(run.run, run)
        return Records(tuple(finished.values()), tuple(problems))


def default_path() -> Path:
    """The store's file: ``FINETUNE_CALIBRATION``, else calibration.jsonl in the user's data folder (XDG)."""
    path = os.environ.get(VARIABLE)
    if path:
        return Path(path).expanduser()
    data = os.environ.get("XDG_DATA_HOME")
    root = Path(data) if data and Path(data).is_absolute() else Path.home() / ".local" / "share"
    return root / "metaflow-finetune" / "calibration.jsonl"
