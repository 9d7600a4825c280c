"""The catalogue of GPUs and machines: the shipped tables, refreshed prices, and the user's own rows.

To add a GPU or a machine for everybody, add a row to ``data/gpus.csv`` or ``data/instances.csv``; for
oneself, a CSV named by FINETUNE_HARDWARE or ``--hardware`` (docs/hardware.md). Blank in a table is None here.
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
VARIABLE = "FINETUNE_HARDWARE"  # files of one's own, separated as in PATH

_chosen: ContextVar[Catalogue | None] = ContextVar("catalogue", default=None)


def catalogue(extra: Path | None = None) -> Catalogue:
    """The shipped tables, under the refreshed prices, the files of FINETUNE_HARDWARE and the file ``extra``.

    Later ones win, cell by cell. Raises UserError for a file that cannot be read or a value that cannot be
    right.
    """
    files = os.environ.get(VARIABLE, "")
    if extra is None:
        return _cached(files, os.environ.get("XDG_CACHE_HOME"), os.environ.get("HOME"))
    return _load((*_files(files), extra))


def current() -> Catalogue:
    """The catalogue in use: that of the innermost :func:`using`, else the default one."""
    return _chosen.get() or catalogue()


@contextmanager
def using(chosen: Catalogue) -> Iterator[Catalogue]:
    """Inside this context ``gpu``, ``instances`` and this package's other functions read ``chosen``."""
    token = _chosen.set(chosen)
    try:
        yield chosen
    finally:
        _chosen.reset(token)


def forget() -> None:
    """Drop the default catalogue, so that its files are read again when it is next needed."""
    _cached.cache_clear()


def gpu(name: str) -> Gpu:
    """The one GPU of that name; raises UserError for a name of several or none, with the possible ones."""
    return current().gpu(name)


def gpus_called(name: str) -> tuple[Gpu, ...]:
    """All GPUs that a name stands for ("A100": four); raises UserError with the nearest names for none."""
    return current().gpus_called(name)


def find_gpu_by_nvml_name(name: str) -> Gpu | None:
    """The GPU that a driver or a node label calls ``name``; None where the catalogue has none."""
    return current().find_gpu(name)


def gpus() -> tuple[Gpu, ...]:
    """All GPUs of the catalogue in use."""
    return current().gpus


def instances() -> tuple[Instance, ...]:
    """All machine types of the catalogue in use; their GPUs by the GPU table's names."""
    return current().instances


def instance(name: str) -> Instance:
    """The machine type of that name; raises UserError with the nearest names."""
    return current().instance(name)


def clouds() -> tuple[str, ...]:
    """The clouds that have a machine in the catalogue in use."""
    return current().clouds()


def old_prices(names: Iterable[str], today: date | None = None) -> str:
    """One line where the prices of these machine types are older than 60 days, by the oldest; else "".

    Prices without a day, such as those of a table of one's own, are taken as they are.
    """
    found = filter(None, map(current().find_instance, dict.fromkeys(names)))
    ages = [(age, item) for item in found if (age := item.price_age_days(today or date.today())) is not None]
    age, item = max(ages, key=lambda each: each[0], default=(0, None))
    if item is None or age <= OLD_DAYS:
        return ""
    return f"Prices of {item.price_date} are {age} days old: `finetune gpus --refresh` asks for today's."


def _files(text: str) -> tuple[Path, ...]:
    return tuple(Path(name).expanduser() for name in text.split(os.pathsep) if name.strip())


@lru_cache(maxsize=4)
def _cached(files: str, *_place_of_prices: str | None) -> Catalogue:
    return _load(_files(files))


def _load(files: tuple[Path, ...]) -> Catalogue:
    merged = tables.shipped(DATA)
    warnings = cache.overlay(merged, cache.path())
    for file in files:
        tables.overlay(merged, file)
    return tables.build(merged, warnings)
