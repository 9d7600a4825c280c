"""Prices and instance facts from AWS: Price List API and EC2, through boto3."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from typing import Any

from estimator.aws_errors import failure_of
from estimator.hardware.catalogue import Catalogue
from estimator.hardware.catalogue.csv_files import Cells
from estimator.hardware.prices.cache import ProviderAnswer

REGION = "us-east-1"  # default region
# The Price List API has endpoints in few regions; this one serves all (AWS Billing user guide)
PRICING_REGION = "us-east-1"
CONNECT_S, READ_S, ATTEMPTS = 5, 15, 2
BATCH = 40  # instance types per filter, whose value is limited to 1,024 characters (botocore's service model)
ON_DEMAND = "AWS Price List API GetProducts"
SPOT = "EC2 DescribeSpotPriceHistory (cheapest zone)"
FACTS = "EC2 DescribeInstanceTypes"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Machine:
    """EC2's description of one instance type."""

    name: str
    vcpu: int
    ram_mib: int
    gpu: str | None
    gpu_count: int | None
    gpu_mib: int | None
    network_gbps: float | None  # sum over its network cards, without bursts
    efa: int


def fetch(catalogue: Catalogue, deadline: float, today: date) -> ProviderAnswer:
    """Request on-demand and spot prices in the user's region, and EC2's facts on instance types.

    The APIs are independent: one may fail. Ends soon after ``deadline`` (of time.monotonic()). Never raises
    errors of AWS.
    """
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        return ProviderAnswer(
            line="not queried: boto3 is not installed (pip install 'metaflow-finetune[aws]')"
        )
    names = [item.name for item in catalogue.instances if item.cloud == "aws"]
    config = Config(
        connect_timeout=CONNECT_S,
        read_timeout=READ_S,
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
    )
    try:
        session = boto3.Session()
        if session.get_credentials() is None:
            return ProviderAnswer(
                line="not queried: there are no credentials (aws configure, or AWS_ACCESS_KEY_ID)"
            )
        region = session.region_name or REGION
        pricing = session.client("pricing", region_name=PRICING_REGION, config=config)
        ec2 = session.client("ec2", region_name=region, config=config)
    except BotoCoreError as error:
        return ProviderAnswer(line=f"not queried: {error}")

    summaries: list[str] = []
    faults: dict[str, list[str]] = {}  # by reason

    def attempt(name: str, permission: str, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if time.monotonic() > deadline:
            faults.setdefault("time limit reached", []).append(name)
            return {}
        try:
            result = call()
        except (BotoCoreError, ClientError) as error:
            faults.setdefault(_fault(error, permission), []).append(name)
            return {}
        summaries.append(f"{len(result)} {name}")
        return result

    prices = attempt(
        "on-demand prices", "pricing:GetProducts", lambda: on_demand(pricing, names, region, deadline)
    )
    spots = attempt("spot prices", "ec2:DescribeSpotPriceHistory", lambda: spot(ec2, names, deadline))
    machines = attempt("machine types", "ec2:DescribeInstanceTypes", lambda: describe(ec2, names, deadline))
    cells = {name: _cells(name, catalogue, region, today, prices, spots, machines) for name in names}
    summary = f"{', '.join(summaries)} of {region}" if summaries else "nothing changed"
    differ = [text for machine in machines.values() if (text := _contradiction(machine, catalogue))]
    return ProviderAnswer(
        line="; ".join(
            [summary, *(f"{', '.join(parts)}: {reason}" for reason, parts in faults.items()), *differ]
        ),
        machines={name: row for name, row in cells.items() if row},
    )


def on_demand(pricing: Any, names: list[str], region: str, deadline: float) -> dict[str, float]:
    """Return USD per hour by instance type: Linux, shared tenancy, no license, no unused reservations."""
    terms = {
        "regionCode": region,
        "operatingSystem": "Linux",
        "tenancy": "Shared",
        "preInstalledSw": "NA",
        "capacitystatus": "Used",
    }
    fixed = [{"Type": "TERM_MATCH", "Field": key, "Value": value} for key, value in terms.items()]
    prices: dict[str, float] = {}
    for batch in _batches(names):
        instance_filter = {"Type": "ANY_OF", "Field": "instanceType", "Value": ",".join(batch)}
        pages = pricing.get_paginator("get_products").paginate(
            ServiceCode="AmazonEC2", Filters=[*fixed, instance_filter]
        )
        for page in _until(deadline, pages):
            for text in page["PriceList"]:
                offer = json.loads(text)
                name, price = offer["product"]["attributes"]["instanceType"], _hourly(offer)
                if name in batch and price is not None:
                    prices[name] = price
    return prices


def _hourly(offer: Any) -> float | None:
    """Return the hourly on-demand price of one offer of the price list, or None."""
    for term in offer.get("terms", {}).get("OnDemand", {}).values():
        for dimension in term["priceDimensions"].values():
            price = float(dimension["pricePerUnit"].get("USD", 0))
            if dimension["unit"] == "Hrs" and price > 0:
                return price
    return None


def spot(ec2: Any, names: list[str], deadline: float) -> dict[str, float]:
    """Return the current spot price in USD per hour by instance type, in the cheapest zone."""
    prices: dict[str, float] = {}
    pages = ec2.get_paginator("describe_spot_price_history").paginate(
        # A filter, as InstanceTypes fails if the region does not have one of them
        Filters=[{"Name": "instance-type", "Values": names}],
        ProductDescriptions=["Linux/UNIX", "Linux/UNIX (Amazon VPC)"],
        StartTime=time.time(),  # current prices only
    )
    for page in _until(deadline, pages):
        for entry in page["SpotPriceHistory"]:
            name, price = entry["InstanceType"], float(entry["SpotPrice"])
            if price > 0:
                prices[name] = min(price, prices.get(name, price))
    return prices


def describe(ec2: Any, names: list[str], deadline: float) -> dict[str, _Machine]:
    """Return EC2's facts by instance type, without types that the region does not have."""
    pages = ec2.get_paginator("describe_instance_types").paginate(
        Filters=[{"Name": "instance-type", "Values": names}]
    )
    machines = {}
    for page in _until(deadline, pages):
        for entry in page["InstanceTypes"]:
            gpus = entry.get("GpuInfo", {}).get("Gpus", [])
            network = entry["NetworkInfo"]
            rates = [card.get("BaselineBandwidthInGbps") for card in network.get("NetworkCards", [])]
            machines[entry["InstanceType"]] = _Machine(
                name=entry["InstanceType"],
                vcpu=entry["VCpuInfo"]["DefaultVCpus"],
                ram_mib=entry["MemoryInfo"]["SizeInMiB"],
                gpu=gpus[0]["Name"] if gpus else None,
                gpu_count=sum(gpu["Count"] for gpu in gpus) if gpus else None,
                gpu_mib=gpus[0]["MemoryInfo"]["SizeInMiB"] if gpus else None,
                network_gbps=sum(rates) if rates and None not in rates else None,
                efa=network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0),
            )
    return machines


