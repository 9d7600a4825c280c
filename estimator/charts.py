"""Memory charts of ``finetune estimate``: stacked bars in a terminal or as SVG.

No chart library: their SVG has fixed colors, and a page with a renderer has megabytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from estimator.formatting import GIB, format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

# Okabe and Ito 2008, Color Universal Design: colors that are distinct for any color vision. A grey that
# differs enough from the purple replaces their black, which is the color of text. When the colors are used
# up, they are repeated hatched, then dotted.
OKABE_ITO = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#666666")
PATTERNS = ("solid", "hatched", "dotted")
ORDER = (  # adjacent categories have colors that differ strongly
    "weights",
    "master weights",
    "adapters",
    "reference model",
    "gradients",
    "optimizer",
    "activations",
    "logits and loss",
    "communication buffers",
    "optimizer temporaries",
    "quantization overhead",
    "runtime",
    "allocator",
    "calibration",
    "reward model",
    "KV cache",
    "average of the weights",
    "VAE and text encoders",
    "text encoders",
    "vision tower",
)
MAX_CAPACITY_RATIO = 4  # capacity / longest bar: above, bars would be too short to read

_BLOCKS = {"solid": "█", "hatched": "▒", "dotted": "░"}
_FINE = ("256", "truecolor")  # terminals with fewer colors would show some of them as equal
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_WIDTH, _LEFT, _RIGHT, _BAR, _GAP, _TOP = 960, 150, 24, 30, 16, 44


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """Memory of one process in one configuration, in bytes: needed, by category, and shown by nvidia-smi."""

    name: str
    parts: tuple[tuple[str, int], ...]
    upper_bytes: int  # upper end of the needed memory
    shows_bytes: int

    @property
    def needs_bytes(self) -> int:
        """Sum of the categories."""
        return sum(size for _, size in self.parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Bars of several configurations, with the capacity of the GPU if it is known."""

    title: str
    subtitle: str
    bars: tuple[Bar, ...]
    capacity_bytes: int | None = None
    capacity_name: str = ""
    notes: tuple[str, ...] = ()

    @property
    def categories(self) -> tuple[str, ...]:
        """All categories of the bars, in drawing order."""
        return ordered(name for bar in self.bars for name, _ in bar.parts)

    @property
    def longest_bytes(self) -> int:
        """Upper end of the longest bar, in bytes."""
        return max(max(bar.upper_bytes, bar.needs_bytes) for bar in self.bars)

    @property
    def shown_capacity_bytes(self) -> int | None:
        """Capacity, or None if bars next to it would be too short to read."""
        capacity = self.capacity_bytes
        is_in_range = capacity is not None and capacity <= MAX_CAPACITY_RATIO * self.longest_bytes
        return capacity if is_in_range else None


def ordered(names: object) -> tuple[str, ...]:
    """Sort categories: known ones in ORDER, then the others in their original order, without duplicates."""
    unique = list(dict.fromkeys(names))  # type: ignore[call-overload]
    return tuple(name for name in ORDER if name in unique) + tuple(n for n in unique if n not in ORDER)


def appearance(category: str, categories: Sequence[str] = ()) -> tuple[str, str]:
    """Return (color, pattern) of a category: fixed for known ones, by position for others."""
    if category in ORDER:
        place = ORDER.index(category)
    else:
        place = len(ORDER) + [name for name in categories if name not in ORDER].index(category)
    return OKABE_ITO[place % len(OKABE_ITO)], PATTERNS[place // len(OKABE_ITO) % len(PATTERNS)]


def svg(chart: Chart) -> str:
    """Draw the chart as a standalone SVG that follows the light or dark mode of the reader."""
    capacity = chart.shown_capacity_bytes
    end = 1.04 * max(chart.longest_bytes, capacity or 0)
    scale = (_WIDTH - _LEFT - _RIGHT) / end
    bottom = _TOP + len(chart.bars) * (_BAR + _GAP)
    legend, legend_height = _legend(chart.categories, bottom + 44)
    height = bottom + 44 + legend_height
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'width="{_WIDTH}" height="{height}" aria-labelledby="title desc">',
        f'<title id="title">{escape(chart.title)}</title>',
        f'<desc id="desc">{escape(describe(chart))}</desc>',
        _STYLE,
        _definitions(chart.categories),
        *_axis(end, scale, bottom),
    ]
    for number, bar in enumerate(chart.bars):
        parts += _bar(bar, chart.categories, _TOP + number * (_BAR + _GAP), scale)
    if capacity is not None:
        parts += _capacity(capacity, chart.capacity_name, scale, bottom)
    return "\n".join([*parts, *legend, "</svg>"]) + "\n"


