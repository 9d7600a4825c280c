"""Memory bars in a terminal, as SVG, as a page; for every color vision, without a network."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from rich.console import Console

from estimator import charts, memory
from estimator.chart_page import html
from estimator.charts import ORDER, Bar, Chart, stacked
from estimator.cli.breakdown import CATEGORY_DESCRIPTIONS

GIB = 2**30
SVG = "{http://www.w3.org/2000/svg}"


def chart(**changes: object) -> Chart:
    values: dict[str, object] = {
        "title": "llama-8b: memory of one GPU",
        "subtitle": "lora, <8> GPU(s) & more",
        "bars": (
            Bar(
                name="tp 1",
                parts=(("weights", 10 * GIB), ("activations", 6 * GIB)),
                upper_bytes=20 * GIB,
                shows_bytes=19 * GIB,
            ),
            Bar(
                name="tp 2",
                parts=(("weights", 5 * GIB), ("runtime", 3 * GIB)),
                upper_bytes=9 * GIB,
                shows_bytes=8 * GIB,
            ),
        ),
        "capacity_bytes": 18 * GIB,
        "capacity_name": "a GPU",
        "notes": ("Range: +15%.",),
    }
    return Chart(**(values | changes))  # type: ignore[arg-type]


def rectangles(drawing: str) -> list[ET.Element]:
    parsed = ET.fromstring(drawing)  # noqa: S314 - it was drawn here
    return [item for item in parsed.iter(f"{SVG}rect") if item.find(f"{SVG}title") is not None]


# ---------------------------------------------------------------------------------------------------------
# The drawing


def test_the_svg_is_well_formed_and_bar_lengths_are_proportional_to_bytes() -> None:
    found = rectangles(charts.svg(chart()))
    assert [item.find(f"{SVG}title").text for item in found] == [  # type: ignore[union-attr]
        "tp 1: weights 10.0 GiB",
        "tp 1: activations 6.00 GiB",
        "tp 2: weights 5.00 GiB",
        "tp 2: runtime 3.00 GiB",
    ]
    widths = [float(item.get("width", 0)) for item in found]
    assert widths[0] / widths[2] == pytest.approx(2.0, rel=0.01)
    assert float(found[1].get("x", 0)) == pytest.approx(float(found[0].get("x", 0)) + widths[0], abs=0.02)


def test_the_capacity_line_is_drawn_unless_it_is_far_beyond_the_bars() -> None:
    assert 'class="capacity"' in charts.svg(chart())
    assert 'class="capacity"' not in charts.svg(chart(capacity_bytes=800 * GIB))
    assert 'class="capacity"' not in charts.svg(chart(capacity_bytes=None))


@pytest.mark.parametrize("made", [charts.svg(chart()), html(chart())], ids=["svg", "html"])
def test_the_chart_page_loads_no_resources_and_runs_no_script(made: str) -> None:
    assert re.findall(r'(?:src|href)="', made) == []
    assert "@import" not in made
    assert "<script" not in made
    assert set(re.findall(r"https?://[^\s\"<]+", made)) <= {"http://www.w3.org/2000/svg"}


def test_a_screen_reader_gets_a_title_a_description_and_the_numbers() -> None:
    drawing = ET.fromstring(charts.svg(chart()))  # noqa: S314
    assert drawing.get("role") == "img"
    described = drawing.find(f"{SVG}desc")
    assert described.text is not None
    assert "tp 1: needs 16.0 GiB, up to 20.0 GiB; shows 19.0 GiB" in described.text
    assert "a GPU has 18.0 GiB" in described.text


class _Cells(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self._open = False

    def handle_starttag(self, tag: str, attrs: object) -> None:  # noqa: ARG002
        if tag == "tr":
            self.rows.append([])
        self._open = tag in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._open and data.strip():
            self.rows[-1].append(data)


def test_the_pages_table_holds_every_number() -> None:
    parser = _Cells()
    parser.feed(html(chart()).partition("<table>")[2].partition("</table>")[0].partition("</caption>")[2])
    assert parser.rows == [
        ["tp 1", "tp 2"],
        ["weights", "10.00", "5.00"],
        ["activations", "6.00", "0.00"],
        ["runtime", "0.00", "3.00"],
        ["needs", "16.00", "8.00"],
        ["needs at most", "20.00", "9.00"],
        ["shows", "19.00", "8.00"],
        ["capacity: a GPU", "18.00", "18.00"],
    ]


def test_text_that_looks_like_markup_is_escaped() -> None:
    assert "lora, &lt;8&gt; GPU(s) &amp; more" in html(chart())


# ---------------------------------------------------------------------------------------------------------
# Categories


def test_every_memory_category_has_a_drawing_order_and_an_explanation() -> None:
    for name in memory.CATEGORIES:
        assert name in ORDER
        assert CATEGORY_DESCRIPTIONS[name]


# ---------------------------------------------------------------------------------------------------------
# The terminal


def lines(width: int, *, color: bool, made: Chart | None = None) -> list[str]:
    console = Console(width=width, force_terminal=color, color_system="truecolor" if color else None)
    return [line.plain for line in stacked(made or chart(), console)]


@pytest.mark.parametrize("width", [80, 100, 200])
@pytest.mark.parametrize("color", [True, False])
def test_terminal_bars_fit_the_width_and_are_proportional_to_bytes(width: int, color: bool) -> None:
    drawn = lines(width, color=color, made=chart(capacity_bytes=15 * GIB))
    assert all(len(line) <= width for line in drawn)
    weights = [line.count("█" if color else "a") for line in drawn if line.startswith("tp")]
    if not color:
        assert weights[0] / weights[1] == pytest.approx(2.0, abs=0.3)
    assert "too much" in drawn[1]
    assert "too much" not in drawn[2]
    assert all("┤" in line and "┃" in line for line in drawn[1:3])


def test_without_colors_letters_distinguish_the_categories() -> None:
    legend = "  ".join(lines(80, color=False)[4:])
    assert re.findall(r"([a-z])  (\w+)", legend) == [("a", "weights"), ("b", "activations"), ("c", "runtime")]
