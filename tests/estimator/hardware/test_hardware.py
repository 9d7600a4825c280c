"""The GPU and machine tables: facts in range, with sources, found by every name they go by."""

import math
import re
from datetime import date

import pytest

from estimator import hardware
from estimator.errors import UserError
from estimator.hardware.catalogue import most_driver_bytes
from estimator.hardware.report import Filters
from estimator.plan import GIB, MIB


@pytest.mark.parametrize(
    ("nvml", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB"),
        ("NVIDIA-H100-80GB-HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("Tesla T4", "T4"),
        ("Quadro RTX 4000", "Quadro RTX 4000"),
        ("NVIDIA GB200", "GB200 (per GPU)"),
        ("NVIDIA A10", "A10"),
    ],
)
def test_driver_product_names_match_their_gpu(nvml: str, name: str) -> None:
    found = hardware.find_gpu_by_nvml_name(nvml)
    assert found.name == name
    assert hardware.gpu(nvml) is found


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("h100-sxm", "H100 SXM"),
        ("H100NVL", "H100 NVL"),
        ("a100-80gb", "A100 SXM 80GB"),
        ("v100", "V100 SXM2 16GB"),
        ("RTX6000Ada", "RTX 6000 Ada"),
        ("rtx 8000", "Quadro RTX 8000"),
        ("nvidia-h100-mega-80gb", "H100 SXM"),
    ],
)
def test_common_and_cloud_names_match_their_gpu(typed: str, name: str) -> None:
    assert hardware.gpu(typed).name == name


def test_an_ambiguous_name_lists_the_matching_gpus() -> None:
    with pytest.raises(UserError, match="A100 SXM 80GB"):
        hardware.gpu("A100")
    with pytest.raises(UserError, match="'rtx6000' matches 3 GPUs"):
        hardware.gpu("rtx6000")


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        ("A100", {"A100 SXM 80GB", "A100 SXM 40GB", "A100 PCIe 80GB", "A100 PCIe 40GB"}),
        ("A100-80GB", {"A100 SXM 80GB", "A100 PCIe 80GB"}),
        ("a100 sxm", {"A100 SXM 80GB", "A100 SXM 40GB"}),
        ("h100", {"H100 SXM", "H100 PCIe", "H100 NVL", "H100 SXM 96GB HBM2e 500W"}),
        ("l4", {"L4"}),
        ("nvidia-tesla-a100", {"A100 SXM 40GB"}),  # GKE's name of one of them
        ("NVIDIA H200", {"H200 SXM"}),  # the driver's name of one of them
    ],
)
def test_a_short_name_matches_all_variants_and_a_driver_name_only_one(typed: str, names: set[str]) -> None:
    assert {gpu.name for gpu in hardware.gpus_called(typed)} == names


def test_every_gpu_is_found_by_its_name_and_its_driver_names() -> None:
    for gpu in hardware.gpus():
        assert hardware.gpus_called(gpu.name) == (gpu,)
        for alias in gpu.aliases:
            assert hardware.gpus_called(alias)[0] is gpu


def test_gpu_facts_are_in_range_and_sourced() -> None:
    assert len({gpu.name for gpu in hardware.gpus()}) == len(hardware.gpus())
    for gpu in hardware.gpus():
        assert gpu.source, gpu.name
        assert 7 * GIB < gpu.vram_bytes < 300 * GIB, gpu.name
        if gpu.bandwidth_gbps is not None:
            assert 100 < gpu.bandwidth_gbps <= 8000, gpu.name
        for dtype, rate in gpu.peak_tflops:
            assert 1 < rate <= 5000, (gpu.name, dtype)


def test_gpu_memory_is_the_reported_size_not_the_marketed_one() -> None:
    for name, mib in {"T4": 15360, "RTX 4090": 24564, "RTX A6000": 49140, "L4": 23034, "L40S": 46068}.items():
        assert hardware.gpu(name).vram_bytes == mib * MIB, name
    unreported = hardware.gpu("A40")
    assert (unreported.vram_bytes, unreported.vram_reported) == (48 * 10**9, False)


