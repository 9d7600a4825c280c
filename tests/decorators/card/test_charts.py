"""Charts of a card from plain values."""

from __future__ import annotations

import json

from decorators.card import charts
from decorators.card.step import draw
from tests.decorators.card.test_step import _charts
from tests.decorators.profile.states import make_state


def test_no_line_has_more_than_500_points_and_the_last_is_kept() -> None:
    assert (charts.thin(range(10_000))[-1], charts.thin(range(10_000))[0]) == (9_999, 0)
    assert len(charts.thin(range(10_000))) == 500
    assert charts.thin([1, 2]) == [1, 2]


def test_charts_embed_their_data() -> None:
    text = json.dumps(_charts(draw(make_state())))
    assert '"url"' not in text


def test_the_parts_of_a_step_add_up_to_its_time() -> None:
    spec = charts.step_times([(1, 0.3, 0.5, 1.0), (2, None, None, 1.0)])
    values = spec["data"]["values"]
    assert {v["part"]: v["seconds"] for v in values if v["step"] == 1} == {
        "forward": 0.3,
        "backward": 0.5,
        "rest": 0.2,
    }
    assert [v["part"] for v in values if v["step"] == 2] == ["rest"]


def test_a_smoothed_line_follows_the_values_and_few_values_are_not_smoothed() -> None:
    points = [(step, 1.0 if step % 2 else 3.0) for step in range(1, 401)]
    smoothed = charts.smoothed_values(points)
    assert smoothed[0] == 1.0
    assert all(abs(value - 2.0) < 0.2 for value in smoothed[100:])
    assert "layer" in charts.line(points, "loss", smooth=True)
    assert "layer" not in charts.line(points[:20], "loss", smooth=True)


def test_the_time_axis_of_a_short_step_is_in_seconds_and_of_a_long_one_in_minutes() -> None:
    for minutes, unit, value in ((0.5, "seconds", 30.0), (30.0, "minutes", 30.0)):
        points = [charts.TimePoint(minutes=minutes, source="GPU 0", value=0.5)]
        (layer,) = charts.over_time(points, "utilization")["layer"]
        assert layer["data"]["values"] == [{unit: value, "who": "GPU 0", "value": 0.5}]
        assert layer["encoding"]["x"]["title"] == f"{unit} since the step started"
