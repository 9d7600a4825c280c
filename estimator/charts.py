"""The memory bars as a drawing (SVG) and as a page (HTML): no network, no script, for light and dark.

A chart library's SVG has fixed colours; a page with its renderer weighs megabytes. Stacked bars need neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from estimator.plan import GIB

# Okabe and Ito 2008, Color Universal Design: colours that people with any colour vision tell apart. Their
# black is left to the text, and a grey that keeps its distance from the purple takes its place. A second
# round of them is hatched, a third dotted.
OKABE_ITO = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#666666")
PATTERNS = ("solid", "hatched", "dotted")
ORDER = (  # categories that stand beside each other take colours that are far apart
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
    "NF4 overhead",
    "runtime",
    "fragmentation",
    "calibration",
)
FARTHEST_CAPACITY = 4  # times the longest bar: beyond, the bars would be too short to read

_WIDTH, _LEFT, _RIGHT, _BAR, _GAP, _TOP = 960, 150, 24, 30, 16, 44


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One configuration's memory of one process, in bytes."""

    name: str
    parts: tuple[tuple[str, int], ...]
    upper_bytes: int

    @property
    def likely_bytes(self) -> int:
        return sum(size for _, size in self.parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Bars of one question, with the capacity that they have to keep below, where it is known."""

    title: str
    subtitle: str
    bars: tuple[Bar, ...]
    capacity_bytes: int | None = None
    capacity_name: str = ""
    notes: tuple[str, ...] = ()

    @property
    def categories(self) -> tuple[str, ...]:
        """All categories that some bar has, in the order in which they are drawn."""
        return ordered(name for bar in self.bars for name, _ in bar.parts)


def ordered(names: object) -> tuple[str, ...]:
    """Known categories in their order, then the others as they come; each once."""
    found = list(dict.fromkeys(names))  # type: ignore[call-overload]
    return tuple(name for name in ORDER if name in found) + tuple(n for n in found if n not in ORDER)


def look(category: str, categories: Sequence[str] = ()) -> tuple[str, str]:
    """(colour, pattern) of a category: a known one's never changes, another's follows from its place."""
    if category in ORDER:
        place = ORDER.index(category)
    else:
        place = len(ORDER) + [name for name in categories if name not in ORDER].index(category)
    return OKABE_ITO[place % len(OKABE_ITO)], PATTERNS[place // len(OKABE_ITO) % len(PATTERNS)]


def svg(chart: Chart) -> str:
    """A drawing that stands alone; its texts and lines follow the reader's light or dark."""
    longest = max(max(bar.upper_bytes, bar.likely_bytes) for bar in chart.bars)
    capacity = chart.capacity_bytes
    shown = capacity if capacity is not None and capacity <= FARTHEST_CAPACITY * longest else None
    end = 1.04 * max(longest, shown or 0)
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
    if shown is not None:
        parts += _capacity(shown, chart.capacity_name, scale, bottom)
    return "\n".join([*parts, *legend, "</svg>"]) + "\n"


def html(chart: Chart) -> str:
    """A page: the drawing, and its numbers as a table."""
    notes = "".join(f"<p>{escape(note)}</p>" for note in chart.notes)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(chart.title)}</title>
{_PAGE_STYLE}
</head>
<body>
<main>
<h1>{escape(chart.title)}</h1>
<p>{escape(chart.subtitle)}</p>
<figure>{svg(chart)}</figure>
{notes}
<div class="wide" role="region" aria-label="Numbers" tabindex="0">
<table>
<caption>Memory of one process, GiB</caption>
{_table(chart)}
</table>
</div>
</main>
</body>
</html>
"""


def describe(chart: Chart) -> str:
    """The drawing in words."""
    bars = "; ".join(
        f"{bar.name}: {bar.likely_bytes / GIB:.2f} GiB likely, up to {bar.upper_bytes / GIB:.2f}"
        for bar in chart.bars
    )
    capacity = chart.capacity_bytes
    return f"{chart.subtitle}. {bars}." + (
        f" {chart.capacity_name} has {capacity / GIB:.2f} GiB." if capacity is not None else ""
    )


# ---------------------------------------------------------------------------------------------------------
# Parts of the drawing

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

_PAGE_STYLE = """<style>
  :root { color-scheme: light dark; --text: #1f2328; --back: #ffffff; --line: #d1d9e0; }
  @media (prefers-color-scheme: dark) { :root { --text: #f0f6fc; --back: #0d1117; --line: #3d444d; } }
  body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); margin: 2rem; }
  main { max-width: 62rem; margin: auto; }
  figure { margin: 1rem 0; overflow-x: auto; }
  svg { max-width: 100%; height: auto; }
  .wide { overflow-x: auto; }
  table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
  caption { text-align: left; font-weight: 600; padding: 0.5rem 0; }
  th, td { border-bottom: 1px solid var(--line); padding: 0.25rem 0.75rem; text-align: right; }
  tbody th { text-align: left; font-weight: normal; }
</style>"""


def _definitions(categories: Sequence[str]) -> str:
    """Fills: each category's colour, with lines or dots in it for the second and third round of colours."""
    found = []
    for number, name in enumerate(categories):
        colour, pattern = look(name, categories)
        if pattern == "hatched":
            mark = '<path d="M0 8L8 0" stroke="#000" stroke-width="1.6"/>'
        elif pattern == "dotted":
            mark = '<circle cx="4" cy="4" r="1.6" fill="#000"/>'
        else:
            continue
        found.append(
            f'<pattern id="fill{number}" width="8" height="8" patternUnits="userSpaceOnUse">'
            f'<rect width="8" height="8" fill="{colour}"/>{mark}</pattern>'
        )
    return f"<defs>{''.join(found)}</defs>"


def _fill(name: str, categories: Sequence[str]) -> str:
    colour, pattern = look(name, categories)
    return colour if pattern == "solid" else f"url(#fill{categories.index(name)})"


def _axis(end: float, scale: float, bottom: int) -> list[str]:
    step = _tick(end / GIB)
    lines, at = [], 0.0
    while at <= end / GIB:
        x = _LEFT + at * GIB * scale
        lines.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 8}" y2="{bottom}"/>')
        lines.append(f'<text class="small" x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{at:g}</text>')
        at = round(at + step, 6)
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    lines.append(f'<text class="small" x="{middle}" y="{bottom + 30}" text-anchor="middle">GiB</text>')
    return lines


