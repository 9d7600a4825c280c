"""The GPU and machine tables: facts in range, with sources, found by every name they go by."""

import re

import pytest

from estimator import hardware
from estimator.errors import UserError
from estimator.plan import GIB, MIB


@pytest.mark.parametrize(
    ("nvml", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA-H100-80GB-HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA B200", "B200 SXM"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10G", "A10G"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100 SXM2 16GB"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("Quadro RTX 6000", "Quadro RTX 6000"),
    ],
)
def test_the_drivers_product_names_are_found(nvml: str, name: str) -> None:
    found = hardware.find_gpu_by_nvml_name(nvml)
    assert found is not None
    assert found.name == name
    assert hardware.gpu(nvml) is found


def test_a_gpu_that_nobody_lists_is_answered_with_the_nearest_names() -> None:
    assert hardware.find_gpu_by_nvml_name("NVIDIA H300") is None
    with pytest.raises(UserError) as caught:
        hardware.gpu("H300")
    assert "'H300'" in caught.value.problem
    assert "H200 SXM" in caught.value.advice


def test_a_name_that_fits_several_gpus_offers_them() -> None:
    with pytest.raises(UserError, match="A100 SXM 80GB"):
        hardware.gpu("A100")


def test_gpu_facts_are_in_range_and_sourced() -> None:
    assert len({gpu.name for gpu in hardware.gpus()}) == len(hardware.gpus())
    for gpu in hardware.gpus():
        assert gpu.source, gpu.name
        assert 7 * GIB < gpu.vram_bytes < 300 * GIB, gpu.name
        if gpu.bandwidth_gbps is not None:
            assert 100 < gpu.bandwidth_gbps <= 8000, gpu.name
        for dtype, rate in gpu.peak_tflops:
            assert 1 < rate <= 5000, (gpu.name, dtype)


def test_sizes_are_what_clouds_report_and_not_the_label() -> None:
    assert hardware.gpu("L4").vram_bytes == 22888 * MIB
    assert hardware.gpu("L40S").vram_bytes == 45776 * MIB
    unreported = hardware.gpu("RTX 4090")
    assert (unreported.vram_bytes, unreported.vram_reported) == (24 * 10**9, False)


def test_what_is_not_known_stays_unknown() -> None:
    assert hardware.gpu("A10G").peak_flops("bf16") is None
    assert hardware.gpu("T4").peak_flops("fp8") is None
    assert hardware.instance("p5e.48xlarge").usd_per_hour is None
    assert hardware.instance("a2-highgpu-1g").network_gbps is None
    assert hardware.instance("Standard_ND96asr_v4").network_gbps is None
    assert hardware.instance("g2-standard-8").ram_bytes is None


def test_peaks_are_dense() -> None:
    assert hardware.gpu("H100 SXM").peak_flops("bf16") == 989e12
    assert hardware.gpu("A100 SXM 80GB").peak_flops("bf16") == 312e12


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


def test_a_share_of_a_gpu_counts_as_none() -> None:
    assert hardware.instance("Standard_NV6ads_A10_v5").gpu_count == 0


def test_an_unknown_instance_is_answered_with_the_nearest_names() -> None:
    with pytest.raises(UserError, match=r"p5\.48xlarge"):
        hardware.instance("p5.49xlarge")
