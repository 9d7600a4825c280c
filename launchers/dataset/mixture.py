"""Several datasets in one run, each by its weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from launchers.dataset.preferences import Sample
from launchers.dataset.seeding import random_stream
from launchers.dataset.stored import Selected, sources_of
from launchers.settings import Settings

if TYPE_CHECKING:  # a tenth of a second to import; the flow's processes need the names only
    import numpy as np
    from numpy.typing import NDArray


def names(settings: Settings) -> tuple[str, ...]:
    """The datasets of a run: ``dataset``, then those of ``mixture``. A row's ``source`` is a place in it."""
    return settings.dataset, *settings.mixture


def weighted(train: Sequence[Sample], settings: Settings) -> Sequence[Sample]:
    """The rows that an epoch has: of each dataset all, as often as the whole part of its weight says, and a
    drawn part for what is left of it.

    Held-out rows have to be taken away before. What is drawn depends on the seed alone; each epoch has it.
    """
    return Selected(train, weighted_places(sources_of(train), settings))


def weighted_places(sources: NDArray[np.integer], settings: Settings) -> NDArray[np.int64]:
    """Which rows :func:`weighted` takes, of rows that are of these datasets."""
    import numpy as np

    chosen: list[NDArray[np.int64]] = []
    for source, weight in enumerate((1.0, *settings.mixture.values())):
        rows = np.flatnonzero(sources == source)
        times = int(weight)
        count = round((weight - times) * len(rows))
        chosen += [rows] * times
        if count:
            drawn = random_stream(settings.seed, "mixture", source).permutation(len(rows))[:count]
            chosen.append(rows[np.sort(drawn)])
    return np.concatenate(chosen)


def summary(train: Sequence[Sample], settings: Settings) -> str:
    """A line for each dataset of several: how many rows of it an epoch has. ``train``: weighted."""
    sources = sources_of(train)
    lines = []
    for source, name in enumerate(names(settings)):
        count = int((sources == source).sum())
        lines.append(f"{name}: weight {settings.mixture.get(name, 1.0):g}, {count:,} rows an epoch")
    return "\n".join(lines)
