"""Prices and facts from AWS: what is asked, what is kept, and what is told where it refuses."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from estimator import hardware
from estimator.hardware.prices import aws as refresh_aws
from estimator.hardware.prices import refresh
from tests.estimator.hardware.price_servers import TODAY, Denying, PriceList, unchanged
from tests.http_server import serving


def test_prices_of_linux_on_shared_machines_are_kept_with_date_region_and_source(aws: None) -> None:
    lines = refresh.refresh(today=TODAY)
    reported = next(line for line in lines if line.startswith("aws: "))
    assert "2 on-demand prices" in reported
    assert "spot prices" in reported
    assert reported.endswith("of eu-west-1")
    item = hardware.instance("g5.xlarge")
    assert item.usd_per_hour == 1.123
    assert item.spot_usd_per_hour == 0.00001  # moto's
    assert (item.region, item.price_date) == ("eu-west-1", "2026-11-20")
    assert item.price_source == "AWS Price List API GetProducts; EC2 DescribeSpotPriceHistory (cheapest zone)"
    assert hardware.instance("g4dn.xlarge").usd_per_hour == 0.526  # an offer of 0 is none
    assert hardware.instance("a2-highgpu-1g").usd_per_hour == 3.673385

    names = [item.name for item in hardware.instances() if item.cloud == "aws"]
    assert len(PriceList.asked) == len(names) // refresh_aws.BATCH + 2  # one batch has a second page
    for body in PriceList.asked:
        fixed = {item["Field"]: item["Value"] for item in body["Filters"][:-1]}
        assert (fixed["regionCode"], fixed["operatingSystem"]) == ("eu-west-1", "Linux")
        assert body["Filters"][-1]["Type"] == "ANY_OF"
        assert len(body["Filters"][-1]["Value"]) <= 1024


def test_the_shipped_table_agrees_with_recorded_ec2_descriptions(aws: None) -> None:
    answer = refresh_aws.fetch(hardware.catalogue(), time.monotonic() + 60, TODAY)
    assert "by the table" not in answer.line
    described = {name: cells for name, cells in answer.machines.items() if "vcpu" in cells}
    assert len(described) > 50
    for name, cells in described.items():
        item = hardware.instance(name)
        assert int(cells["vcpu"]) == item.vcpu
        assert float(cells["ram_GiB"]) * 2**30 == item.ram_bytes
        assert cells["fabric"] == item.fabric


def test_an_ec2_description_with_other_gpus_is_reported_and_ignored(aws: None, tmp_path: Path) -> None:
    own = tmp_path / "own.csv"
    own.write_text("instance_type,gpu,gpu_count\ng5.xlarge,L4,1\ng5.12xlarge,A10G,2\n")
    answer = refresh_aws.fetch(hardware.catalogue(own), time.monotonic() + 60, TODAY)
    assert "g5.xlarge has 1x A10G of 22888 MiB by EC2, 1x L4 by the table" in answer.line
    assert "g5.12xlarge has 4x A10G of 22888 MiB by EC2, 2x A10G by the table" in answer.line
    assert "vcpu" not in answer.machines["g5.xlarge"]


def test_one_refused_aws_api_does_not_affect_the_others(aws: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Denying) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_PRICING", url)
        lines = refresh.refresh(today=TODAY)
    reported = next(line for line in lines if line.startswith("aws: "))
    assert "on-demand prices: not allowed, needs pricing:GetProducts" in reported
    item = hardware.instance("g5.xlarge")
    assert (item.usd_per_hour, item.price_date, item.spot_usd_per_hour) == (1.006, "2026-07-20", 0.00001)
    assert "; spot: EC2 DescribeSpotPriceHistory" in item.price_source


def test_without_credentials_aws_is_not_queried() -> None:
    lines = refresh.refresh()
    assert "aws: not queried: there are no credentials (aws configure, or AWS_ACCESS_KEY_ID)" in lines
    assert unchanged()


def test_an_unknown_aws_profile_is_reported_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobodys")
    assert "aws: not queried: The config profile (nobodys) could not be found" in refresh.refresh()
