"""Comparison of attention kernels with explicit scores, rehearsed with references of the kernels."""

from __future__ import annotations

import pytest

from benchmarks.gpu_speed import equality

pytest.importorskip("torch")


@pytest.mark.parametrize("name", equality.SHAPES)
def test_attention_of_each_shape_equals_explicit_scores(name: str) -> None:
    from tests.launchers.engines.loop.varlen_kernel import registered

    with registered():
        errors = equality._compare_attention(name, "cpu")
    assert max(errors) < 1e-5
