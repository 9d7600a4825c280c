"""Tables of fabrics, variables, quotas and releases, and values derived from them."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from decorators.backends import tables
from estimator import hardware

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("file", sorted(tables.DATA.glob("*.csv")), ids=lambda file: file.stem)
def test_every_row_has_its_source_and_a_date(file: Path) -> None:
    with file.open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    assert rows
    for row in rows:
        assert None not in row, row  # a comma too many
        assert row["source"], row
        assert re.fullmatch(r"20\d\d-\d\d", row["date"]), row


@pytest.mark.parametrize(
    ("machine", "efa", "fabric"),
    [
        ("p5.48xlarge", 32, "EFA"),
        ("g5.xlarge", 0, None),
        ("a3-megagpu-8g", 0, "GPUDirect-TCPXO"),
        ("a3-ultragpu-8g", 0, "RoCE"),
        ("Standard_ND96isr_H100_v5", 0, "IB"),
    ],
)
def test_the_fabric_of_a_machine_is_that_of_the_instance_table(
    machine: str, efa: int, fabric: str | None
) -> None:
    item = hardware.instance(machine)
    item_fabric = tables.fabric_of(item)
    assert tables.efa_interfaces(item) == efa
    assert (item_fabric.name if item_fabric else None) == fabric


def test_only_a_requestable_fabric_has_variables() -> None:
    asked_for = {fabric.name for fabric in tables.fabrics() if fabric.requestable}
    for row in tables.variables():
        assert row.fabric in {*asked_for, tables.ANY}
        assert row.backend in ("kubernetes", "batch", tables.ANY)
        assert row.why


@pytest.mark.parametrize(
    ("backend", "fabric", "expected"),
    [
        ("kubernetes", None, set()),
        ("kubernetes", "IB", set()),
        ("kubernetes", "EFA", {"FI_PROVIDER", "NCCL_NET_PLUGIN"}),
        ("batch", None, {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}),
        ("batch", "EFA", {"FI_PROVIDER", "NCCL_NET_PLUGIN", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}),
    ],
)
def test_variables_are_set_only_for_the_fabric_in_use(
    backend: str, fabric: str | None, expected: set[str]
) -> None:
    assert set(tables.environment(backend, fabric)) == expected


def test_an_interface_is_named_to_nccl_by_exclusion_and_to_gloo_exactly() -> None:
    """A prefix that a machine lacks stops NCCL; gloo reads an exclusion as a name."""
    for row in tables.variables():
        if row.name == "NCCL_SOCKET_IFNAME":
            assert row.value.startswith("^")
            assert {"lo", "docker"} <= set(row.value[1:].split(","))
        if row.name == "GLOO_SOCKET_IFNAME":
            assert re.fullmatch(r"[a-z0-9]+", row.value)


@pytest.mark.parametrize(
    ("machine", "spot", "codes"),
    [
        ("p5.48xlarge", False, ["L-417A185B"]),
        ("p5en.48xlarge", True, ["L-C4BD4855", "L-7212CCBC"]),
        ("p6-b200.48xlarge", True, ["", "L-7212CCBC"]),
        ("trn1.32xlarge", False, ["L-2C3B7624"]),
        ("m7i.large", False, []),
    ],
)
def test_a_machine_counts_for_the_narrowest_limit_of_its_family(
    machine: str, spot: bool, codes: list[str]
) -> None:
    assert [quota.code for quota in tables.quotas_of(machine, spot=spot)] == codes


@pytest.mark.parametrize("name", ["JobSet", "Kueue", "NVIDIA device plugin"])
def test_releases_in_advice_match_those_documented_in_infra(name: str) -> None:
    page = (ROOT / "infra/kubernetes/README.md").read_text()
    [row] = [line for line in page.splitlines() if re.match(rf"\| (or )?{name} \|", line)]
    release = tables.release(name)
    assert f"| {release.version} |" in row
    assert release.version.lstrip("v") in release.manifest
    assert release.manifest in row or "chart" in row
