"""What one provider of prices has said."""

from __future__ import annotations

from dataclasses import dataclass, field

from estimator.hardware.csv_files import Cells


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned:
    """A line for the user, and cells of the instance table by machine name."""

    line: str
    machines: dict[str, Cells] = field(default_factory=dict)
