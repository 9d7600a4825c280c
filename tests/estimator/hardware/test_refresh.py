"""``--refresh``: what AWS and gpuhunt say is kept with its date and region; nothing can make it fail."""

from __future__ import annotations

import csv
import io
import json
import sys
import time
import zipfile
from collections.abc import Iterator
from datetime import date
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from estimator import hardware
from estimator.hardware import price_cache, refresh, refresh_aws, refresh_gpuhunt
from estimator.hardware.price_cache import ProviderAnswer
from tests.http_server import serving

TODAY = date(2026, 11, 20)
CLOSED = "http://127.0.0.1:9"  # the discard port: nothing listens


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No credentials, settings, cache or files of whoever runs the tests."""
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "FINETUNE_HARDWARE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("GPUHUNT_CATALOG_URL", CLOSED)
    hardware.forget()


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")


def offer(name: str, price: str, unit: str = "Hrs") -> str:
    """One product, as the Price List API writes it."""
    rate = {"unit": unit, "pricePerUnit": {"USD": price}, "beginRange": "0", "endRange": "Inf"}
    return json.dumps(
        {
            "product": {
                "productFamily": "Compute Instance",
                "attributes": {
                    "instanceType": name,
                    "regionCode": "eu-west-1",
                    "operatingSystem": "Linux",
                    "tenancy": "Shared",
                    "preInstalledSw": "NA",
                    "capacitystatus": "Used",
                },
                "sku": "ABC",
            },
            "serviceCode": "AmazonEC2",
            "terms": {
                "OnDemand": {"ABC.JRTC": {"priceDimensions": {"ABC.JRTC.6YS6": rate}, "sku": "ABC"}},
                "Reserved": {"ABC.X": {"priceDimensions": {"ABC.X.Y": rate | {"unit": "Quantity"}}}},
            },
            "publicationDate": "2026-11-18T00:00:00Z",
        }
    )


class PriceList(BaseHTTPRequestHandler):
    """The Price List API with two pages of prices for the first batch that is asked for."""

    asked: list[dict[str, Any]] = []  # noqa: RUF012 - what all requests of a test have asked for

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        PriceList.asked.append(body)
        wanted = body["Filters"][-1]["Value"].split(",")
        answer: dict[str, Any] = {"FormatVersion": "aws_v1", "PriceList": []}
        if "g5.xlarge" in wanted and "NextToken" not in body:
            answer |= {"PriceList": [offer("g5.xlarge", "1.123"), offer("m5.large", "0.1")], "NextToken": "n"}
        elif "g5.xlarge" in wanted:
            answer["PriceList"] = [offer("g6.xlarge", "0.9"), offer("g4dn.xlarge", "0")]
        self.reply(200, answer)

    def reply(self, code: int, value: dict[str, Any]) -> None:
        text = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/x-amz-json-1.1")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


class Denying(PriceList):
    def do_POST(self) -> None:
        self.reply(400, {"__type": "AccessDeniedException", "message": "no identity-based policy allows it"})


class Silent(PriceList):
    def do_POST(self) -> None:
        time.sleep(30)


@pytest.fixture
def aws(credentials: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """EC2 by moto, which has AWS's own answers on machine types; the price list by the server above."""
    from moto.server import ThreadedMotoServer

    PriceList.asked.clear()
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL_EC2", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    with serving(PriceList) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_PRICING", url)
        yield
    server.stop()


def test_what_aws_says_is_kept_with_date_region_and_source(aws: None) -> None:
    lines = refresh.refresh(today=TODAY)
    told = next(line for line in lines if line.startswith("aws: "))
    assert "2 on-demand prices" in told
    assert "spot prices" in told
    assert told.endswith("of eu-west-1")
    item = hardware.instance("g5.xlarge")
    assert item.usd_per_hour == 1.123
    assert item.spot_usd_per_hour == 0.00001  # moto's
    assert (item.region, item.price_date) == ("eu-west-1", "2026-11-20")
    assert item.price_source == "AWS Price List API GetProducts; EC2 DescribeSpotPriceHistory (cheapest zone)"
    assert hardware.instance("g4dn.xlarge").usd_per_hour == 0.526  # an offer of 0 is none
    assert hardware.instance("a2-highgpu-1g").usd_per_hour == 3.673385


def test_the_price_list_is_asked_for_linux_on_shared_machines_of_the_region(aws: None) -> None:
    refresh.refresh(today=TODAY)
    names = [item.name for item in hardware.instances() if item.cloud == "aws"]
    assert len(PriceList.asked) == len(names) // refresh_aws.BATCH + 2  # one batch has a second page
    for body in PriceList.asked:
        fixed = {item["Field"]: item["Value"] for item in body["Filters"][:-1]}
        assert fixed["regionCode"] == "eu-west-1"
        assert fixed["operatingSystem"] == "Linux"
        assert body["Filters"][-1]["Type"] == "ANY_OF"
        assert len(body["Filters"][-1]["Value"]) <= 1024