def describe(chart: Chart) -> str:
    """Describe the chart as text, for screen readers."""
    bars = "; ".join(
        f"{bar.name}: needs {format_bytes(bar.needs_bytes)}, up to {format_bytes(bar.upper_bytes)}; "
        f"shows {format_bytes(bar.shows_bytes)}"
        for bar in chart.bars
    )
    capacity = chart.capacity_bytes
    return f"{chart.subtitle}. {bars}." + (
        f" {chart.capacity_name} has {format_bytes(capacity)}." if capacity is not None else ""
    )


# ---------------------------------------------------------------------------------------------------------
# In a terminal


def bar_of(category: str, size: int, largest: int, width: int) -> Text:
    """Format the bar of one category in its color."""
    from rich.text import Text

    color, pattern = appearance(category, (category,))
    length = max(round(width * size / largest), 1) if size else 0
    return Text(_BLOCKS[pattern] * length, style=color)


def stacked(chart: Chart, console: Console) -> Iterator[Text]:
    """Yield the lines of the chart: capacity, one stacked bar per configuration, legend."""
    from rich.text import Text

    colors = console.color_system in _FINE
    names = max(len(bar.name) for bar in chart.bars)
    endings = [_bar_label(bar, chart.capacity_bytes) for bar in chart.bars]
    width = max(console.width - names - 3 - max(len(ending) for ending in endings), 20)
    capacity = chart.shown_capacity_bytes
    end = max(chart.longest_bytes, capacity or 0)
    if capacity is not None:
        label = f"{chart.capacity_name} {format_bytes(capacity)}"
        column = names + 2 + round((width - 1) * capacity / end)
        yield Text(f"{label:>{column - 1}} ▼" if len(label) < column else f"{'':{column}}▼ {label}")
    for bar, ending in zip(chart.bars, endings, strict=True):
        line = Text(f"{bar.name:>{names}}  ")
        line.append_text(_cells(bar, chart.categories, width, end, capacity, colors))
        line.append(f" {ending}")
        yield line
    yield Text("")
    yield from _legend_lines(chart.categories, console.width, colors)


def _bar_label(bar: Bar, capacity: int | None) -> str:
    """Format the label of a bar: needed memory, its upper end, and whether it exceeds the GPU."""
    text = f"{format_bytes(bar.needs_bytes)}, up to {format_bytes(bar.upper_bytes)}"
    return text + (", too much" if capacity is not None and bar.needs_bytes > capacity else "")


def _cells(
    bar: Bar, categories: Sequence[str], width: int, end: int, capacity: int | None, colors: bool
) -> Text:
    """Draw one bar: columns by category, a line up to the upper end, and the capacity."""
    from rich.text import Text

    marks: list[tuple[str, str]] = []
    sizes, total = dict(bar.parts), 0
    for number, name in enumerate(categories):
        total += sizes.get(name, 0)
        end_column = round((width - 1) * total / end)
        color, pattern = appearance(name, categories)
        mark = _BLOCKS[pattern] if colors else _LETTERS[number % len(_LETTERS)]
        marks += [(mark, color)] * (end_column - len(marks))
    upper = round((width - 1) * bar.upper_bytes / end)
    marks += [("─", "")] * (upper - len(marks))
    marks += [(" ", "")] * (width - len(marks))
    marks[min(upper, width - 1)] = ("┤", "")
    if capacity is not None:
        marks[round((width - 1) * capacity / end)] = ("┃", "bold")
    text = Text()
    for (mark, style), run in groupby(marks):
        text.append(mark * len(list(run)), style=style if colors else "")
    return text


