"""A thread that repeats its work like the agents of a cluster and survives an outage of the API server."""

from __future__ import annotations

import threading
import traceback
from abc import ABC, abstractmethod
from pathlib import Path

import requests

from tests.lab.api import ApiError

_PAUSE_S = 0.5


class Agent(ABC):
    """Repeats :meth:`turn` until the ``with`` block ends. Its errors are in ``problems``."""

    def __init__(self, name: str, log: Path) -> None:
        self.name, self.problems = name, list[str]()
        self._log = log
        self._ending = threading.Event()
        self._reconcile_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def reconcile(self) -> None:
        """Read the state from the API server and act on it."""

    def __enter__(self) -> Agent:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(60)

    def pause(self) -> None:
        """Stop turns until :meth:`go_on`; a running one is finished when this returns."""
        self._reconcile_lock.acquire()

    def go_on(self) -> None:
        self._reconcile_lock.release()

    def write_log(self, text: str) -> None:
        with self._log.open("a") as log:
            log.write(f"{self.name}: {text}\n")

    def _run(self) -> None:
        while not self._ending.wait(_PAUSE_S):
            self._reconcile_safely()

    def _reconcile_safely(self) -> None:
        try:
            with self._reconcile_lock:
                self.reconcile()
        except requests.RequestException as error:
            self.write_log(f"the API server cannot be reached: {error}")
        except ApiError as error:
            self.write_log(str(error))
            if error.status not in (404, 409) and error.status < 500:  # gone or changed since it was read
                self.problems.append(f"{self.name}: {error}")
        except Exception:  # noqa: BLE001 - the thread must go on; the test looks at the problems
            self.write_log(traceback.format_exc())
            self.problems.append(f"{self.name}: {traceback.format_exc()}")
