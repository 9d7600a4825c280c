"""The moving average of trained weights, compared with its recurrence calculated by hand."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from launchers.engines.loop.moving_average import MovingAverage  # noqa: E402


def test_the_decay_of_the_moving_average_rises_with_the_update_number_up_to_its_limit() -> None:
    weight = torch.nn.Parameter(torch.tensor([8.0]))
    average = MovingAverage([("w", weight)], decay=0.25)
    expected = [16.0, 16 * 2 / 11 + 32 * 9 / 11]  # the base's weight is forgotten; then rate 2 / 11
    expected.append(0.25 * expected[-1] + 0.75 * 64)  # 3 / 12 and later the decay
    expected.append(0.25 * expected[-1] + 0.75 * 128)
    for value, expected_average in zip((16.0, 32.0, 64.0, 128.0), expected, strict=True):
        with torch.no_grad():
            weight.fill_(value)
        average.update()
        assert average.weights["w"].item() == pytest.approx(expected_average)
    with average.in_place():
        assert weight.item() == pytest.approx(expected[-1])
    assert weight.item() == 128.0
