"""Vega-Lite specifications of charts: plain values in, a plain dict out. Drawing needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from estimator.charts import MAX_CAPACITY_RATIO
from estimator.plan import GIB, Counted

MAX_POINTS = 500  # points per line, to limit the size of a card
WHOLE_LABEL = "datum.value % 1 ? '' : format(datum.value, 'd')"  # old Vegas tick a short axis at halves
SHORT_MINUTES = 2.0  # a shorter step has seconds on its axis
MIN_SMOOTHED_POINTS = 40  # shorter lines are not smoothed
SCHEMA = "https://vega.github.io/schema/vega-lite/v5.json"  # identifies the grammar; nothing is downloaded
_CATEGORY_COLORS = ("#4c78a8", "#72b7b2", "#f58518", "#e4b93c", "#9d755d", "#b279a2", "#bab0ac", "#8cb36a")
_MEASURED_COLORS = ("#54a24b", "#a7d9a0")
_LINE, _LINE_2, _BAND, _UPPER, _CAPACITY = "#4c78a8", "#f58518", "#c9d8ea", "#e45756", "#333333"
_LEGEND_ABOVE = {"orient": "top", "direction": "horizontal", "offset": 2, "title": None, "symbolOpacity": 1}
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredPart:
    """Part of the measured bar."""

    name: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPoint:
    """Memory at one time."""

    minutes: float
    source: str  # "rank 0", "GPU 0 (NVML)"
    used_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TimePoint:
    """Value of a metric other than memory at one time."""

    minutes: float
    source: str
    value: float


def thin(values: Sequence[T], limit: int = MAX_POINTS) -> list[T]:
    """Return at most ``limit`` of the values, evenly spaced, always with the last one."""
    if len(values) <= limit:
        return list(values)
    stride = (len(values) - 1) / (limit - 1)
    return [values[round(i * stride)] for i in range(limit)]


def gib(size_bytes: float) -> float:
    return round(size_bytes / GIB, 4)


def memory_bars(
    predicted: Counted | None, measured: Sequence[MeasuredPart], unit: str, capacity: int | None = None
) -> dict[str, Any]:
    """Stacked bars of predicted memory by category and measured memory, with upper bound and capacity.

    ``predicted`` and ``measured`` are of the same memory counter.
    """
    parts = predicted.categories if predicted else ()
    bars = [
        {"bar": "predicted", "part": name, "gib": gib(size), "order": i}
        for i, (name, size) in enumerate(parts)
    ]
    bars += [
        {"bar": "measured", "part": part.name, "gib": gib(part.size_bytes), "order": i}
        for i, part in enumerate(measured)
    ]
    names = [name for name, _ in parts]
    colors = [_CATEGORY_COLORS[i % len(_CATEGORY_COLORS)] for i in range(len(parts))]
    unpredicted = [part.name for part in measured if part.name not in names]  # each name has one color
    names += unpredicted
    colors += [_MEASURED_COLORS[i % len(_MEASURED_COLORS)] for i in range(len(unpredicted))]
    marks = []
    axis = [f"GiB of a {unit}"]  # one line per item, to fit on a phone
    if predicted:
        highest = predicted.upper_bytes or predicted.likely_bytes
        if predicted.upper_bytes is not None:
            marks.append({"gib": gib(highest), "mark": "upper bound", "color": _UPPER})
        if capacity is not None and capacity <= MAX_CAPACITY_RATIO * highest:
            marks.append({"gib": gib(capacity), "mark": "capacity", "color": _CAPACITY})
        elif capacity is not None:
            axis.append(f"(capacity: {gib(capacity):.1f} GiB, far to the right)")
    x = {"field": "gib", "type": "quantitative", "title": axis}
    return {
        "$schema": SCHEMA,
        "width": "container",
        "height": 104,
        "padding": {"top": 4, "left": 4, "right": 12, "bottom": 4},
        "layer": [
            {
                "data": {"values": bars},
                "mark": {"type": "bar", "tooltip": True, "height": {"band": 0.75}},
                "encoding": {
                    "y": {
                        "field": "bar",
                        "type": "nominal",
                        "title": None,
                        "scale": {"domain": ["predicted", "measured"]},
                        "axis": {"labelFontSize": 12},
                    },
                    "x": {**x, "stack": "zero"},
                    "color": {
                        "field": "part",
                        "type": "nominal",
                        "title": None,
                        "scale": {"domain": names, "range": colors},
                        "legend": {"orient": "bottom", "columns": 2, "symbolType": "square"},
                    },
                    "order": {"field": "order", "type": "quantitative"},
                },
            },
            {
                "data": {"values": marks},
                "mark": {"type": "rule", "strokeWidth": 2, "strokeDash": [5, 3], "tooltip": True},
                "encoding": {"x": x, "color": {"field": "color", "type": "nominal", "scale": None}},
            },
            {
                "data": {"values": marks},
                "mark": {"type": "text", "align": "right", "dx": -4, "fontSize": 11, "baseline": "bottom"},
                "encoding": {
                    "x": x,
                    "y": {"value": 0},
                    "text": {"field": "mark"},
                    "color": {"field": "color", "type": "nominal", "scale": None},
                },
            },
        ],
        "resolve": {"scale": {"color": "independent"}},
    }


def line(
    points: Sequence[tuple[int, float | None]],
    title: str,
    *,
    from_zero: bool = False,
    number_format: str = "~s",
    smooth: bool = False,
) -> dict[str, Any]:
    """Line chart of a value over the optimizer steps; steps without the value are omitted.

    ``smooth``: draw a line smoothed over a twentieth of the steps in front of the unsmoothed values.
    """
    values = [(step, value) for step, value in points if value is not None]
    rows = [{"step": step, "value": value} for step, value in thin(values)]
    y: dict[str, Any] = {
        "type": "quantitative",
        "title": None,
        "scale": {"zero": from_zero},
        "axis": {"format": number_format, "tickCount": 5},
    }
    view: dict[str, Any] = {
        "$schema": SCHEMA,
        "width": "container",
        "height": 130,
        "title": {"text": title, "fontSize": 12, "anchor": "start"},
        "data": {"values": rows},
    }
    mark = {"type": "line", "color": _LINE, "point": len(rows) < MIN_SMOOTHED_POINTS, "tooltip": True}
    encoding = {"x": _steps_axis(), "y": {"field": "value", **y}}
    if not smooth or len(values) < MIN_SMOOTHED_POINTS:
        return {**view, "mark": mark, "encoding": encoding}
    view["title"]["subtitle"] = "smoothed over a twentieth of the steps"
    view["data"]["values"] = [
        {"step": step, "value": value, "smoothed": round(smoothed, 6)}
        for (step, value), smoothed in thin([*zip(values, smoothed_values(values), strict=True)])
    ]
    curve_encoding = {"x": _steps_axis(), "y": {"field": "smoothed", **y}}
    return {
        **view,
        "layer": [
            {"mark": {**mark, "opacity": 0.3, "strokeWidth": 1}, "encoding": encoding},
            {"mark": {**mark, "strokeWidth": 2}, "encoding": curve_encoding},
        ],
    }


def line_with_held_out(
    points: Sequence[tuple[int, float | None]],
    held_out: Sequence[tuple[int, float]],
    title: str,
    best: int | None,
    *,
    smooth: bool = False,
) -> dict[str, Any]:
    """Line chart of a training value (:func:`line`) together with the same value on held-out rows.

    ``best``: step of the lowest held-out loss, which is marked; None if unknown.
    """
    view = line(points, title, smooth=smooth)
    if not held_out:
        return view
    layers = view.pop("layer", None) or [{"mark": view.pop("mark"), "encoding": view.pop("encoding")}]
    scale = {"domain": ["training", "held out"], "range": [_LINE, _LINE_2]}
    for layer in layers:
        layer["mark"].pop("color")
        layer["encoding"]["color"] = {"datum": "training", "scale": scale, "legend": _LEGEND_ABOVE}
    y = {**layers[0]["encoding"]["y"], "field": "value"}
    values = [{"step": step, "value": value} for step, value in thin(held_out)]
    layers.append(
        {
            "data": {"values": values},
            "mark": {"type": "line", "point": True, "strokeWidth": 2, "tooltip": True},
            "encoding": {"x": _steps_axis(), "y": y, "color": {"datum": "held out"}},
        }
    )
    marked = [{"step": step, "value": value} for step, value in held_out if step == best]
    text = f"lowest loss: step {best}"
    layers += [
        {
            "data": {"values": marked},
            "mark": {"type": "rule", "color": _UPPER, "strokeDash": [5, 3]},
            "encoding": {"x": _steps_axis()},
        },
        {
            "data": {"values": marked},
            "mark": {"type": "point", "color": _UPPER, "size": 110, "strokeWidth": 2, "tooltip": True},
            "encoding": {"x": _steps_axis(), "y": y},
        },
    ]
    if marked:
        subtitle = [*filter(None, [view["title"].get("subtitle")]), text]
        view["title"] = {**view["title"], "subtitle": subtitle}
    return {**view, "layer": layers}


def smoothed_values(points: Sequence[tuple[int, float]]) -> list[float]:
    """Exponential moving average over about a twentieth of the points; the first points count in full."""
    keep = 1 - 1 / max(len(points) / 20, 1.0)
    total = weight = 0.0
    smoothed = []
    for _, value in points:
        total, weight = keep * total + value, keep * weight + 1.0
        smoothed.append(total / weight)
    return smoothed


def step_times(rows: Sequence[tuple[int, float | None, float | None, float]]) -> dict[str, Any]:
    """Stacked step times in seconds. Rows: (step, forward, backward, whole step)."""
    values = []
    for step, forward, backward, total in thin(rows, MAX_POINTS // 3):
        rest = total - (forward or 0.0) - (backward or 0.0)
        split = (("forward", forward), ("backward", backward), ("rest", max(rest, 0.0)))
        values += [
            {"step": step, "part": part, "seconds": round(seconds, 5), "order": i}
            for i, (part, seconds) in enumerate(split)
            if seconds is not None
        ]
    return {
        "$schema": SCHEMA,
        "width": "container",
        "height": 130,
        "title": {"text": "seconds of a step", "fontSize": 12, "anchor": "start"},
        "data": {"values": values},
        "mark": {"type": "area", "tooltip": True} if len(rows) > 1 else {"type": "bar", "tooltip": True},
        "encoding": {
            "x": _steps_axis(),
            "y": {"field": "seconds", "type": "quantitative", "stack": "zero", "title": None},
            "order": {"field": "order", "type": "quantitative"},
            "color": {
                "field": "part",
                "type": "nominal",
                "title": None,
                "scale": {
                    "domain": ["forward", "backward", "rest"],
                    "range": [_CATEGORY_COLORS[0], _CATEGORY_COLORS[2], _CATEGORY_COLORS[6]],
                },
                "legend": {"orient": "top", "direction": "horizontal", "offset": 2},
            },
        },
    }


def memory_over_time(
    points: Sequence[MemoryPoint], predicted: Counted | None, capacity: int | None = None
) -> dict[str, Any]:
    """Line chart of the memory of each process or GPU, with the range predicted for the same counter."""
    layers: list[dict[str, Any]] = []
    y = {"type": "quantitative", "title": "GiB", "scale": {"zero": True}}
    if predicted:
        highest = predicted.upper_bytes or predicted.likely_bytes
        band = {"low": gib(predicted.likely_bytes), "high": gib(highest), "what": "predicted"}
        layers.append(
            {
                "data": {"values": [band]},
                "mark": {"type": "rect", "color": _BAND, "opacity": 0.7, "tooltip": True},
                "encoding": {"y": {**y, "field": "low"}, "y2": {"field": "high"}},
            }
        )
        layers.append(
            {
                "data": {"values": [{**band, "text": "predicted: likely to upper bound"}]},
                "mark": {"type": "text", "align": "left", "x": 6, "dy": 9, "fontSize": 11, "color": _LINE},
                "encoding": {"y": {**y, "field": "high"}, "text": {"field": "text"}},
            }
        )
        if capacity is not None and capacity <= MAX_CAPACITY_RATIO * highest:
            layers.append(
                {
                    "data": {"values": [{"gib": gib(capacity)}]},
                    "mark": {"type": "rule", "color": _CAPACITY, "strokeDash": [5, 3]},
                    "encoding": {"y": {**y, "field": "gib"}},
                }
            )
    used = [TimePoint(minutes=p.minutes, source=p.source, value=gib(p.used_bytes)) for p in points]
    layers.append(_lines_over_time(used, y, "gib"))
    return _over_time("memory over time", layers, 190)


def over_time(points: Sequence[TimePoint], title: str, *, number_format: str = "~g") -> dict[str, Any]:
    """Line chart of a metric of each GPU or process over time; its axis starts at zero."""
    y = {
        "type": "quantitative",
        "title": None,
        "scale": {"zero": True, **({"domain": [0, 1]} if number_format == "%" else {})},
        "axis": {"format": number_format},
    }
    return _over_time(title, [_lines_over_time(points, y, "value")], 130)


def _over_time(title: str, layers: list[dict[str, Any]], height: int) -> dict[str, Any]:
    return {
        "$schema": SCHEMA,
        "width": "container",
        "height": height,
        "title": {"text": title, "fontSize": 12, "anchor": "start"},
        "layer": layers,
    }


def _lines_over_time(points: Sequence[TimePoint], y: dict[str, Any], field: str) -> dict[str, Any]:
    """Layer with one line for each source, over minutes, of a short step over seconds."""
    is_short = max((point.minutes for point in points), default=0.0) < SHORT_MINUTES
    unit, factor = ("seconds", 60) if is_short else ("minutes", 1)
    values: list[dict[str, Any]] = []
    for source in dict.fromkeys(point.source for point in points):
        values += [
            {unit: round(factor * p.minutes, 4), "who": source, field: p.value}
            for p in thin([p for p in points if p.source == source])
        ]
    return {
        "data": {"values": values},
        "mark": {"type": "line", "tooltip": True, "interpolate": "step-after"},
        "encoding": {
            "x": {
                "field": unit,
                "type": "quantitative",
                "title": f"{unit} since the step started",
                "scale": {"zero": True},
            },
            "y": {**y, "field": field},
            "color": {
                "field": "who",
                "type": "nominal",
                "title": None,
                "legend": {"orient": "bottom", "columns": 4},
            },
        },
    }


def _steps_axis() -> dict[str, Any]:
    return {
        "field": "step",
        "type": "quantitative",
        "title": "step",
        "axis": {"tickMinStep": 1, "labelExpr": WHOLE_LABEL, "grid": False},
        "scale": {"zero": False, "nice": False},
    }
