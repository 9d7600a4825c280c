"""A finished run to store, with whatever a test changes of it."""

from __future__ import annotations

from typing import Any

from estimator.calibration import Finished, formulas
from estimator.plan import GIB


def finished(run: str = "FinetuneFlow/1", **changes: Any) -> Finished:
    values: dict[str, Any] = {
        "engine": "torchtune",
        "method": "lora",
        "gpu": "H100 SXM",
        "model": "llama-8b",
        "setup": "8 processes, fsdp",
        "formulas": formulas("torchtune", "lora"),
        "predicted_bytes": 20 * GIB,
        "predicted_upper_bytes": 23 * GIB,
        "measured_bytes": 22 * GIB,
        "measured_kind": "reserved",
        "predicted_categories": (("weights", 15 * GIB), ("activations", 5 * GIB)),
        "date": "2026-01-02T03:04:05+00:00",
        "run": run,
    }
    return Finished(**(values | changes))