def test_the_table_agrees_with_ec2_on_every_machine_that_ec2_describes(aws: None) -> None:
    answer = refresh_aws.ask(hardware.catalogue(), time.monotonic() + 60, TODAY)
    assert "by the table" not in answer.line
    described = {name: cells for name, cells in answer.machines.items() if "vcpu" in cells}
    assert len(described) > 50
    for name, cells in described.items():
        item = hardware.instance(name)
        assert int(cells["vcpu"]) == item.vcpu
        assert float(cells["ram_GiB"]) * 2**30 == item.ram_bytes
        assert cells["fabric"] == item.fabric


def test_a_fact_that_the_table_lacks_is_filled_in_and_others_stay() -> None:
    lacks = {"cloud": "aws", "instance_type": "p3.2xlarge", "network_Gbps": "10", "spec_source": "EC2"}
    has = {"cloud": "aws", "instance_type": "p6-b200.48xlarge", "network_Gbps": "1600", "spec_source": "EC2"}
    price_cache.write(price_cache.path(), {"p3.2xlarge": lacks, "p6-b200.48xlarge": has})
    hardware.forget()
    assert hardware.instance("p3.2xlarge").network_gbps == 10
    assert hardware.instance("p3.2xlarge").source.endswith("; EC2")
    assert hardware.instance("p6-b200.48xlarge").network_gbps == 3200
    assert not hardware.instance("p6-b200.48xlarge").source.endswith("EC2")


def test_a_machine_whose_gpus_differ_is_told_and_not_believed(aws: None, tmp_path: Path) -> None:
    own = tmp_path / "own.csv"
    own.write_text("instance_type,gpu,gpu_count\ng5.xlarge,L4,1\ng5.12xlarge,A10G,2\n")
    answer = refresh_aws.ask(hardware.catalogue(own), time.monotonic() + 60, TODAY)
    assert "g5.xlarge has 1x A10G of 22888 MiB by EC2, 1x L4 by the table" in answer.line
    assert "g5.12xlarge has 4x A10G of 22888 MiB by EC2, 2x A10G by the table" in answer.line
    assert "vcpu" not in answer.machines["g5.xlarge"]


