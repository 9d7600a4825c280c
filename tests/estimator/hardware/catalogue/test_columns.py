"""Columns of the hardware tables."""

from estimator.hardware.catalogue.columns import stem


def test_columns_that_share_a_stem_differ_in_their_unit_only() -> None:
    assert stem("vram_GiB") == stem("vram_GB") == "vram"
    assert (stem("on_demand_usd_month"), stem("bf16_PFLOPS_dense")) == ("on_demand", "bf16_dense")
    assert stem("gpu_count") == "gpu_count"
