"""Profiled window: measurements of a few steps of one rank, compared with the prediction."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from estimator.plan import Prediction
from launchers.report.trace import (
    ATTENTION,
    COLLECTIVES,
    OTHER,
    PRODUCTS,
    Operator,
    Split,
)

# Parts of a step that the estimator predicts (throughput.Parts.kinds) -> measured kinds of work in them
EXPOSED, MODEL = "collectives, exposed", "forward and backward"
PARTS = {MODEL: (PRODUCTS, ATTENTION, OTHER), EXPOSED: tuple(dict.fromkeys(COLLECTIVES.values()))}
SUBKIND = "of it "


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Measurements of one rank's profiled window."""

    rank: int
    first: int
    last: int  # last profiled step
    split: Split
    memory: tuple[tuple[str, int], ...]  # bytes by category at the peak
    trace: str  # path or address of the trace
    snapshot: str | None  # path or address of CUDA's memory snapshot; None: no GPU

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON-compatible values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Window:
        """Restore a window from :meth:`to_dict`, also after a round trip through JSON."""
        split = dict(values["split"])
        for name in ("seconds", "hidden"):
            split[name] = tuple((kind, seconds) for kind, seconds in split[name])
        split["operators"] = tuple(Operator(**operator) for operator in split["operators"])
        memory = tuple((name, size) for name, size in values["memory"])
        return cls(**{**values, "split": Split(**split), "memory": memory})

    @property
    def steps(self) -> str:
        """Profiled steps as text, such as "step 3" or "steps 3 to 5"."""
        return f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"


def compare(window: Window, prediction: Prediction | None) -> list[tuple[str, float | None, float | None]]:
    """Return rows of (kind, predicted, measured) in seconds per step; None: not predicted, or not measured.

    Predictions exist for parts of a step, some of which combine several kinds (``PARTS``), and for kernels of
    "forward and backward". Its prediction includes the time that the GPU waits for the host, which is
    measured as idle.
    """
    predicted = dict(prediction.step_parts) if prediction else {}
    kernels = dict(prediction.step_kernels) if prediction else {}
    measured = dict(window.split.seconds)
    rows: list[tuple[str, float | None, float | None]] = []
    for part, kinds in PARTS.items():
        parts = {kind: measured.pop(kind) for kind in kinds if kind in measured}
        if parts or part in predicted:
            rows.append((part, predicted.get(part), sum(parts.values())))
            rows += [(f"{SUBKIND}{kind}", kernels.get(kind), seconds) for kind, seconds in parts.items()]
    remaining = dict.fromkeys([*measured, *(name for name in predicted if name not in PARTS)])
    rows += [(kind, predicted.get(kind), measured.get(kind)) for kind in remaining]
    rows.append(("the whole step", sum(predicted.values()) or None, window.split.step_seconds))
    return rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Collectives:
    """One kind of collective in the mean step, in seconds; None: not predicted, or not measured."""

    kind: str
    predicted: float | None
    measured: float | None  # exposed and hidden
    hidden: float  # part of ``measured`` that overlaps other work


def collectives(window: Window, prediction: Prediction | None) -> list[Collectives]:
    """List predicted and measured collectives by kind, including hidden ones, in the order of KINDS."""
    predicted = dict(prediction.step_collectives) if prediction else {}
    exposed, hidden = dict(window.split.seconds), dict(window.split.hidden)
    rows = []
    for kind in PARTS[EXPOSED]:
        measured = exposed.get(kind, 0.0) + hidden.get(kind, 0.0)
        if measured or kind in predicted:
            rows.append(
                Collectives(
                    kind=kind,
                    predicted=predicted.get(kind),
                    measured=measured or None,
                    hidden=hidden.get(kind, 0.0),
                )
            )
    return rows


def summary_lines(window: Window, prediction: Prediction | None) -> list[str]:
    """Format the window in a few lines for a terminal."""
    split = window.split
    parts = [
        f"{kind.removeprefix(SUBKIND)} {milliseconds(seconds)}"
        + (f" (predicted {milliseconds(prediction_s)})" if prediction_s else "")
        for kind, prediction_s, seconds in compare(window, prediction)[:-1]
        if seconds is not None and kind not in PARTS
    ]
    operators = ", ".join(
        f"{operator.name} {milliseconds(operator.seconds)}" for operator in split.operators[:3]
    )
    return [
        f"profiled {window.steps} on rank {window.rank}: {milliseconds(split.step_seconds)} a step: "
        + ", ".join(parts),
        f"  most expensive operators: {operators}",
    ]


def milliseconds(seconds: float) -> str:
    """Format a duration: in ms below a second, else in s."""
    return f"{seconds * 1000:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"
