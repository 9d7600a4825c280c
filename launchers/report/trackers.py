"""Experiment trackers: send the metrics of every step to TensorBoard, Weights & Biases or MLflow.

Trackers run in the task of node 0, outside the training processes, so they work with every engine. The
clients are accelerate's (accelerate.tracking), imported only if a tracker is requested.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from estimator.errors import UserError
from estimator.masking import mask_secrets
from estimator.terminal import print
from launchers.settings import Settings

CLOSE_S = 60.0
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


def check_installed(names: Sequence[str]) -> None:
    """Raise UserError for a tracker whose package is not installed."""
    for name in names:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise UserError(
                f"--tracker {name}: the package {PACKAGES[name]} is not installed.",
                f"pip install {PACKAGES[name]}",
            )


class Trackers:
    """All trackers of a run; without any, the methods do nothing.

    A tracker that fails is reported once and disabled: metrics are also stored elsewhere, and a server that
    does not respond must not stop the run. Each tracker has a thread, because one that hangs must delay
    neither the run nor the other trackers.
    """

    def __init__(self, settings: Settings, *, run_name: str, folder: Path) -> None:
        self._trackers: list[_Tracker] = []
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
        self._trackers = [_Tracker(name, classes[name], config) for name in settings.tracker]

    def log(self, step: int, figures: dict[str, float]) -> None:
        """Queue the figures of a step for every tracker, without waiting."""
        for tracker in self._trackers:
            tracker.log(figures, step)

    def close(self) -> None:
        """Wait until the trackers have sent everything, at most CLOSE_S seconds."""
        deadline = time.monotonic() + CLOSE_S
        for tracker in self._trackers:
            tracker.close()
        for tracker in self._trackers:
            tracker.wait(max(0.0, deadline - time.monotonic()))


class _Tracker:
    """Tracker that is used only in a dedicated thread (MLflow's active run is per thread)."""

    def __init__(self, name: str, create: Callable[[], Any], config: dict[str, Any]) -> None:
        self._name = name
        self._rows: SimpleQueue[tuple[dict[str, Any], int] | None] = SimpleQueue()
        self._thread = Thread(target=self._serve, args=(create, config), name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, values: dict[str, Any], step: int) -> None:
        if self._thread.is_alive():
            self._rows.put((values, step))

    def close(self) -> None:
        self._rows.put(None)

    def wait(self, limit_s: float) -> None:
        self._thread.join(limit_s)
        if self._thread.is_alive():
            self._print_message(f"did not receive all metrics within {CLOSE_S:g} s after the run's end")

    def _serve(self, create: Callable[[], Any], config: dict[str, Any]) -> None:
        """Run the tracker in its thread: create it, send queued rows, and finish it after the last one."""
        try:
            tracker = create()
            tracker.start()
            tracker.store_init_configuration(config)
            while (row := self._rows.get()) is not None:
                values, step = row
                tracker.log(values, step=step)
            tracker.finish()
        except Exception as error:  # noqa: BLE001 a tracker's package may raise anything
            reason = mask_secrets(" ".join(f"{type(error).__name__}: {error}".split()))[:300]
            self._print_message(f"failed and receives no more metrics of this run: {reason}")

    def _print_message(self, message: str) -> None:
        print(f"tracker {self._name} {message}", file=sys.stderr, flush=True)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to dotted names, with values that trackers support; None is omitted."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        elif isinstance(value, bool | int | float | str):
            flat[prefix + name] = value
        elif value is not None:
            flat[prefix + name] = str(value)
    return flat
