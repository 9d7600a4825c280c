"""Catalogue of GPUs and instance types: shipped tables, refreshed prices and files of the user.

To add a GPU or an instance type, add a row to ``data/gpus.csv`` or ``data/instances.csv``; for yourself only,
a CSV file named by FINETUNE_HARDWARE or ``--hardware`` (docs/hardware.md). Blank cells are None.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import date
from functools import lru_cache
from pathlib import Path

from estimator.hardware.catalogue import Catalogue, Gpu, Instance, tables
from estimator.hardware.prices import cache

__all__ = [
    "Catalogue",
    "Gpu",
    "Instance",
    "catalogue",
    "clouds",
    "current",
    "find_gpu_by_nvml_name",
    "forget",
    "gpu",
    "gpus",
    "gpus_called",
    "instance",
    "instances",
    "old_prices",
    "using",
]

DATA = Path(__file__).parents[1] / "data"
OLD_DAYS = 60  # clouds change spot prices within days, on-demand ones within months
VARIABLE = "FINETUNE_HARDWARE"  # the user's files, separated as in PATH

_chosen: ContextVar[Catalogue | None] = ContextVar("catalogue", default=None)


def catalogue(extra: Path | None = None) -> Catalogue:
    """Load the shipped tables, then the refreshed prices, the files of FINETUNE_HARDWARE and ``extra``.

    Later ones override cells of earlier ones. Raises UserError for an unreadable file or an invalid value.
    """
    files = os.environ.get(VARIABLE, "")
    if extra is None:
        return _cached(files, os.environ.get("XDG_CACHE_HOME"), os.environ.get("HOME"))
    return _load((*_files(files), extra))


def current() -> Catalogue:
    """Return the active catalogue: that of the innermost :func:`using`, otherwise the default one."""
    return _chosen.get() or catalogue()


@contextmanager
def using(chosen: Catalogue) -> Iterator[Catalogue]:
    """Context in which ``gpu``, ``instances`` and the other functions of this package use ``chosen``."""
    token = _chosen.set(chosen)
    try:
        yield chosen
    finally:
        _chosen.reset(token)


def clear_cache() -> None:
    """Clear the cached default catalogue, so that its files are read again."""
    _cached.cache_clear()


def gpu(name: str) -> Gpu:
    """Return the GPU of this name. Raises UserError with candidates for an unknown or ambiguous name."""
    return current().gpu(name)


def gpus_called(name: str) -> tuple[Gpu, ...]:
    """Return all GPUs that match a name ("A100": four). Raises UserError with similar names for none."""
    return current().gpus_called(name)


def find_gpu_by_nvml_name(name: str) -> Gpu | None:
    """Return the GPU with this name in a driver or node label, or None."""
    return current().find_gpu(name)


def gpus() -> tuple[Gpu, ...]:
    """Return all GPUs of the active catalogue."""
    return current().gpus


def instances() -> tuple[Instance, ...]:
    """Return all instance types of the active catalogue, with GPU names of the GPU table."""
    return current().instances


def instance(name: str) -> Instance:
    """Return the instance type of this name. Raises UserError with similar names for an unknown one."""
    return current().instance(name)


def clouds() -> tuple[str, ...]:
    """Return the clouds with an instance type in the active catalogue."""
    return current().clouds()


def old_prices(names: Iterable[str], today: date | None = None) -> str:
    """Return a warning if a price of these instance types is older than 60 days, otherwise "".

    Prices without a date, such as those in a file of the user, are not checked.
    """
    instances = filter(None, map(current().find_instance, dict.fromkeys(names)))
    ages = [
        (age, item) for item in instances if (age := item.price_age_days(today or date.today())) is not None
    ]
    age, item = max(ages, key=lambda pair: pair[0], default=(0, None))
    if item is None or age <= OLD_DAYS:
        return ""
    return f"Prices of {item.price_day} are {age} days old: `finetune gpus --refresh` updates them."


def _files(text: str) -> tuple[Path, ...]:
    return tuple(Path(name).expanduser() for name in text.split(os.pathsep) if name.strip())


@lru_cache(maxsize=4)
def _cached(files: str, *_cache_folder_variables: str | None) -> Catalogue:
    return _load(_files(files))


def _load(files: tuple[Path, ...]) -> Catalogue:
    merged = tables.shipped(DATA)
    warnings = cache.overlay(merged, cache.path())
    for file in files:
        tables.overlay(merged, file)
    return tables.build(merged, warnings)