def test_usable_memory_is_below_the_size_reported_by_the_driver() -> None:
    for name, gib in {"T4": 14.75, "RTX 4090": 23.52, "A100 SXM 80GB": 79.25, "L4": 22.05}.items():
        gpu = hardware.gpu(name)
        assert gpu.usable_bytes == pytest.approx(gib * GIB, abs=1), name
        assert gpu.usable_bytes < gpu.vram_bytes
    known = [gpu for gpu in hardware.gpus() if gpu.driver_bytes]
    assert len(known) >= 15
    for gpu in known:
        assert gpu.driver_bytes is not None
        assert gpu.driver_bytes <= most_driver_bytes(gpu.vram_bytes), gpu.name


def test_the_largest_known_reserve_is_assumed_where_no_log_has_the_memory_that_cuda_offers() -> None:
    gpu = hardware.gpu("RTX A6000")
    assert gpu.driver_bytes is None
    # 47.4 to 47.5 GiB in errors of torch; the reported 49,140 MiB are 48.0 GiB
    assert 46.5 * GIB < gpu.usable_bytes < 47.4 * GIB
    assert hardware.gpu("RTX 3090").usable_bytes == pytest.approx(23.67 * GIB, abs=1), (
        "known, without a reported size"
    )


def test_measured_matrix_products_are_plausible_shares_of_the_peak() -> None:
    known = [gpu for gpu in hardware.gpus() if gpu.measured_tflops is not None]
    assert len(known) >= 25
    for gpu in known:
        peak = gpu.peak_flops("bf16" if gpu.bf16 else "fp32")
        # GeForce cards clock above the figures that they are sold with, an A10's power limit far below
        assert peak is None or 0.4 < (gpu.measured_tflops or 0) * 1e12 / peak < 1.1, gpu.name


def test_machine_facts_are_in_range_and_sourced() -> None:
    assert len({(item.cloud, item.name) for item in hardware.instances()}) == len(hardware.instances())
    for item in hardware.instances():
        hardware.gpu(item.gpu)
        assert item.source, item.name
        assert 0 <= item.gpu_count <= 16, item.name
        if item.usd_per_hour is not None:
            assert 0.1 < item.usd_per_hour < 200, item.name
            assert item.region, item.name
            assert re.match(r"20\d\d", item.price_date or ""), item.name
            assert item.price_source, item.name
        if item.spot_usd_per_hour is not None:
            assert item.spot_usd_per_hour < (item.usd_per_hour or 0), item.name


def test_prices_older_than_60_days_give_one_warning_with_the_oldest_date() -> None:
    names = ["p5.48xlarge", "a2-highgpu-1g", "p5.48xlarge"]
    assert hardware.old_prices(names, date(2026, 9, 18)) == ""
    assert hardware.old_prices(names, date(2026, 9, 19)) == (
        "Prices of 2026-07-20 are 61 days old: `finetune gpus --refresh` updates them."
    )
    assert hardware.old_prices(["a2-highgpu-1g"], date(2026, 9, 19)) == ""
    assert hardware.old_prices(["", "rack-7", "p5e.48xlarge", "gpu_1x_a6000"], date(2030, 1, 1)) == ""


def test_architectures_match_by_prefix_and_clouds_ignore_case() -> None:
    catalogue = hardware.catalogue()
    assert catalogue.architecture("ada") == ("Ada Lovelace",)
    assert catalogue.architecture("BLACKWELL") == ("Blackwell", "Blackwell Ultra")
    assert catalogue.cloud("AWS") == "aws"
    with pytest.raises(UserError, match="Hopper"):
        catalogue.architecture("hoppper")
    with pytest.raises(UserError, match="aws, gcp, azure, lambda"):
        catalogue.cloud("aswa")


def test_filters_refuse_memory_of_0_and_negative_prices() -> None:
    assert Filters(max_usd_per_hour=0.0).of_machines
    for impossible in ({"max_usd_per_hour": -0.01}, {"max_usd_per_hour": math.nan}, {"min_vram": 0.0}):
        with pytest.raises(UserError):
            Filters(**impossible)


def test_an_unknown_gpu_is_refused_with_similar_names_and_the_option_that_adds_one() -> None:
    with pytest.raises(UserError) as caught:
        hardware.gpu("RTX 3070")
    assert "RTX 3090" in caught.value.advice
    assert "--hardware FILE" in caught.value.advice
