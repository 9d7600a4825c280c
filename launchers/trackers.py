"""Experiment trackers: each step's metrics to TensorBoard, Weights & Biases or MLflow.

They run in the task of node 0, beside the training processes, so both engines feed them alike. The
writers are accelerate's (accelerate.tracking), imported only when a tracker is asked for.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from estimator.errors import UserError
from launchers.metrics import Metrics
from launchers.settings import Settings

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


def check_installed(names: Sequence[str]) -> None:
    """Raise UserError for a tracker whose package is not there."""
    for name in names:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise UserError(
                f"--tracker {name}: the package {PACKAGES[name]} is not installed.",
                f"pip install {PACKAGES[name]}",
            )


class Trackers:
    """Opens the asked-for trackers; where none are, every call does nothing."""

    def __init__(self, settings: Settings, *, run_name: str, folder: Path) -> None:
        self._trackers: list[Any] = []
        if not settings.tracker:
            return
        from accelerate import tracking

        folder.mkdir(parents=True, exist_ok=True)
        classes = {
            "tensorboard": lambda: tracking.TensorBoardTracker(run_name, logging_dir=str(folder)),
            "wandb": lambda: tracking.WandBTracker("metaflow-finetune", name=run_name, dir=str(folder)),
            "mlflow": lambda: tracking.MLflowTracker("metaflow-finetune", run_name=run_name),
        }
        config = _flat(settings.model_dump(mode="json"))
        for name in settings.tracker:
            tracker = classes[name]()
            tracker.start()
            tracker.store_init_configuration(config)
            self._trackers.append(tracker)

    def log(self, metrics: Metrics) -> None:
        values = {k: v for k, v in metrics.to_dict().items() if v is not None and k != "step"}
        for tracker in self._trackers:
            tracker.log(values, step=metrics.step)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.finish()


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        elif isinstance(value, bool | int | float | str):
            flat[prefix + name] = value
        elif value is not None:
            flat[prefix + name] = str(value)
    return flat
