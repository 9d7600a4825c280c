"""Several datasets in one run, each by its weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from launchers.dataset.preferences import Sample
from launchers.dataset.rows import Conversation
from launchers.dataset.seeding import random_stream
from launchers.settings import Settings


def names(settings: Settings) -> tuple[str, ...]:
    """The datasets of a run: ``dataset``, then those of ``mixture``. A row's ``source`` is a place in it."""
    return settings.dataset, *settings.mixture


def of_source(samples: Sequence[Sample], source: int) -> list[Sample]:
    """The rows, marked as those of that dataset of the run."""
    return [
        replace(row, source=source) if isinstance(row, Conversation) else row.of_source(source)
        for row in samples
    ]


def weighted(train: Sequence[Sample], settings: Settings) -> list[Sample]:
    """The rows that an epoch has: of each dataset all, as often as the whole part of its weight says, and a
    drawn part for what is left of it.

    Held-out rows have to be taken away before. What is drawn depends on the seed alone; each epoch has it.
    """
    chosen: list[Sample] = []
    for source, weight in enumerate((1.0, *settings.mixture.values())):
        rows = [row for row in train if row.source == source]
        times = int(weight)
        count = round((weight - times) * len(rows))
        chosen += rows * times
        if count:
            drawn = random_stream(settings.seed, "mixture", source).permutation(len(rows))[:count]
            chosen += [rows[index] for index in sorted(drawn.tolist())]
    return chosen


def summary(train: Sequence[Sample], settings: Settings) -> str:
    """A line for each dataset of several: how many rows of it an epoch has. ``train``: weighted."""
    lines = []
    for source, name in enumerate(names(settings)):
        count = sum(row.source == source for row in train)
        lines.append(f"{name}: weight {settings.mixture.get(name, 1.0):g}, {count:,} rows an epoch")
    return "\n".join(lines)