def test_one_refused_api_does_not_keep_the_others_from_answering(
    aws: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(Denying) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_PRICING", url)
        lines = refresh.refresh(today=TODAY)
    told = next(line for line in lines if line.startswith("aws: "))
    assert "on-demand prices: not allowed, needs pricing:GetProducts" in told
    item = hardware.instance("g5.xlarge")
    assert (item.usd_per_hour, item.price_date, item.spot_usd_per_hour) == (1.006, "2026-07-20", 0.00001)
    assert "; spot: EC2 DescribeSpotPriceHistory" in item.price_source


def unchanged() -> bool:
    return not price_cache.path().exists() and hardware.instance("g5.xlarge").usd_per_hour == 1.006


def test_without_credentials_aws_is_not_asked() -> None:
    lines = refresh.refresh()
    assert "aws: not asked: there are no credentials (aws configure, or AWS_ACCESS_KEY_ID)" in lines
    assert unchanged()


def test_offline_each_provider_says_so_in_one_line(
    credentials: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", CLOSED)
    lines = refresh.refresh()
    assert "aws: nothing changed; on-demand prices, spot prices, machine types: can't be reached" in lines
    assert [line.split(":")[0] for line in lines] == ["gpuhunt", "aws"]
    assert unchanged()


def test_missing_libraries_are_named(credentials: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.setitem(sys.modules, "gpuhunt", None)
    assert refresh.refresh() == (
        "gpuhunt: not asked: it is not installed (pip install gpuhunt)",
        "aws: not asked: boto3 is not installed (pip install 'metaflow-finetune[aws]')",
    )
    assert unchanged()


def test_an_unknown_profile_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobodys")
    assert "aws: not asked: The config profile (nobodys) could not be found" in refresh.refresh()


def test_a_server_that_never_answers_is_left_when_the_time_is_over(
    credentials: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gpuhunt", None)
    with serving(Silent) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        start = time.monotonic()
        lines = refresh.refresh(limit_s=2)
        took = time.monotonic() - start
    (told,) = (line for line in lines if line.startswith("aws: "))
    assert "nothing changed" in told
    assert "no answer within 2 s" in told or "no time left" in told  # on a busy machine
    assert took < 5
    assert unchanged()


def test_a_providers_bug_does_not_take_the_others_down(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> ProviderAnswer:
        raise KeyError("PriceList")

    cells = {
        "cloud": "gcp",
        "instance_type": "a2-highgpu-1g",
        "on_demand_usd_h": "3",
        "price_date": "2026-11-20",
    }
    fine = ProviderAnswer(line="fine", machines={"a2-highgpu-1g": cells})
    monkeypatch.setattr(refresh, "PROVIDERS", (("one", broken), ("two", lambda *_: fine)))
    assert refresh.refresh() == ("one: failed, nothing changed: KeyError: 'PriceList'", "two: fine")
    assert hardware.instance("a2-highgpu-1g").usd_per_hour == 3


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = {"cloud": "gcp", "instance_type": "a2-highgpu-1g", "on_demand_usd_h": "3"}
    answer = ProviderAnswer(line="fine", machines={"a2-highgpu-1g": cells})
    monkeypatch.setattr(refresh, "PROVIDERS", (("two", lambda *_: answer),))
    (tmp_path / "cache").write_text("a file where the folder should be")
    lines = refresh.refresh()
    assert lines[0] == "two: fine"
    assert lines[1].startswith(f"not kept: {price_cache.path()} can't be written: ")


def test_earlier_prices_stay_when_a_later_refresh_learns_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, price in (("g5.xlarge", "0.8"), ("g6.xlarge", "0.7")):
        cells = {"cloud": "aws", "instance_type": name, "on_demand_usd_h": price, "price_date": "2026-11-20"}
        answer = ProviderAnswer(line="fine", machines={name: cells})
        monkeypatch.setattr(refresh, "PROVIDERS", (("two", lambda *_, answer=answer: answer),))
        refresh.refresh()
    assert [hardware.instance(name).usd_per_hour for name in ("g5.xlarge", "g6.xlarge")] == [0.8, 0.7]
    assert [file.name for file in price_cache.path().parent.iterdir()] == ["prices.csv"]


class GpuhuntFiles(PriceList):
    """gpuhunt's bucket: a version and a zipped table for each provider."""

    def do_GET(self) -> None:
        provider = self.path.split("/")[1]
        body = self.archive(provider) if self.path.endswith(".zip") else b"20261119-7"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    @staticmethod
    def archive(provider: str) -> bytes:
        offers = {
            "gcp": [
                ("a2-highgpu-1g", "us-central1", "3.5", "1", "A100", "False"),
                ("a2-highgpu-1g", "europe-west4", "3.1", "1", "A100", "False"),
                ("a2-highgpu-1g", "us-central1", "1.5", "1", "A100", "True"),
                ("g2-standard-4", "us-central1", "0.1", "2", "L4", "False"),
            ],
            "lambdalabs": [("gpu_1x_a6000", "us-west-1", "0.8", "1", "A6000", "False")],
        }
        table = io.StringIO()
        names = (
            "instance_name location price cpu memory gpu_count gpu_name gpu_memory spot disk_size gpu_vendor"
        )
        writer = csv.writer(table)
        writer.writerow([*names.split(), "flags", "cpu_arch", "provider_data"])
        for name, region, price, count, gpu, spot in offers.get(provider, []):
            writer.writerow([name, region, price, 8, 80, count, gpu, 40, spot, "", "nvidia", "", "x86", "{}"])
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            archive.writestr(f"{provider}.csv", table.getvalue())
        return packed.getvalue()


def test_gpuhunts_prices_are_taken_in_the_region_of_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gpuhunt")
    with serving(GpuhuntFiles) as url:
        monkeypatch.setenv("GPUHUNT_CATALOG_URL", url)
        lines = refresh.refresh()
    assert "gpuhunt: prices of 1 of gcp, 1 of lambda" in lines
    item = hardware.instance("a2-highgpu-1g")
    assert (item.usd_per_hour, item.spot_usd_per_hour, item.region) == (3.5, 1.5, "us-central1")
    assert (item.price_date, item.price_source) == ("2026-11-19", "gpuhunt catalogue 20261119-7")
    assert hardware.instance("g2-standard-4").usd_per_hour == 0.706832  # another machine: it has 2 GPUs
    assert hardware.instance("gpu_1x_a6000").usd_per_hour == 0.8


def test_a_gpuhunt_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gpuhunt")

    class Hanging(GpuhuntFiles):
        def do_GET(self) -> None:
            time.sleep(30)

    with serving(Hanging) as url:
        monkeypatch.setenv("GPUHUNT_CATALOG_URL", url)
        answer = refresh_gpuhunt.ask(hardware.catalogue(), time.monotonic() + 2, TODAY)
    assert answer == ProviderAnswer(line="no answer in time, nothing changed")
