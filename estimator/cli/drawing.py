"""Memory bars in a terminal: colours where there are enough of them, letters where there are not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from estimator.charts import FARTHEST_CAPACITY, Bar, Chart, look
from estimator.cli.output import gib

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_BLOCKS = {"solid": "█", "hatched": "▒", "dotted": "░"}
FINE = ("256", "truecolor")  # terminals with fewer colours would show some of them as one
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def bar_of(category: str, size: int, largest: int, width: int) -> Text:
    """One category's bar in its colour."""
    from rich.text import Text

    colour, pattern = look(category, (category,))
    length = max(round(width * size / largest), 1) if size else 0
    return Text(_BLOCKS[pattern] * length, style=colour)


def stacked(chart: Chart, console: Console) -> Iterator[Text]:
    """The chart's lines: capacity, a stacked bar for each configuration, the legend."""
    from rich.text import Text

    colours = console.color_system in FINE
    names = max(len(bar.name) for bar in chart.bars)
    endings = [_ending(bar, chart.capacity_bytes) for bar in chart.bars]
    width = max(console.width - names - 3 - max(len(ending) for ending in endings), 20)
    longest = max(max(bar.upper_bytes, bar.likely_bytes) for bar in chart.bars)
    capacity = chart.capacity_bytes
    shown = capacity if capacity is not None and capacity <= FARTHEST_CAPACITY * longest else None
    end = max(longest, shown or 0)
    if shown is not None:
        label = f"{chart.capacity_name} {gib(shown)}"
        column = names + 2 + round((width - 1) * shown / end)
        yield Text(f"{label:>{column - 1}} ▼" if len(label) < column else f"{'':{column}}▼ {label}")
    for bar, ending in zip(chart.bars, endings, strict=True):
        line = Text(f"{bar.name:>{names}}  ")
        line.append_text(_cells(bar, chart.categories, width, end, shown, colours))
        line.append(f" {ending}")
        yield line
    yield Text("")
    yield from _legend(chart.categories, console.width, colours)


def _ending(bar: Bar, capacity: int | None) -> str:
    """What stands behind a bar."""
    text = f"{gib(bar.likely_bytes)}, up to {gib(bar.upper_bytes)}"
    return text + (", too much" if capacity is not None and bar.upper_bytes > capacity else "")


def _cells(
    bar: Bar, categories: Sequence[str], width: int, end: int, capacity: int | None, colours: bool
) -> Text:
    """One bar: each category's share of the columns, a line up to the upper bound, the capacity."""
    from rich.text import Text

    marks: list[tuple[str, str]] = []
    sizes, total = dict(bar.parts), 0
    for number, name in enumerate(categories):
        total += sizes.get(name, 0)
        until = round((width - 1) * total / end)
        colour, pattern = look(name, categories)
        mark = _BLOCKS[pattern] if colours else _LETTERS[number % len(_LETTERS)]
        marks += [(mark, colour)] * (until - len(marks))
    upper = round((width - 1) * bar.upper_bytes / end)
    marks += [("─", "")] * (upper - len(marks))
    marks += [(" ", "")] * (width - len(marks))
    marks[min(upper, width - 1)] = ("┤", "")
    if capacity is not None:
        marks[round((width - 1) * capacity / end)] = ("┃", "bold")
    text = Text()
    for (mark, style), run in groupby(marks):
        text.append(mark * len(list(run)), style=style if colours else "")
    return text


def _legend(categories: Sequence[str], width: int, colours: bool) -> Iterator[Text]:
    from rich.text import Text

    column = max(len(name) for name in categories) + 4
    across = max(width // column, 1)
    line = Text()
    for number, name in enumerate(categories):
        colour, pattern = look(name, categories)
        mark = _BLOCKS[pattern] * 2 if colours else _LETTERS[number % len(_LETTERS)] + " "
        line.append(mark, style=colour if colours else "")
        line.append(f" {name}".ljust(column - 2))
        if number % across == across - 1 or number == len(categories) - 1:
            line.rstrip()
            yield line
            line = Text()
