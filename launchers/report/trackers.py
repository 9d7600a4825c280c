"""Experiment trackers: each step's metrics to TensorBoard, Weights & Biases or MLflow.

They run in the task of node 0, beside the training processes, so both engines feed them alike. The
writers are accelerate's (accelerate.tracking), imported only when a tracker is asked for.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from estimator.errors import Change, UserError
from launchers.settings import Settings

_CREDENTIALS = re.compile(r"://[^/@\s]*@")  # in the address of a server
CLOSE_S = 60.0
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


def check_installed(names: Sequence[str]) -> None:
    """Raise UserError for a tracker whose package is not there."""
    for name in names:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise UserError(
                (Change("tracker", name), f": the package {PACKAGES[name]} is not installed."),
                f"pip install {PACKAGES[name]}",
            )


class Trackers:
    """Opens the asked-for trackers; where none are, every call does nothing.

    A tracker that fails is named once and left out: the run's own metrics are kept anyway, and no GPU is
    given up for a server that doesn't answer. Each has a thread of its own, as one that hangs must hold up
    neither the run nor the others.
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
        """Hand a step's figures to every tracker; each has a thread that sends, so this never waits."""
        for tracker in self._trackers:
            tracker.log(figures, step)

    def close(self) -> None:
        """Wait until they have got everything, for CLOSE_S at most."""
        deadline = time.monotonic() + CLOSE_S
        for tracker in self._trackers:
            tracker.close()
        for tracker in self._trackers:
            tracker.wait(max(0.0, deadline - time.monotonic()))


class _Tracker:
    """One tracker and its thread, which alone touches it (MLflow keeps the active run by thread)."""

    def __init__(self, name: str, make: Callable[[], Any], config: dict[str, Any]) -> None:
        self._name = name
        self._rows: SimpleQueue[tuple[dict[str, Any], int] | None] = SimpleQueue()
        self._thread = Thread(target=self._serve, args=(make, config), name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, values: dict[str, Any], step: int) -> None:
        if self._thread.is_alive():
            self._rows.put((values, step))

    def close(self) -> None:
        self._rows.put(None)

    def wait(self, limit_s: float) -> None:
        self._thread.join(limit_s)
        if self._thread.is_alive():
            self._say(f"did not take all of this run within {CLOSE_S:g} s after its end")

    def _serve(self, make: Callable[[], Any], config: dict[str, Any]) -> None:
        try:
            tracker = make()
            tracker.start()
            tracker.store_init_configuration(config)
            while (row := self._rows.get()) is not None:
                values, step = row
                tracker.log(values, step=step)
            tracker.finish()
        except Exception as error:  # noqa: BLE001 whatever its package raises
            why = _CREDENTIALS.sub("://", " ".join(f"{type(error).__name__}: {error}".split()))[:300]
            self._say(f"gets nothing more of this run: {why}")

    def _say(self, what: str) -> None:
        print(f"tracker {self._name} {what}", file=sys.stderr, flush=True)


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