def _legend_lines(categories: Sequence[str], width: int, colors: bool) -> Iterator[Text]:
    from rich.text import Text

    column = max(len(name) for name in categories) + 4
    across = max(width // column, 1)
    line = Text()
    for number, name in enumerate(categories):
        color, pattern = appearance(name, categories)
        mark = _BLOCKS[pattern] * 2 if colors else _LETTERS[number % len(_LETTERS)] + " "
        line.append(mark, style=color if colors else "")
        line.append(f" {name}".ljust(column - 2))
        if number % across == across - 1 or number == len(categories) - 1:
            line.rstrip()
            yield line
            line = Text()


# ---------------------------------------------------------------------------------------------------------
# Parts of the SVG drawing

_STYLE = """<style>
  text { font: 13px system-ui, sans-serif; fill: #1f2328; }
  .small { font-size: 11px; fill: #59636e; }
  .grid { stroke: #d1d9e0; stroke-width: 1; }
  .upper { stroke: #1f2328; stroke-width: 1.5; fill: none; }
  .capacity { stroke: #1f2328; stroke-width: 2; stroke-dasharray: 6 4; }
  .part { stroke: #ffffff; stroke-width: 1; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; }
    .small { fill: #9198a1; }
    .grid { stroke: #3d444d; }
    .upper, .capacity { stroke: #f0f6fc; }
    .part { stroke: #0d1117; }
  }
</style>"""


def _definitions(categories: Sequence[str]) -> str:
    """Format the fill patterns: hatched and dotted variants of the colors, where they repeat."""
    patterns = []
    for number, name in enumerate(categories):
        color, pattern = appearance(name, categories)
        if pattern == "hatched":
            mark = '<path d="M0 8L8 0" stroke="#000" stroke-width="1.6"/>'
        elif pattern == "dotted":
            mark = '<circle cx="4" cy="4" r="1.6" fill="#000"/>'
        else:
            continue
        patterns.append(
            f'<pattern id="fill{number}" width="8" height="8" patternUnits="userSpaceOnUse">'
            f'<rect width="8" height="8" fill="{color}"/>{mark}</pattern>'
        )
    return f"<defs>{''.join(patterns)}</defs>"


def _fill(name: str, categories: Sequence[str]) -> str:
    color, pattern = appearance(name, categories)
    return color if pattern == "solid" else f"url(#fill{categories.index(name)})"


def _axis(end: float, scale: float, bottom: int) -> list[str]:
    step = _tick(end / GIB)
    lines, tick = [], 0.0
    while tick <= end / GIB:
        x = _LEFT + tick * GIB * scale
        lines.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 8}" y2="{bottom}"/>')
        lines.append(
            f'<text class="small" x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{tick:g}</text>'
        )
        tick = round(tick + step, 6)
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    lines.append(f'<text class="small" x="{middle}" y="{bottom + 30}" text-anchor="middle">GiB</text>')
    return lines


def _tick(span: float) -> float:
    """Return the tick spacing, 1, 2 or 5 times a power of ten, for five to twelve ticks."""
    step = 10.0**-3
    while True:
        for factor in (1, 2, 5):
            if span / (step * factor) <= 12:
                return step * factor
        step *= 10


def _bar(bar: Bar, categories: Sequence[str], top: int, scale: float) -> list[str]:
    sizes, x = dict(bar.parts), float(_LEFT)
    middle = top + _BAR / 2 + 4
    lines = [f'<text x="{_LEFT - 8}" y="{middle}" text-anchor="end">{escape(bar.name)}</text>']
    for name in categories:
        size = sizes.get(name, 0)
        if not size:
            continue
        width = size * scale
        label = f"{bar.name}: {name} {format_bytes(size)}"
        lines.append(
            f'<rect class="part" x="{x:.2f}" y="{top}" width="{width:.2f}" height="{_BAR}" '
            f'fill="{_fill(name, categories)}"><title>{escape(label)}</title></rect>'
        )
        x += width
    upper = _LEFT + bar.upper_bytes * scale
    y = top + _BAR / 2
    lines.append(
        f'<path class="upper" d="M{x:.1f} {y}H{upper:.1f}M{upper:.1f} {top + 6}V{top + _BAR - 6}">'
        f"<title>{escape(bar.name)}: up to {format_bytes(bar.upper_bytes)}</title></path>"
    )
    return lines


def _capacity(capacity: int, name: str, scale: float, bottom: int) -> list[str]:
    x = _LEFT + capacity * scale
    text = f"{name} {format_bytes(capacity)}".strip()
    return [
        f'<line class="capacity" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 12}" y2="{bottom}"/>',
        f'<text x="{x:.1f}" y="{_TOP - 18}" text-anchor="end">{escape(text)}</text>',
    ]


def _legend(categories: Sequence[str], top: int) -> tuple[list[str], int]:
    """Return the SVG lines of the legend, four entries per row, and its height."""
    lines, column = [], (_WIDTH - 40) // 4
    for number, name in enumerate(categories):
        x, y = 20 + number % 4 * column, top + number // 4 * 24
        lines.append(
            f'<rect class="part" x="{x}" y="{y}" width="16" height="16" fill="{_fill(name, categories)}"/>'
            f'<text x="{x + 24}" y="{y + 13}">{escape(name)}</text>'
        )
    return lines, 24 * -(-len(categories) // 4) + 8
