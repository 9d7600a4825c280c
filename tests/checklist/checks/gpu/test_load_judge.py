"""Judging of GPUs under load: a throttled GPU is named with the reason."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from checklist.measurements import Local, Measurements
from checklist.verdict import judge
from tests.checklist.runs import gpu_run, verdict_of, with_states


def loaded(run: Measurements, *ranks: int, **changes: Any) -> Measurements:
    return with_states(run, ranks, "loaded", **changes)


@pytest.mark.parametrize(
    ("changes", "reported", "expected"),
    [
        ({"sm_clock_mhz": 1590}, ("clock-low", "WARN"), "runs at 1,590 MHz under load, its peers at 1,715"),
        ({"sm_clock_mhz": 1410}, ("clock-low", "FAIL"), "runs at 1,410 MHz"),
        ({"power_limit_w": 500.0}, ("power-cap", "WARN"), "capped at 500 W, others of its kind have 700 W"),
        ({"throttle_reasons": ("power brake",)}, ("throttled", "WARN"), "throttled under load: power brake"),
        ({"temperature_c": 90.0}, ("hot", "WARN"), "90 °C hot under load, and slows down at 89"),
        ({"pcie_generation": 3}, ("pcie-slow", "WARN"), "has 3 as its PCIe generation, others of its kind 5"),
    ],
)
def test_a_throttled_gpu_is_named(changes: dict[str, Any], reported: tuple[str, str], expected: str) -> None:
    result = judge(loaded(gpu_run(), 9, **changes))
    (fault,) = result.findings
    assert (fault.check, fault.code, fault.verdict) == ("gpu-load", *reported)
    assert (fault.nodes, fault.ranks, fault.gpus) == (("host-1",), (9,), ("GPU-1-1",))
    assert expected in fault.title


def test_an_old_pcie_generation_and_low_clocks_shared_by_all_gpus_pass() -> None:
    result = judge(loaded(gpu_run(), *range(16), pcie_generation=4, sm_clock_mhz=1410))
    assert (result.findings, verdict_of(result, "gpu-load")) == ((), "PASS")


@pytest.mark.parametrize(
    ("code", "value", "expected_title"),
    [
        ("power-cap", "power_limit_w", "power_default_w"),
        ("clock-set", "sm_clock_set_mhz", "sm_clock_default_mhz"),
        ("memory-clock", "memory_clock_mhz", "memory_clock_most_mhz"),
    ],
)
def test_a_value_low_on_all_gpus_is_one_finding_without_a_node(
    code: str, value: str, expected_title: str
) -> None:
    def findings(share: float, **changes: Any) -> list[tuple[str, tuple[str, ...]]]:
        run = loaded(gpu_run(), *range(16), **{value: 700 * share, expected_title: 700, **changes})
        return [(fault.code, fault.nodes) for fault in judge(run).findings]

    assert findings(0.94) == [(code, ())]
    assert findings(0.99) == []
    assert findings(0.5, **{expected_title: None}) == []


@pytest.mark.parametrize(
    ("h2d", "changes", "codes"),
    [
        (25.0, {}, ["pcie-product"]),
        (55.0, {}, []),  # faster than the link that the virtual machine reports
        (None, {}, []),
        (25.0, {"pcie_generation": 5, "pcie_generation_gpu": 6}, []),
        (25.0, {"pcie_generation_gpu": None}, []),
    ],
)
def test_a_slow_pcie_slot_of_all_gpus_is_reported_if_copies_confirm_it(
    h2d: float | None, changes: dict[str, Any], codes: list[str]
) -> None:
    run = loaded(gpu_run(), *range(16), **{"pcie_generation": 4, "pcie_generation_gpu": 5, **changes})
    run = with_states(run, range(16), "after", pcie_width=16, pcie_width_most=16)
    copies = tuple(Local(rank=rank, what="h2d", value=h2d, unit="GB/s") for rank in range(16) if h2d)
    result = judge(dataclasses.replace(run, locals=(*run.locals, *copies)))
    assert [fault.code for fault in result.findings if fault.check == "gpu-load"] == codes


@pytest.mark.parametrize(("temperature_c", "codes"), [(71.9, []), (72.0, ["hotter"])])
def test_a_gpu_ten_degrees_above_the_median_of_its_peers_is_named(
    temperature_c: float, codes: list[str]
) -> None:
    result = judge(loaded(gpu_run(), 9, temperature_c=temperature_c))  # 60 to 64 °C, median 62
    assert [(fault.code, fault.ranks) for fault in result.findings] == [(code, (9,)) for code in codes]
    everywhere = loaded(gpu_run(), *range(16), temperature_c=temperature_c)
    assert judge(everywhere).findings == ()


def test_a_gpu_without_peers_is_judged_by_its_own_limits() -> None:
    run = gpu_run(1, 1)
    assert [f.code for f in judge(run).findings if f.check == "gpu-load"] == []
    capped = judge(loaded(run, 0, power_limit_w=500.0, pcie_generation=3))
    assert [f.code for f in capped.findings if f.check == "gpu-load"] == ["pcie-slow", "power-cap"]


def test_gpus_that_were_not_sampled_under_load_have_no_verdict() -> None:
    run = gpu_run()
    without = tuple(state for state in run.health if state.when != "loaded")
    assert verdict_of(judge(dataclasses.replace(run, health=without)), "gpu-load") == "NO-VERDICT"
    half = tuple(state for state in run.health if state.when != "loaded" or state.rank < 8)
    assert verdict_of(judge(dataclasses.replace(run, health=half)), "gpu-load") == "NO-VERDICT"
    blind = loaded(run, *range(16), sm_clock_mhz=None, throttle_reasons=None)
    assert verdict_of(judge(blind), "gpu-load") == "NO-VERDICT"
