"""HTML page with the memory chart and its numbers: no network, no script, light and dark mode."""

from __future__ import annotations

from html import escape

from estimator.charts import Chart, svg
from estimator.plan import GIB


def html(chart: Chart) -> str:
    """Format a page with the chart, and its numbers as a table."""
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


def _table(chart: Chart) -> str:
    """Format the table: one column per bar, one row per category and per sum."""
    lines = [(name, [dict(bar.parts).get(name, 0) for bar in chart.bars]) for name in chart.categories]
    lines.append(("needs", [bar.needs_bytes for bar in chart.bars]))
    lines.append(("needs at most", [bar.upper_bytes for bar in chart.bars]))
    lines.append(("shows", [bar.shows_bytes for bar in chart.bars]))
    if chart.capacity_bytes is not None:
        lines.append((f"capacity: {chart.capacity_name}", [chart.capacity_bytes] * len(chart.bars)))
    head = "".join(f'<th scope="col">{escape(bar.name)}</th>' for bar in chart.bars)
    rows = [f"<thead><tr><td></td>{head}</tr></thead>", "<tbody>"]
    for name, sizes in lines:
        cells = "".join(f"<td>{size / GIB:.2f}</td>" for size in sizes)
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>')
    return "\n".join([*rows, "</tbody>"])
