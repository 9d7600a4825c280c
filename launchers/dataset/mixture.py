"""Mixture of several datasets in one run, with weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from launchers.dataset.preferences import Sample
from launchers.dataset.seeding import random_stream
from launchers.dataset.stored import Selected, sources_of
from launchers.settings import Settings

if TYPE_CHECKING:  # takes a tenth of a second to import; the flow's processes need only the names
    import numpy as np
    from numpy.typing import NDArray


def names(settings: Settings) -> tuple[str, ...]:
    """Return the names of a run's datasets, ``dataset`` first; a row's ``source`` is an index into them."""
    return settings.dataset, *settings.mixture


def weighted(train: Sequence[Sample], settings: Settings) -> Sequence[Sample]:
    """Select the rows of an epoch by the weights of their datasets.

    A dataset's rows are repeated by the integer part of its weight; for the fraction, a random subset is
    added. The selection depends only on the seed, and is the same in each epoch. ``train``: rows without the
    held-out ones.
    """
    return Selected(train, weighted_indices(sources_of(train), settings))


def weighted_indices(sources: NDArray[np.integer], settings: Settings) -> NDArray[np.int64]:
    """Return the row indices that :func:`weighted` selects. ``sources``: index of each row's dataset."""
    import numpy as np

    selected_indices: list[NDArray[np.int64]] = []
    for source, weight in enumerate((1.0, *settings.mixture.values())):
        rows = np.flatnonzero(sources == source)
        times = int(weight)
        count = round((weight - times) * len(rows))
        selected_indices += [rows] * times
        if count:
            selected = random_stream(settings.seed, "mixture", source).permutation(len(rows))[:count]
            selected_indices.append(rows[np.sort(selected)])
    return np.concatenate(selected_indices)


def summary(train: Sequence[Sample], settings: Settings) -> str:
    """Summarize the weighted rows per epoch of each dataset, in one line each."""
    sources = sources_of(train)
    lines = []
    for source, name in enumerate(names(settings)):
        count = int((sources == source).sum())
        lines.append(f"{name}: weight {settings.mixture.get(name, 1.0):g}, {count:,} rows an epoch")
    return "\n".join(lines)
