"""Servers that answer as the clouds' price lists do."""

from __future__ import annotations

import json
import time
from datetime import date
from http.server import BaseHTTPRequestHandler
from typing import Any

from estimator import hardware
from estimator.hardware.prices import cache

TODAY = date(2026, 11, 20)


CLOSED = "http://127.0.0.1:9"  # the discard port: nothing listens


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


def unchanged() -> bool:
    """Whether nothing was learned: no cache, and the table's own price."""
    return not cache.path().exists() and hardware.instance("g5.xlarge").usd_per_hour == 1.006
