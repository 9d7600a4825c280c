"""``python -m benchmarks.dequantize``: the formats that it times."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from benchmarks import dequantize
from estimator.models.weight_formats import FORMATS


@pytest.mark.parametrize("method", FORMATS)
def test_each_published_format_is_dequantized_to_all_its_weights(method: str) -> None:
    if method == "bitsandbytes":
        pytest.importorskip("bitsandbytes")
    parts = dequantize.parts_of(method, side=256)
    weights = dequantize.dequantize(method, dequantize.OPTIONS, parts)
    assert weights.numel() == 256 * 256
