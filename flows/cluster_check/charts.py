"""Charts of the checklist's card as Vega-Lite specifications."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from checklist.result import Verdict
from decorators.card.charts import SCHEMA, thin

COLORS: dict[Verdict, str] = {
    "PASS": "#54a24b",
    "WARN": "#e4b93c",
    "FAIL": "#e45756",
    "NO-VERDICT": "#bab0ac",
}
_MEASURED, _EXPECTED, _FLOOR = "#4c78a8", "#f58518", "#e45756"
_CELL_WIDTH, _LEAST_CELL = 560, 9  # pixels of the heat map; of a node's row at least
_TILE = 44
# Sizes in powers of two: 64 KiB, not 65.5k
_BYTES = (
    "datum.value < 1024 ? format(datum.value, 'd') + ' B' : "
    "datum.value < 1048576 ? format(datum.value / 1024, '.3~f') + ' KiB' : "
    "datum.value < 1073741824 ? format(datum.value / 1048576, '.3~f') + ' MiB' : "
    "format(datum.value / 1073741824, '.3~f') + ' GiB'"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """One check's tile: its verdict and the reason."""

    check: str
    verdict: Verdict
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One cell of the matrix of pairs: the bandwidth from ``src`` to ``dst``."""

    src: str
    dst: str
    gbytes_per_s: float | None
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One size of a sweep, GB/s of busbw. None: unknown."""

    bytes: int
    measured: float | None = None
    expected: float | None = None
    floor: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryPoint:
    """One point of a figure's history: its value and that run's verdict."""

    unix: float
    value: float
    verdict: Verdict


def tiles(checks: Sequence[Tile]) -> dict[str, Any]:
    """Return the row of check tiles, colored by verdict."""
    names = [tile.check for tile in checks]
    values = [{"check": tile.check, "verdict": tile.verdict, "why": tile.reason} for tile in checks]
    return {
        "$schema": SCHEMA,
        "width": "container",
        "height": _TILE,
        "data": {"values": values},
        "mark": {"type": "rect", "tooltip": True, "stroke": "white", "strokeWidth": 2},
        "encoding": {
            "x": {
                "field": "check",
                "type": "nominal",
                "title": None,
                "scale": {"domain": names},
                "axis": {"labelAngle": -40, "orient": "bottom"},
            },
            "color": _verdicts(),
            "tooltip": [{"field": name} for name in ("check", "verdict", "why")],
        },
    }


def heat_map(cells: Sequence[Cell], names: Sequence[str]) -> dict[str, Any]:
    """Return the heat map of bandwidth by ordered pair; failed pairs are red."""
    height = max(_LEAST_CELL * len(names), min(320, 36 * len(names)))
    measured_cells = [
        {"from": cell.src, "to": cell.dst, "GB/s": round(cell.gbytes_per_s, 4), "note": cell.note}
        for cell in cells
        if cell.gbytes_per_s is not None
    ]
    failed = [
        {"from": cell.src, "to": cell.dst, "note": cell.note} for cell in cells if cell.gbytes_per_s is None
    ]
    label = {"labelLimit": 140, "labelOverlap": True}
    axes = {
        "x": {
            "field": "to",
            "type": "nominal",
            "scale": {"domain": list(names)},
            "axis": {**label, "labelAngle": -40},
        },
        "y": {"field": "from", "type": "nominal", "scale": {"domain": list(names)}, "axis": label},
    }
    color = {
        "field": "GB/s",
        "type": "quantitative",
        "scale": {"scheme": "viridis", "zero": True},
        "legend": {"title": "GB/s"},
    }
    return {
        "$schema": SCHEMA,
        "width": min(_CELL_WIDTH, max(36 * len(names), _LEAST_CELL * len(names))),
        "height": height,
        "layer": [
            {
                "data": {"values": measured_cells},
                "mark": {"type": "rect", "tooltip": True},
                "encoding": {**axes, "color": color},
            },
            {
                "data": {"values": failed},
                "mark": {"type": "rect", "tooltip": True, "color": _FLOOR},
                "encoding": axes,
            },
        ],
    }


def sweep(title: str, points: Sequence[Point]) -> dict[str, Any]:
    """Return the chart of busbw over message size: measured, fitted, and the floor if there is one."""

    def rows(name: str) -> list[dict[str, float]]:
        return [
            {"bytes": point.bytes, "GB/s": round(value, 6)}
            for point in points
            if (value := getattr(point, name)) is not None
        ]

    x = {
        "field": "bytes",
        "type": "quantitative",
        "title": "bytes",
        "scale": {"type": "log", "base": 2},
        "axis": {"labelExpr": _BYTES, "tickCount": 6, "grid": False},
    }
    y = {"field": "GB/s", "type": "quantitative", "title": None, "scale": {"zero": True}}
    axes_encoding = {"x": x, "y": y}
    return {
        "$schema": SCHEMA,
        "width": "container",
        "height": 130,
        "title": {"text": f"{title}, busbw in GB/s", "fontSize": 12, "anchor": "start"},
        "layer": [
            {
                "data": {"values": rows("expected")},
                "mark": {"type": "line", "color": _EXPECTED, "strokeDash": [5, 3]},
                "encoding": axes_encoding,
            },
            {
                "data": {"values": rows("measured")},
                "mark": {"type": "line", "color": _MEASURED, "point": True, "tooltip": True},
                "encoding": axes_encoding,
            },
            {
                "data": {"values": rows("floor")},
                "mark": {"type": "tick", "color": _FLOOR, "thickness": 3, "tooltip": True},
                "encoding": axes_encoding,
            },
        ],
    }


def over_time(title: str, runs: Sequence[HistoryPoint]) -> dict[str, Any]:
    """Return the chart of one figure over the runs, colored by verdict."""
    values = [
        {"time": _time(run.unix), "value": run.value, "verdict": run.verdict}
        for run in thin(sorted(runs, key=lambda run: run.unix))
    ]
    axis = {"grid": False, "labelOverlap": True, "format": "%b %d %H:%M", "tickCount": 3}
    x = {"field": "time", "type": "temporal", "title": None, "axis": axis}
    y = {"field": "value", "type": "quantitative", "title": None, "scale": {"zero": True}}
    return {
        "$schema": SCHEMA,
        "width": "container",
        "height": 110,
        "title": {"text": title, "fontSize": 12, "anchor": "start"},
        "data": {"values": values},
        "layer": [
            {"mark": {"type": "line", "color": "#bab0ac"}, "encoding": {"x": x, "y": y}},
            {
                "mark": {"type": "point", "filled": True, "size": 50, "tooltip": True},
                "encoding": {"x": x, "y": y, "color": {**_verdicts(), "legend": None}},
            },
        ],
    }


def _verdicts() -> dict[str, Any]:
    return {
        "field": "verdict",
        "type": "nominal",
        "title": None,
        "scale": {"domain": list(COLORS), "range": list(COLORS.values())},
        "legend": {"orient": "top", "symbolType": "square"},
    }


def _time(unix: float) -> str:
    return datetime.datetime.fromtimestamp(unix, datetime.timezone.utc).isoformat(timespec="seconds")
