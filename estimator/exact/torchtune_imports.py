"""Import torchtune 0.6.1 next to current releases of torchao, and without loading ``datasets``.

torchtune imports names that torchao has moved or removed since 0.15:

- ``torchao.dtypes.nf4tensor`` is ``torchao.quantization.quantize_.workflows.nf4.nf4_tensor`` in torchao 0.18.
  The module is registered under its old name too; classes and functions are the same objects.
- ``torchtune.training.quantization`` needs quantization-aware training of torchao 0.15. No recipe used here
  calls it, so a placeholder module provides the one name that ``torchtune.training`` imports.

torchtune's dataset builders import ``datasets``, and with it pandas and pyarrow: 0.6 of 4.0 CPU seconds and
95 MB per process (torchtune 0.6.1, datasets 5.0, pandas 3.0). They get functions that import it when called.

This module lives in the lowest layer because exact mode and the torchtune engine both import torchtune. As a
program it runs one of torchtune's own recipes: a path, and the recipe's arguments.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

# What torchtune 0.6.1 imports from the package `datasets`: datasets/_sft.py and others, data/_utils.py
_DATASETS_NAMES = {"datasets": "load_dataset", "datasets.distributed": "split_dataset_by_node"}
_NF4_OLD = "torchao.dtypes.nf4tensor"
_NF4 = "torchao.quantization.quantize_.workflows.nf4.nf4_tensor"
_QUANTIZATION = "torchtune.training.quantization"


@contextmanager
def torchtune_imports() -> Iterator[None]:
    """Context in which ``import torchtune`` works; all first imports of torchtune are made inside one."""
    _alias_nf4()
    sys.modules.setdefault(_QUANTIZATION, _quantization_placeholder())
    with _deferred_datasets():
        yield


def _alias_nf4() -> None:
    if _NF4_OLD not in sys.modules:
        with _no_log_messages():
            module = importlib.import_module(_NF4)
        sys.modules[_NF4_OLD] = module
        setattr(importlib.import_module("torchao.dtypes"), "nf4tensor", module)  # noqa: B010 - mypy


@contextmanager
def _no_log_messages() -> Iterator[None]:
    """Suppress torchao's messages about its GPU kernels, which do not load on a CPU build of torch."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(previous)


def _quantization_placeholder() -> ModuleType:
    module = ModuleType(_QUANTIZATION)

    def get_quantizer_mode(quantizer: object) -> None:
        """Return None for no quantizer, as torchtune does; raise NotImplementedError for any other value."""
        if quantizer is not None:
            raise NotImplementedError("torchtune's quantizers need torchao 0.15")

    module.get_quantizer_mode = get_quantizer_mode  # type: ignore[attr-defined]
    return module


@contextmanager
def _deferred_datasets() -> Iterator[None]:
    """Context in which ``datasets`` resolves to functions that import the real package when called."""
    spec = importlib.util.find_spec("datasets") if "datasets" not in sys.modules else None
    if spec is None:
        yield
        return
    for module, name in _DATASETS_NAMES.items():
        placeholder = ModuleType(module)
        placeholder.__spec__ = spec
        placeholder.__path__ = []
        setattr(placeholder, name, _deferred(module, name))
        sys.modules[module] = placeholder
    try:
        yield
    finally:
        for module in _DATASETS_NAMES:
            del sys.modules[module]


def _deferred(module: str, name: str) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*arguments, **options)

    call.__name__ = name
    return call


def main() -> None:
    """Run the recipe whose path is the first argument, with the other arguments as its own."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m estimator.exact.torchtune_imports RECIPE.py --config CONFIG.yaml")
    sys.argv = sys.argv[1:]
    with torchtune_imports():
        importlib.import_module("torchtune.training")
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
