"""The maintainer's command: refreshed prices in the shipped table, each with its day and source."""

from __future__ import annotations

import csv
import shutil
from datetime import date
from pathlib import Path

import pytest

from estimator import hardware
from estimator.hardware.catalogue.csv_files import Cells, read_rows
from estimator.hardware.prices import cache, refresh, shipped
from estimator.hardware.prices.cache import ProviderAnswer
from tests.estimator.hardware.price_servers import TODAY

DAY = date(2026, 11, 20)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the shipped tables."""
    made = tmp_path / "data"
    made.mkdir()
    for name in ("gpus.csv", "instances.csv"):
        shutil.copy(hardware.DATA / name, made)
    return made


def table(folder: Path) -> dict[str, Cells]:
    with (folder / "instances.csv").open(newline="", encoding="utf-8") as file:
        return {row["instance_type"]: row for row in csv.DictReader(file)}


def answering(monkeypatch: pytest.MonkeyPatch, *machines: Cells) -> None:
    answer = ProviderAnswer(line="fine", machines={cells["instance_type"]: cells for cells in machines})
    monkeypatch.setattr(refresh, "PROVIDERS", (("two", lambda *_: answer),))


def test_shipped_prices_are_updated_with_date_region_and_source(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = {
        "cloud": "aws",
        "instance_type": "p5.48xlarge",
        "on_demand_usd_h": "50",
        "spot_usd_h": "20.5",
        "price_region": "us-east-1",
        "price_date": str(DAY),
        "price_source": "AWS Price List API GetProducts; EC2 DescribeSpotPriceHistory",
    }
    answering(monkeypatch, new)
    before = table(folder)
    lines = shipped.update(folder, today=DAY)
    after = table(folder)
    assert lines[0] == "two: fine"
    assert lines[-1].startswith(f"1 of {len(before)} machine types changed in ")
    assert {column: after["p5.48xlarge"][column] for column in new} == new | {"cloud": "AWS"}
    assert list(after) == list(before)
    assert {name for name in after if after[name] != before[name]} == {"p5.48xlarge"}
    assert read_rows(folder / "instances.csv")  # each cell by its column's rule


def test_a_new_spot_price_keeps_the_on_demand_date_and_records_its_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(
        monkeypatch,
        {
            "cloud": "aws",
            "instance_type": "g5.xlarge",
            "spot_usd_h": "0.4",
            "price_region": "us-east-1",
            "price_date": str(DAY),
            "price_source": "EC2 API",
        },
    )
    shipped.update(folder, today=DAY)
    row = table(folder)["g5.xlarge"]
    assert (row["on_demand_usd_h"], row["price_date"], row["spot_usd_h"]) == ("1.006", "2026-07-20", "0.4")
    assert row["price_source"].endswith("; spot: EC2 API us-east-1 2026-11-20")


def test_a_price_of_another_region_is_ignored_and_reported(aws: None, folder: Path) -> None:
    before = table(folder)
    lines = shipped.update(folder, today=TODAY)
    assert any("AWS: eu-west-1 is not the table's us-east-1" in line for line in lines)
    assert table(folder)["g5.xlarge"] == before["g5.xlarge"]


def test_without_new_prices_the_file_is_unchanged_and_the_user_cache_ignored(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"cloud": "aws", "instance_type": "g5.xlarge", "on_demand_usd_h": "9", "price_date": str(DAY)}
    cache.write(cache.path(), {"g5.xlarge": own})
    answering(monkeypatch)
    bytes_before = (folder / "instances.csv").read_bytes()
    assert shipped.update(folder, today=DAY)[-1].startswith("0 of ")
    assert (folder / "instances.csv").read_bytes() == bytes_before