def _tick(span: float) -> float:
    """1, 2 or 5 times a power of ten, so that the axis has five to twelve marks."""
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
        label = f"{bar.name}: {name} {size / GIB:.2f} GiB"
        lines.append(
            f'<rect class="part" x="{x:.2f}" y="{top}" width="{width:.2f}" height="{_BAR}" '
            f'fill="{_fill(name, categories)}"><title>{escape(label)}</title></rect>'
        )
        x += width
    upper = _LEFT + bar.upper_bytes * scale
    y = top + _BAR / 2
    lines.append(
        f'<path class="upper" d="M{x:.1f} {y}H{upper:.1f}M{upper:.1f} {top + 6}V{top + _BAR - 6}">'
        f"<title>{escape(bar.name)}: up to {bar.upper_bytes / GIB:.2f} GiB</title></path>"
    )
    return lines


def _capacity(capacity: int, name: str, scale: float, bottom: int) -> list[str]:
    x = _LEFT + capacity * scale
    text = f"{name} {capacity / GIB:.1f} GiB".strip()
    return [
        f'<line class="capacity" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 12}" y2="{bottom}"/>',
        f'<text x="{x:.1f}" y="{_TOP - 18}" text-anchor="end">{escape(text)}</text>',
    ]


def _legend(categories: Sequence[str], top: int) -> tuple[list[str], int]:
    """Lines of four entries, and their height."""
    lines, column = [], (_WIDTH - 40) // 4
    for number, name in enumerate(categories):
        x, y = 20 + number % 4 * column, top + number // 4 * 24
        lines.append(
            f'<rect class="part" x="{x}" y="{y}" width="16" height="16" fill="{_fill(name, categories)}"/>'
            f'<text x="{x + 24}" y="{y + 13}">{escape(name)}</text>'
        )
    return lines, 24 * -(-len(categories) // 4) + 8


def _table(chart: Chart) -> str:
    """A column for each bar, a row for each category and for the sums."""
    lines = [(name, [dict(bar.parts).get(name, 0) for bar in chart.bars]) for name in chart.categories]
    lines.append(("likely", [bar.likely_bytes for bar in chart.bars]))
    lines.append(("upper bound", [bar.upper_bytes for bar in chart.bars]))
    if chart.capacity_bytes is not None:
        lines.append((f"capacity: {chart.capacity_name}", [chart.capacity_bytes] * len(chart.bars)))
    head = "".join(f'<th scope="col">{escape(bar.name)}</th>' for bar in chart.bars)
    rows = [f"<thead><tr><td></td>{head}</tr></thead>", "<tbody>"]
    for name, sizes in lines:
        cells = "".join(f"<td>{size / GIB:.2f}</td>" for size in sizes)
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>')
    return "\n".join([*rows, "</tbody>"])
