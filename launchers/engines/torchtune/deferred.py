"""torchtune without the package ``datasets`` until a dataset is loaded through it, which no run here does.

torchtune's own loaders import it, and with it pandas and pyarrow: 0.6 of the 4.0 CPU seconds that torchtune
takes to import, and 95 MB of every rank's memory (torchtune 0.6.1, datasets 5.0, pandas 3.0).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

# What torchtune 0.6.1 takes from it: datasets/_sft.py and others, data/_utils.py
_NAMES = {"datasets": "load_dataset", "datasets.distributed": "split_dataset_by_node"}


@contextmanager
def deferred_datasets() -> Iterator[None]:
    """While it lasts, importing ``datasets`` gives functions that import the package when they are called."""
    spec = importlib.util.find_spec("datasets")
    if spec is None or "datasets" in sys.modules:
        yield
        return
    for module, name in _NAMES.items():
        stand_in = ModuleType(module)
        stand_in.__spec__ = spec
        stand_in.__path__ = []
        setattr(stand_in, name, _deferred(module, name))
        sys.modules[module] = stand_in
    try:
        yield
    finally:
        for module in _NAMES:
            del sys.modules[module]


def _deferred(module: str, name: str) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*arguments, **options)

    call.__name__ = name
    return call
