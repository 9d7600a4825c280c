"""Experiment trackers: each step's metrics to TensorBoard, Weights & Biases or MLflow.

They run in the task of node 0, beside the training processes, so both engines feed them alike. The
writers are accelerate's (accelerate.tracking), imported only when a tracker is asked for.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from estimator.errors import UserError
from launchers.metrics import Metrics
from launchers.settings import Settings

_CREDENTIALS = re.compile(r"://[^/@\s]*@")  # in the address of a server
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
    """Opens the asked-for trackers; where none are, every call does nothing.

    A tracker that fails is named once and left out: the run's own metrics are kept anyway, and no GPU is
    given up for a server that doesn't answer.
    """

    def __init__(self, settings: Settings, *, run_name: str, folder: Path) -> None:
        self._trackers: dict[str, Any] = {}
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

        def open_one(name: str) -> None:
            tracker = classes[name]()
            tracker.start()
            tracker.store_init_configuration(config)
            self._trackers[name] = tracker

        for name in settings.tracker:
            self._attempt(name, partial(open_one, name))

    def log(self, metrics: Metrics) -> None:
        values = {k: v for k, v in metrics.to_dict().items() if v is not None and k != "step"}
        for name, tracker in list(self._trackers.items()):
            self._attempt(name, partial(tracker.log, values, step=metrics.step))

    def close(self) -> None:
        for name, tracker in list(self._trackers.items()):
            self._attempt(name, tracker.finish)

    def _attempt(self, name: str, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 whatever its package raises
            self._trackers.pop(name, None)
            why = _CREDENTIALS.sub("://", " ".join(f"{type(error).__name__}: {error}".split()))[:300]
            print(f"tracker {name} gets nothing more of this run: {why}", file=sys.stderr, flush=True)


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