def _until(deadline: float, pages: Any) -> Iterator[Any]:
    for page in pages:
        yield page
        if time.monotonic() > deadline:
            return


def _batches(names: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(names), BATCH):
        yield names[start : start + BATCH]


def _cells(
    name: str,
    catalogue: Catalogue,
    region: str,
    today: date,
    prices: dict[str, float],
    spots: dict[str, float],
    machines: dict[str, _Machine],
) -> Cells:
    """Return the facts about one instance type as a row of the instance table; empty if there are none."""
    cells: Cells = {}
    sources = []
    if name in prices:
        cells["on_demand_usd_h"] = f"{prices[name]:.10g}"
        sources.append(ON_DEMAND)
    if name in spots:
        cells["spot_usd_h"] = f"{spots[name]:.10g}"
        sources.append(SPOT)
    if sources:
        cells |= {"price_region": region, "price_date": str(today), "price_source": "; ".join(sources)}
    machine = machines.get(name)
    if machine is not None and not _contradiction(machine, catalogue):
        cells |= {
            "vcpu": str(machine.vcpu),
            "ram_GiB": f"{machine.ram_mib / 1024:g}",
            "fabric": f"EFA x{machine.efa}" if machine.efa else "ENA",
            "spec_source": f"{FACTS}, {region}, {today}",
        }
        if machine.network_gbps:
            cells["network_Gbps"] = f"{machine.network_gbps:g}"
    return {"cloud": "aws", "instance_type": name} | cells if cells else {}


def _contradiction(machine: _Machine, catalogue: Catalogue) -> str:
    """Describe how EC2's GPUs differ from those of the catalogue, which takes precedence.

    Memory sizes may differ slightly: for an L4, EC2 reports 22,888 MiB, the driver 23,034.
    """
    item = catalogue.find_instance(machine.name)
    if item is None or machine.gpu is None or machine.gpu_mib is None or item.gpu_count == 0:
        return ""
    gpu = catalogue.find_gpu_of_size(machine.gpu, machine.gpu_mib)
    ec2_facts = f"{machine.name} has {machine.gpu_count}x {machine.gpu} of {machine.gpu_mib} MiB by EC2"
    if gpu is None or gpu.name != item.gpu or machine.gpu_count != item.gpu_count:
        return f"{ec2_facts}, {item.gpu_count}x {item.gpu} by the table"
    return ""


def _fault(error: Exception, permission: str) -> str:
    """Describe a failed call in one clause."""
    failure = failure_of(error)
    if failure.kind == "unreachable":
        return "cannot be reached"
    if failure.kind == "denied":
        return f"not allowed, needs {permission}"
    return failure.message if failure.kind == "other" else f"{failure.code}: {failure.message}"
