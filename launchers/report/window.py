"""A profiled window: one rank's few steps, beside what the estimator has predicted of them."""

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

# What the estimator predicts as one (throughput.Parts.kinds), and the kinds that are measured of it
EXPOSED, MODEL = "collectives, exposed", "forward and backward"
PARTS = {MODEL: (PRODUCTS, ATTENTION, OTHER), EXPOSED: tuple(dict.fromkeys(COLLECTIVES.values()))}
OF_IT = "of it "


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """What one rank's profiled window has shown."""

    rank: int
    first: int
    last: int  # the last step that was profiled
    split: Split
    memory: tuple[tuple[str, int], ...]  # bytes by category at the peak
    trace: str  # where the trace lies
    snapshot: str | None  # CUDA's memory snapshot; None: there is no GPU

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Window:
        """The window that :meth:`to_dict` wrote, also after it went through JSON."""
        split = dict(values["split"])
        for name in ("seconds", "hidden"):
            split[name] = tuple((kind, seconds) for kind, seconds in split[name])
        split["operators"] = tuple(Operator(**each) for each in split["operators"])
        memory = tuple((name, size) for name, size in values["memory"])
        return cls(**{**values, "split": Split(**split), "memory": memory})

    @property
    def steps(self) -> str:
        """ "step 3" or "steps 3 to 5"."""
        return f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"


def compare(window: Window, prediction: Prediction | None) -> list[tuple[str, float | None, float | None]]:
    """Rows of (kind, predicted, measured), seconds of a step; None: not predicted, or not there.

    Predicted are the parts of a step, which know some kinds only together (``PARTS``), and the kernels of
    "forward and backward"; that holds the GPU's waiting for the host, too, which is measured as idle.
    """
    predicted = dict(prediction.step_parts) if prediction else {}
    kernels = dict(prediction.step_kernels) if prediction else {}
    measured = dict(window.split.seconds)
    rows: list[tuple[str, float | None, float | None]] = []
    for whole, kinds in PARTS.items():
        found = {kind: measured.pop(kind) for kind in kinds if kind in measured}
        if found or whole in predicted:
            rows.append((whole, predicted.get(whole), sum(found.values())))
            rows += [(f"{OF_IT}{kind}", kernels.get(kind), seconds) for kind, seconds in found.items()]
    others = dict.fromkeys([*measured, *(name for name in predicted if name not in PARTS)])
    rows += [(kind, predicted.get(kind), measured.get(kind)) for kind in others]
    rows.append(("the whole step", sum(predicted.values()) or None, window.split.step_seconds))
    return rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Collectives:
    """One kind of collective in the mean step, in seconds; None: not predicted, or not there."""

    kind: str
    predicted: float | None
    measured: float | None  # whether it was waited for or not
    hidden: float  # of what was measured, behind other work


def collectives(window: Window, prediction: Prediction | None) -> list[Collectives]:
    """All collectives by kind, those too that run behind other work, in the order of KINDS."""
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


def lines(window: Window, prediction: Prediction | None) -> list[str]:
    """The window in a few lines of text, for a terminal."""
    split = window.split
    parts = [
        f"{kind.removeprefix(OF_IT)} {milliseconds(seconds)}"
        + (f" (predicted {milliseconds(guess)})" if guess else "")
        for kind, guess, seconds in compare(window, prediction)[:-1]
        if seconds is not None and kind not in PARTS
    ]
    dearest = ", ".join(f"{each.name} {milliseconds(each.seconds)}" for each in split.operators[:3])
    return [
        f"profiled {window.steps} on rank {window.rank}: {milliseconds(split.step_seconds)} a step: "
        + ", ".join(parts),
        f"  dearest operators: {dearest}",
    ]


def milliseconds(seconds: float) -> str:
    """A time for people: ms below a second."""
    return f"{seconds * 1000:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"
