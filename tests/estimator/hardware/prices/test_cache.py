"""Refreshed prices over the table: which of the two counts, and a damaged cache."""

from pathlib import Path

from estimator import hardware
from estimator.hardware.prices import cache


def cached(text: str) -> hardware.Catalogue:
    file = cache.path()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        "cloud,instance_type,on_demand_usd_h,spot_usd_h,price_region,price_date,price_source\n" + text
    )
    hardware.clear_cache()
    return hardware.catalogue()


def test_a_refreshed_price_replaces_one_that_is_not_newer() -> None:
    cached_table = cached(
        "aws,p5.48xlarge,50,20,eu-west-1,2026-08-01,API\n"
        "aws,g5.xlarge,1,0.4,us-east-1,2026-01-01,API\n"
        "gcp,a2-highgpu-1g,3,,us-central1,2026-08-09,API\n"
    )
    new = cached_table.instance("p5.48xlarge")
    assert (new.usd_per_hour, new.spot_usd_per_hour, new.region, new.price_source) == (
        50,
        20,
        "eu-west-1",
        "API",
    )
    assert cached_table.instance("g5.xlarge").usd_per_hour == 1.006
    assert cached_table.instance("a2-highgpu-1g").usd_per_hour == 3
    assert cached_table.instance("a2-highgpu-1g").spot_usd_per_hour == 1.92802


def test_of_two_prices_of_one_day_the_refreshed_one_is_used() -> None:
    day = hardware.instance("p4d.24xlarge").price_date
    cached_table = cached(f"aws,p4d.24xlarge,19,7,us-east-1,{day},API\n")
    assert cached_table.instance("p4d.24xlarge").usd_per_hour == 19


def test_a_refreshed_spot_price_does_not_change_the_date_of_the_on_demand_price() -> None:
    item = cached("aws,p5.48xlarge,,20,us-east-1,2026-08-01,EC2 API\n").instance("p5.48xlarge")
    assert (item.usd_per_hour, item.spot_usd_per_hour, item.price_date) == (55.04, 20, "2026-07-20")
    assert item.price_source.endswith("; spot: EC2 API us-east-1 2026-08-01")


def test_a_damaged_cache_is_reported_and_shipped_prices_remain(own: Path) -> None:
    cached_table = cached("aws,p5.48xlarge,fifty,,,,\n")
    assert cached_table.instance("p5.48xlarge").usd_per_hour == 55.04
    assert len(cached_table.warnings) == 1
    assert "'fifty' is not a number" in cached_table.warnings[0]


def test_a_user_row_overrides_a_refreshed_price(own: Path) -> None:
    cached("aws,p5.48xlarge,50,20,us-east-1,2026-08-01,API\n")
    own.write_text("instance_type,on_demand_usd_h\np5.48xlarge,31\n")
    assert hardware.catalogue(own).instance("p5.48xlarge").usd_per_hour == 31


def test_cached_facts_fill_blank_cells_only() -> None:
    lacks = {"cloud": "aws", "instance_type": "p3.2xlarge", "network_Gbps": "10", "spec_source": "EC2"}
    has = {"cloud": "aws", "instance_type": "p6-b200.48xlarge", "network_Gbps": "1600", "spec_source": "EC2"}
    cache.write(cache.path(), {"p3.2xlarge": lacks, "p6-b200.48xlarge": has})
    hardware.clear_cache()
    assert hardware.instance("p3.2xlarge").network_gbps == 10
    assert hardware.instance("p3.2xlarge").source.endswith("; EC2")
    assert hardware.instance("p6-b200.48xlarge").network_gbps == 3200
    assert not hardware.instance("p6-b200.48xlarge").source.endswith("EC2")
