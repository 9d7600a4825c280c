"""Prices from gpuhunt's published catalogues."""

from __future__ import annotations

import csv
import io
import time
import zipfile

import pytest

from estimator import hardware
from estimator.hardware.prices import gpuhunt, refresh
from estimator.hardware.prices.cache import ProviderAnswer
from tests.estimator.hardware.price_servers import TODAY, PriceList
from tests.http_server import serving


class GpuhuntFiles(PriceList):
    """gpuhunt's bucket: a version and a zipped table for each provider."""

    def do_GET(self) -> None:  # noqa: N802 - http.server's name
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


def test_gpuhunt_prices_are_read_for_the_region_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_gpuhunt_process_that_never_ends_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gpuhunt")

    class Hanging(GpuhuntFiles):
        def do_GET(self) -> None:  # noqa: N802 - http.server's name
            time.sleep(30)

    with serving(Hanging) as url:
        monkeypatch.setenv("GPUHUNT_CATALOG_URL", url)
        answer = gpuhunt.fetch(hardware.catalogue(), time.monotonic() + 2, TODAY)
    assert answer == ProviderAnswer(line="time limit reached, nothing changed")
